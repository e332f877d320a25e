#!/usr/bin/env python3
"""Times Tilewise beside torch's fused attention backends on one GPU: one process, the same tensors, taking turns.

Every implementation of a cell is captured in a CUDA graph of several calls; the graphs are replayed in turn, round after
round, so that clock and power drift hit all alike, and the median round counts. Inputs are random normal. The ceilings are
measured in the same run: a copy at its start, a matrix product before every eighth cell, of which the median counts. `ratio`
is Tilewise's speed over the best peer's; on an H200 `fa3` is its speed over FlashAttention-3's figure from
bench/cases/fa3_h200.json, scaled by this run's matrix product. `sm80`: the rows for every GPU since Ampere, in the same turns.

    PYTHONPATH=python TILEWISE_LIBRARY=build/src/libtilewise.so python3 tools/gpu_bench.py [--quick] [--only REGEX]
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DTYPES = ("bf16", "f16", "f32")
TOKENS, WIDTH = 16384, 2048  # batch * length and heads * head_dim of the grid
PEERS = ("cudnn", "flash", "efficient")
# attn_mask: its problem text, its full dimensions of b, h, s, s, its type. "padding" hides the last keys of each sequence, "mask" a tenth of all pairs.
BIASES = {"bias": ("bias=bf16:hqk", "hqk", "bf16"), "mask": ("mask=qk", "qk", "bool"), "padding": ("mask=bk", "bk", "bool"),
          "dbias": ("bias=bf16:hqk dbias", "hqk", "bf16")}  # fmt: skip
EXTRAS = ("over_best", "over_fa3", "sm80_over_flash", "kept")  # further ratios of a cell, where it has them


def skip(reason):
    print("SKIPPED: %s" % reason)
    sys.exit(0)


# ---- cells: what is measured ----


def cell(group, direction, dtype, b, hq, hk, sq, sk, d, **options):
    options = {"causal": False, "dropout": 0.0, "deterministic": False, "bias": "", **options}
    mask = options["bias"] or ("causal" if options["causal"] else "full")
    name = "%s %s %s b%d h%d%s s%d%s d%d %s" % (
        group, direction, dtype, b, hq, "/%d" % hk if hk != hq else "", sq, "" if sk == sq else "x%d" % sk, d, mask)  # fmt: skip
    return {"name": name, "group": group, "pass": direction, "dtype": dtype, "b": b, "hq": hq, "hk": hk, "sq": sq, "sk": sk,
            "d": d, **options}  # fmt: skip


def square(group, direction, dtype, s, d, **options):
    h = WIDTH // d
    return cell(group, direction, dtype, max(TOKENS // s, 1), h, h, s, s, d, **options)


def all_cells(quick):
    cells = []
    lengths = (1024, 4096, 16384) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    for dtype in ("bf16",) if quick else ("bf16", "f16"):
        for d in (64, 128, 256):
            for causal in (False, True):
                for s in lengths:
                    for direction in ("fwd", "bwd"):
                        cells.append(square("grid", direction, dtype, s, d, causal=causal))
    for d in (64, 128) if quick else (64, 128, 256):
        for causal in (False, True):
            for s in (4096,) if quick else (1024, 4096, 8192):
                for direction in ("fwd", "bwd"):
                    cells.append(square("float32", direction, "f32", s, d, causal=causal))
    for d in (64, 128, 256):
        for causal in (False,) if quick else (False, True):
            for s in (4096,) if quick else (2048, 16384):
                for direction in ("fwd", "bwd"):
                    cells.append(square("dropout", direction, "bf16", s, d, causal=causal, dropout=0.1))
            for s in (4096,) if quick else (2048, 4096, 8192, 16384):
                cells.append(square("deterministic", "bwd", "bf16", s, d, causal=causal, deterministic=True))
    for causal in (False, True):
        for direction in ("fwd", "bwd"):
            cells.append(cell("gqa", direction, "bf16", 2, 64, 8, 8192, 8192, 128, causal=causal))
    for d in (64, 128, 256):
        for bias in list(BIASES)[:2] if quick else BIASES:
            for direction in ("bwd",) if bias == "dbias" else ("fwd", "bwd"):
                cells.append(square("mask", direction, "bf16", 4096, d, bias=bias))
    decode = ((1, 4096), (1, 131072), (64, 8192)) if quick else (
        (1, 4096), (1, 16384), (1, 131072), (4, 8192), (16, 4096), (64, 8192), (128, 2048))  # fmt: skip
    cells += [cell("decode", "fwd", "bf16", b, 32, 8, 1, sk, 128) for b, sk in decode]
    return cells


def flops(c):
    forward = 4 * c["b"] * c["hq"] * c["sq"] * c["sk"] * c["d"] * (0.5 if c["causal"] else 1)
    return forward * (2.5 if c["pass"] == "bwd" else 1)


# ---- implementations ----


def implementations(c, torch, tilewise):
    """name -> function(q, k, v) -> o; q [b, s, h, d]. "tilewise" first; "tilewise/plain": the cell without its option."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def ours(dropout=c["dropout"], deterministic=c["deterministic"]):
        def run(q, k, v):
            return tilewise.attention(q, k, v, causal=c["causal"], dropout_p=dropout, deterministic=deterministic, bias=c.get("tensor"))

        return run

    def peer(backend):
        def run(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                o = F.scaled_dot_product_attention(q, k, v, attn_mask=c.get("tensor"), is_causal=c["causal"], dropout_p=c["dropout"],
                                                   enable_gqa=c["hq"] != c["hk"])  # fmt: skip
            return o.transpose(1, 2)

        return run

    found = {"tilewise": ours()}
    if c["dropout"]:
        found["tilewise/plain"] = ours(dropout=0.0)
    if c["deterministic"]:
        found["tilewise/plain"] = ours(deterministic=False)
    if c["group"] == "grid" and c["sq"] >= 1024:
        found["tilewise/sm80"] = Sm80(c["causal"], tilewise)
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
                "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip
    for name, backend in backends.items():
        if c["dtype"] == "f32" and name != "efficient":
            continue  # they take 16 bits only
        if c["hq"] != c["hk"] and name == "efficient":
            continue  # takes equal heads only
        if c["bias"] and name == "flash":
            continue  # takes no mask
        found[name] = peer(backend)
    return found


class Sm80:
    """The rows that take every problem on every GPU, where the table has a faster one."""

    def __init__(self, causal, tilewise):
        self.causal, self.tilewise = causal, tilewise

    def __call__(self, q, k, v):
        return self.tilewise.attention(q, k, v, causal=self.causal, kernel="forward_sm80")

    def backward(self, q, k, v, dout):
        """call() of the backward pass alone: autograd would take the first row of the table."""
        o, lse = self.tilewise.attention(q, k, v, causal=self.causal, return_lse=True, kernel="forward_sm80")
        return lambda _: self.tilewise.attention_backward(dout, q, k, v, o, lse, causal=self.causal, kernel="backward_sm80")


class Timed:
    """One implementation's calls as a graph, or, where it cannot be captured, as they are."""

    def __init__(self, torch, call, calls, capture):
        self.torch, self.call, self.calls, self.graph, self.times = torch, call, calls, None, []
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        if not capture:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin()
            try:
                for n in range(calls):
                    call(n)
            finally:
                graph.capture_end()
            self.graph = graph
        except Exception:  # noqa: BLE001 - whatever stops a peer's capture, its time without one is still wanted
            torch.cuda.synchronize()

    def run(self):
        start, end = self.events
        start.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for n in range(self.calls):
                self.call(n)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.calls


def prepare(c, torch, function, sets, deterministic_torch):
    """call(n) for the n-th of the input sets; the forward pass of a backward cell has been run."""
    if c["pass"] == "fwd":
        return lambda n: function(*sets[n % len(sets)][:3])
    q, k, v, dout = sets[0]
    if isinstance(function, Sm80):
        return function.backward(q, k, v, dout)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o = function(*leaves)
    if c["bias"] == "dbias":
        leaves.append(c["tensor"])

    def call(_):
        with torch.enable_grad():
            torch.use_deterministic_algorithms(deterministic_torch, warn_only=True)
            grads = torch.autograd.grad(o, leaves, dout, retain_graph=True)
            torch.use_deterministic_algorithms(False)
        return grads

    return call


def attn_mask(c, torch):
    _, dims, kind = BIASES[c["bias"]]
    sizes = [size if name in dims else 1 for name, size in zip("bhqk", (c["b"], c["hq"], c["sq"], c["sk"]))]
    if c["bias"] == "padding":
        return (torch.arange(c["sk"], device="cuda") < torch.randint(c["sk"] // 2, c["sk"] + 1, (c["b"], 1), device="cuda")).view(sizes)
    x = torch.randn(sizes, device="cuda")
    return x > -1.2816 if kind == "bool" else x.to(torch.bfloat16).requires_grad_(c["bias"] == "dbias")


def measure(c, torch, tilewise, seconds):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[c["dtype"]]
    kv_bytes = 2 * c["b"] * c["sk"] * c["hk"] * c["d"] * dtype.itemsize
    # Decoding reads its keys once: rotate through more than the second-level cache holds.
    count = max(1, math.ceil(256e6 / kv_bytes)) if c["group"] == "decode" else 1

    def random(s, h):
        return torch.randn(c["b"], s, h, c["d"], device="cuda", dtype=dtype)

    sets = [(random(c["sq"], c["hq"]), random(c["sk"], c["hk"]), random(c["sk"], c["hk"]),
             random(c["sq"], c["hq"]) if c["pass"] == "bwd" else None) for _ in range(count)]  # fmt: skip
    problem, c = c, dict(c, tensor=attn_mask(c, torch)) if c["bias"] else c
    timed, failed, first = {}, {}, {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for name, function in implementations(c, torch, tilewise).items():
            try:
                call = prepare(c, torch, function, sets, c["deterministic"] and name in PEERS)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    got = call(0)
                    first[name] = [x.float() for x in (got if isinstance(got, tuple) else (got,))]
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for n in range(3):
                        call(n)
                    end.record()
                    end.synchronize()
                    # About 2 ms a graph, at most 64 calls; every input set at least once.
                    calls = min(max(round(2 / max(begin.elapsed_time(end) / 3, 1e-3)), 1, count), max(64, count))
                    # torch keeps the dropout state of an eager forward pass on the host, where a graph's backward pass
                    # does not look for it: illegal address (torch 2.11).
                    capture = not (c["dropout"] and c["pass"] == "bwd" and name in PEERS)
                    timed[name] = Timed(torch, call, calls, capture)
            except Exception as error:  # noqa: BLE001 - a peer that refuses is a result
                failed[name] = "%s: %s" % (type(error).__name__, str(error).strip().split("\n")[0][:200])
                if name == "tilewise":
                    break
        if "tilewise" in timed:
            for t in timed.values():  # past the first launches and the idle clock
                t.run()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until or len(timed["tilewise"].times) < 5:
                for t in timed.values():
                    t.times.append(t.run())
    torch.cuda.synchronize()
    result = dict(problem, flops=flops(c), results={}, failed=failed)
    for name, t in timed.items():
        ms = statistics.median(t.times)
        row = {"ms": round(ms, 5), "tflops": round(flops(c) / ms * 1e-9, 1), "rounds": len(t.times), "graph": t.graph is not None}
        if c["group"] == "decode":
            row["gb_s"] = round(kv_bytes / ms * 1e-6, 0)
        result["results"][name] = row
    peers = [n for n in PEERS if n in timed]
    if "tilewise" in timed and peers:
        ours = result["results"]["tilewise"]["ms"]
        result["best_peer"] = min(peers, key=lambda n: result["results"][n]["ms"])
        result["ratio"] = round(result["results"][result["best_peer"]]["ms"] / ours, 4)
        if not c["dropout"]:  # a wrong answer is no speed: largest difference over largest value, against the best peer
            result["difference"] = max(
                ((x - y).abs().max() / y.abs().max().clamp_min(1e-6)).item()
                for x, y in zip(first["tilewise"], first[result["best_peer"]]))  # fmt: skip
    if "tilewise/sm80" in timed and "flash" in timed:
        result["sm80_over_flash"] = round(result["results"]["flash"]["ms"] / result["results"]["tilewise/sm80"]["ms"], 4)
    if "tilewise/plain" in timed:
        result["kept"] = round(result["results"]["tilewise/plain"]["ms"] / result["results"]["tilewise"]["ms"], 4)
    return result


def kernel_of(c, tilewise):
    """The row that the library chooses, from the problem's text."""
    text = "%s %s cuda b=%d hq=%d hk=%d sq=%d sk=%d d=%d%s%s%s" % (
        c["pass"], c["dtype"], c["b"], c["hq"], c["hk"], c["sq"], c["sk"], c["d"], " causal" if c["causal"] else "",
        " dropout=%g" % c["dropout"] if c["dropout"] else "", " deterministic" if c["deterministic"] else "")  # fmt: skip
    if c["bias"]:
        text += " " + BIASES[c["bias"]][0]
    if c["pass"] == "fwd":
        text += " no_lse"
    try:
        return tilewise.plan(text).kernel
    except Exception as error:  # noqa: BLE001
        return "none"


def fa3_scale(gpu, ceilings_):
    """FlashAttention-3's figures and this run's speed over that of theirs; None on another GPU."""
    with open(os.path.join(ROOT, "bench", "cases", "fa3_h200.json")) as file:
        figures = json.load(file)
    return (figures, ceilings_["matmul_bf16_tflops"] / figures["matmul_bf16_tflops"]) if gpu == figures["gpu"] else None


def add_fa3(r, fa3):
    if fa3 is None or r["group"] != "grid" or r["dtype"] != "bf16" or "tilewise" not in r["results"]:
        return
    figures, scale = fa3
    row = figures["tflops"].get("%s d%d %s" % (r["pass"], r["d"], "causal" if r["causal"] else "full"))
    if row and r["sq"] in figures["lengths"]:
        r["fa3_tflops_scaled"] = round(row[figures["lengths"].index(r["sq"])] * scale, 1)
        r["over_fa3"] = round(r["results"]["tilewise"]["tflops"] / r["fa3_tflops_scaled"], 4)
        r["over_best"] = min(r["over_fa3"], r.get("ratio", r["over_fa3"]))


def median_ms(torch, call, repeats=20):
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def matmul_tflops(torch, dtype, repeats=20, n=8192):
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    return round(2 * n**3 / median_ms(torch, lambda: a @ b, repeats) * 1e-9, 1)


def ceilings(torch):
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.numel() * 4 / median_ms(torch, lambda: y.copy_(x)) * 1e-6
    return {"matmul_f32_tflops": matmul_tflops(torch, torch.float32, 5), "copy_gb_s": round(copy, 0)}


# ---- reports ----


def line(r):
    text = "%-52s" % r["name"]
    for name in ("tilewise", "tilewise/plain", "tilewise/sm80") + PEERS:
        if name in r["results"]:
            row = r["results"][name]
            speed = "%4.0f GB/s %6.1f us" % (row["gb_s"], row["ms"] * 1e3) if "gb_s" in row else "%5.0f" % row["tflops"]
            text += "  %s %s%s" % (name.replace("tilewise", "tw"), speed, "" if row["graph"] else "*")
    if "ratio" in r:
        text += "  ratio %.3f" % r["ratio"]
    if "sm80_over_flash" in r:
        text += "  sm80/flash %.3f" % r["sm80_over_flash"]
    if "kept" in r:
        text += "  kept %.3f" % r["kept"]
    if r.get("difference", 0) > 0.05:
        text += "  DIFFERS %.3g" % r["difference"]
    for name, why in r["failed"].items():
        if name.startswith("tilewise"):
            text += "  %s FAILED %s" % (name, why)
    return text + "  [%s]" % r["kernel"]


def geomean(values):
    values = list(values)
    return round(math.exp(sum(map(math.log, values)) / len(values)), 4) if values else None


def summary(rows):
    """Geometric means of the ratios by group, pass, element type and head dim; against each peer alone, too."""
    found = {}
    for r in rows:
        if "ratio" not in r:
            continue
        ours = r["results"]["tilewise"]["ms"]
        keys = ["%s %s" % (r["group"], r["pass"]), "%s %s %s d%d" % (r["group"], r["pass"], r["dtype"], r["d"])]
        for key in keys:
            entry = found.setdefault(key, {"best": [], "worst": [], **{n: [] for n in EXTRAS + PEERS}})
            entry["best"].append(r["ratio"])
            entry["worst"].append(r.get("over_best", r["ratio"]))
            for name in EXTRAS:
                if name in r:
                    entry[name].append(r[name])
            for name in PEERS:
                if name in r["results"]:
                    entry[name].append(r["results"][name]["ms"] / ours)
    return {key: {**{n: geomean(v) for n, v in entry.items() if v}, "cells": len(entry["best"]), "worst": min(entry["worst"])}
            for key, entry in sorted(found.items())}  # fmt: skip


def picture(path, report):
    """Speed over length: a panel for each pass and head dim; full lines without a mask, dashed lines causal."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    rows = [r for r in report["cells"] if r["group"] == "grid" and r["dtype"] == "bf16"]
    dims = sorted({r["d"] for r in rows})
    if not dims:
        return
    colours = {"tilewise": "#c0392b", "cudnn": "#2c7fb8", "flash": "#41ab5d", "efficient": "#969696"}
    figure, axes = plt.subplots(2, len(dims), figsize=(4.2 * len(dims), 7), sharex=True, squeeze=False)
    for i, direction in enumerate(("fwd", "bwd")):
        for j, d in enumerate(dims):
            axis = axes[i][j]
            for name, colour in colours.items():
                for causal, style in ((False, "-"), (True, "--")):
                    points = sorted((r["sq"], r["results"][name]["tflops"]) for r in rows
                                    if r["pass"] == direction and r["d"] == d and r["causal"] == causal and name in r["results"])  # fmt: skip
                    if points:
                        axis.plot(*zip(*points), style, color=colour, marker=".", label=name if not causal else None,
                                  linewidth=2 if name == "tilewise" else 1.2)  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.25)
            axis.set_title("%s, head_dim %d" % ("forward" if direction == "fwd" else "backward", d), fontsize=10)
    axes[0][0].set_ylabel("TFLOP/s")
    axes[1][0].set_ylabel("TFLOP/s")
    for axis in axes[1]:
        axis.set_xlabel("sequence length (batch x length = %d)" % TOKENS)
    figure.suptitle("%s, bfloat16; matrix product %.0f TFLOP/s in the same run; causal dashed"
                    % (report["gpu"], report["ceilings"]["matmul_bf16_tflops"]))  # fmt: skip
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0.965), ncol=len(colours), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.965))
    figure.savefig(path, dpi=110)
    print("wrote", path)


def save(report, products, path):
    report["ceilings"]["matmul_bf16_tflops"] = statistics.median(products)
    report["ceilings"]["matmul_bf16_samples"] = products
    fa3 = fa3_scale(report["gpu"], report["ceilings"])
    for r in report["cells"]:
        add_fa3(r, fa3)
    report["summary"] = summary(report["cells"])
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as file:
        json.dump(report, file, indent=1)
        file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the cells, fewer rounds")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name matches, as printed in the first column")
    parser.add_argument("--seconds", type=float, default=0, help="of rounds a cell (default 0.15, quick 0.06)")
    parser.add_argument("--out", default=os.path.join(ROOT, "bench", "results", "gpu.json"), help="JSON file; the picture goes beside it")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    arguments = parser.parse_args()
    cells = [c for c in all_cells(arguments.quick) if re.search(arguments.only, c["name"])]
    if arguments.list:
        print("\n".join(c["name"] for c in cells))
        return
    try:
        import torch
    except ImportError:
        skip("torch is not installed")
    if not torch.cuda.is_available():
        skip("torch finds no GPU")
    import tilewise

    if not any(k.backend == "cuda" and k.available for k in tilewise.kernels()):
        skip("the library has no CUDA row for this GPU: %s" % tilewise.machine().strip().split("\n")[-1])
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    start = time.perf_counter()
    report = {
        "gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d %H:%M"), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "tilewise": tilewise.__version__,
        "method": "CUDA graphs of several calls, replayed in turn; median; random normal inputs; forward without lse; "
                  "fwd = 4 b hq sq sk d FLOP, half when causal, bwd 2.5 times that",
        "ceilings": ceilings(torch), "cells": [],
    }  # fmt: skip
    print("%s, torch %s, cuDNN %s; ceilings %s" % (report["gpu"], torch.__version__, report["cudnn"], report["ceilings"]))
    print("TFLOP/s; * = not in a graph; ratio: to the best peer", flush=True)
    seconds = arguments.seconds or (0.06 if arguments.quick else 0.15)
    # A cold card is faster: the matrix product is measured all through the run, like the cells, and its median counts.
    products = []
    for n, c in enumerate(cells):
        if n % 8 == 0:
            products.append(matmul_tflops(torch, torch.bfloat16))
            print("matrix product, bf16: %.1f" % products[-1])
        r = measure(c, torch, tilewise, seconds)
        r["kernel"] = kernel_of(c, tilewise)
        report["cells"].append(r)
        print(line(r), flush=True)
        torch.cuda.empty_cache()
        report["seconds"] = round(time.perf_counter() - start, 1)
        if n % 8 == 7 or n == len(cells) - 1:
            save(report, products, arguments.out)  # a run that is stopped leaves what it has
    print("ceilings", report["ceilings"])
    print("\nTilewise's speed over each peer's, geometric mean; `kept`: with the option over without")
    for key, entry in report["summary"].items():
        print("%-28s %s" % (key, "  ".join("%s %s" % item for item in entry.items())))
    print("%.0f s" % report["seconds"])
    print("wrote", arguments.out)
    picture(os.path.splitext(arguments.out)[0] + ".png", report)


if __name__ == "__main__":
    main()
