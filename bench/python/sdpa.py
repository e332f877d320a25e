"""Tilewise against torch's own scaled_dot_product_attention on the CPU, interleaved in one process.

For every case the same tensors [b, h, s, d] go to F.scaled_dot_product_attention with and without tilewise.torch.sdpa;
forward alone, and forward with backward. The two take turns, and a turn begins with untimed calls. `_ms` is the fastest of
all calls, since other work on the machine only ever adds time, `_median_ms` the median. `ratio` is torch's fastest time over
Tilewise's: above 1, Tilewise is faster. The load average is noted before every case; on a quiet machine it is that of this
program.
"""

import itertools
import math
import os
import statistics

import torch
import torch.nn.functional as F
from common import interleaved, machine, parser, write

import tilewise
import tilewise.torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def case(dtype, d, s, causal, backward, seconds):
    heads = 8 if s <= 2048 else 2
    q, k, v = (torch.randn(1, heads, s, d, dtype=DTYPES[dtype], requires_grad=backward) for _ in range(3))
    dout = torch.randn(1, heads, s, d, dtype=DTYPES[dtype])

    def run():
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad(o, (q, k, v), dout) if backward else (o,)

    switch = tilewise.torch.sdpa

    def ours():
        if not switch.enabled:
            switch.enable()
        return run()

    def theirs():
        if switch.enabled:
            switch.disable()
        return run()

    before = switch.calls
    pairs = list(zip(ours(), theirs()))
    if switch.calls != before + 1:
        raise SystemExit("Tilewise did not take the call")
    error = max((x.float() - y.float()).abs().max().item() for x, y in pairs)
    load = os.getloadavg()[0]
    times = interleaved({"tilewise": ours, "torch": theirs}, seconds, least=3)
    fastest = {name: min(values) for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    flops = 4 * heads * s * s * d * (0.5 if causal else 1) * (3.5 if backward else 1)
    return {
        "dtype": dtype, "d": d, "s": s, "heads": heads, "causal": causal, "pass": "forward+backward" if backward else "forward",
        "tilewise_ms": fastest["tilewise"] * 1e3, "torch_ms": fastest["torch"] * 1e3,
        "ratio": fastest["torch"] / fastest["tilewise"], "tilewise_median_ms": median["tilewise"] * 1e3,
        "torch_median_ms": median["torch"] * 1e3, "ratio_of_medians": median["torch"] / median["tilewise"],
        "tilewise_gflops": flops / fastest["tilewise"] / 1e9, "torch_gflops": flops / fastest["torch"] / 1e9,
        "largest_difference": error, "calls": len(times["torch"]), "load_average": load,
    }  # fmt: skip


def summary(rows):
    """Geometric mean, least and largest ratio for each dtype and pass."""
    groups = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["pass"]), []).append(row["ratio"])
    return [
        {"dtype": dtype, "pass": name, "cases": len(ratios), "geometric_mean": math.exp(statistics.mean(map(math.log, ratios))),
         "least": min(ratios), "largest": max(ratios)}
        for (dtype, name), ratios in groups.items()
    ]  # fmt: skip


def main():
    p = parser(__doc__.split("\n")[0], "python_sdpa.json")
    p.add_argument("--seconds", type=float, default=3.0, help="per case")
    arguments = p.parse_args()
    lengths = (256,) if arguments.quick else (512, 2048, 8192)
    seconds = 0.2 if arguments.quick else arguments.seconds
    report = {"machine": machine(), "method": __doc__, "rows": []}
    for backward, s, dtype, d, causal in itertools.product((False, True), lengths, DTYPES, (64, 128), (False, True)):
        row = case(dtype, d, s, causal, backward, seconds)
        report["rows"].append(row)
        print("%-16s %-8s s=%-5d d=%-3d %-6s tilewise %9.3f ms  torch %9.3f ms  ratio %.2f" % (
            row["pass"], dtype, s, d, "causal" if causal else "full", row["tilewise_ms"], row["torch_ms"], row["ratio"]), flush=True)  # fmt: skip
    report["summary"] = summary(report["rows"])
    for group in report["summary"]:
        print("%(dtype)-8s %(pass)-16s geometric mean %(geometric_mean).2f, %(least).2f to %(largest).2f" % group)
    report["load_average_after"] = machine()["load_average"]
    if not arguments.quick:
        write(arguments.output, report)


if __name__ == "__main__":
    main()
