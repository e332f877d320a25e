"""Predicted against measured memory on a GPU: standard attention through torch's matmul, softmax and autograd, and Tilewise.

`Memory.verify` of 20 shapes, and what torch's math backend takes beside them. Exit status 1 beyond 1 % and 2 MiB.
"""

import sys

import torch
from common import machine, parser, write

import tilewise
import tilewise.torch
from tilewise import planning
from tilewise.torch import _verify

MIB = 2**20
# b, hq, hk, sq, sk, d, dtype, options
SHAPES = [
    (1, 16, 16, 512, 512, 64, "bf16", {}),
    (1, 16, 16, 1024, 1024, 64, "bf16", {}),
    (1, 16, 16, 2048, 2048, 64, "bf16", {}),
    (1, 16, 16, 4096, 4096, 64, "bf16", {}),
    (1, 16, 16, 8192, 8192, 64, "bf16", {}),
    (1, 16, 16, 16384, 16384, 64, "bf16", {}),
    (1, 16, 16, 4096, 4096, 64, "bf16", {"causal": True}),
    (1, 16, 16, 8192, 8192, 64, "f16", {"causal": True}),
    (2, 32, 8, 2048, 2048, 128, "bf16", {"causal": True}),
    (1, 32, 8, 4096, 4096, 128, "bf16", {"causal": True}),
    (4, 16, 16, 2048, 2048, 128, "bf16", {}),
    (8, 12, 12, 1024, 1024, 64, "f16", {}),
    (2, 16, 16, 2048, 2048, 96, "bf16", {"causal": True}),
    (2, 8, 8, 2048, 2048, 256, "bf16", {"causal": True}),
    (1, 16, 4, 1024, 8192, 128, "bf16", {"causal": True}),
    (1, 16, 16, 2048, 2048, 64, "bf16", {"dropout_p": 0.1}),
    (2, 8, 2, 4096, 4096, 128, "f16", {"causal": True, "dropout_p": 0.2}),
    (1, 16, 8, 2048, 2048, 256, "bf16", {"causal": True, "softcap": 50.0}),
    (1, 8, 8, 3000, 3000, 80, "bf16", {"causal": True}),
    (1, 8, 1, 4096, 4096, 128, "bf16", {"window": (511, 0)}),
]


def problem_text(b, hq, hk, sq, sk, d, dtype, options):
    text = "bwd %s cuda b=%d hq=%d hk=%d sq=%d sk=%d d=%d" % (dtype, b, hq, hk, sq, sk, d)
    if options.get("causal"):
        text += " causal"
    if "window" in options:
        text += " window=%d,%d" % options["window"]
    if "softcap" in options:
        text += " softcap=%g" % options["softcap"]
    if "dropout_p" in options:
        text += " dropout=%g" % options["dropout_p"]
    return text


def math_backend(q, k, v, causal=False):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
        ).transpose(1, 2)


def main():
    arguments = parser(__doc__, "memory_gpu.json").parse_args()
    shapes = SHAPES[:2] if arguments.quick else SHAPES
    rows, failed = [], 0
    for shape in shapes:
        memory = tilewise.memory(problem_text(*shape))
        for check in memory.verify():
            failed += not check.ok
            rows.append(dict(problem=check.problem, what=check.what, predicted=check.predicted, measured=check.measured, ok=check.ok,
                             planned=memory.planned) | {"pass": check.direction, "error": check.error})  # fmt: skip
            print("%10.1f MiB %10.1f MiB %+7.2f%% %-4s %-8s %-8s %s" % (
                check.predicted / MIB, check.measured / MIB, 100 * check.error, "ok" if check.ok else "FAIL", check.what,
                check.direction, check.problem), flush=True)  # fmt: skip
    peers = []
    for shape in shapes[:6]:
        text = problem_text(*shape)
        forward, both = _verify.measure(math_backend, _verify.fields_of(text, planning.parse(text)))
        peers.append(dict(problem=text, what="torch SDPA, math backend", forward=forward, backward=both))
        print("%10.1f MiB %10.1f MiB torch SDPA, math backend, forward and both: %s" % (forward / MIB, both / MIB, text))
    print("%d within 1 %% and 2 MiB, %d beyond" % (len(rows) - failed, failed))
    write(arguments.output, dict(machine=machine(), method=__doc__, rows=rows, peers=peers, failed=failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
