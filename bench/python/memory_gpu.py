"""Predicted against measured memory on a GPU: standard attention through torch's matmul, softmax and autograd, and Tilewise.

Measured: the peak of bytes requested from torch's caching allocator, above q, k and v, in one forward and backward pass; cuBLAS's
workspace is there before. Exit status 1 beyond 1 % and 2 MiB.
"""

import gc
import math
import sys

import torch
from common import machine, parser, write

import tilewise

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
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


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


def standard(q, k, v, causal=False, window=None, softcap=0.0, dropout_p=0.0):
    group, scale, dtype = q.shape[2] // k.shape[2], 1 / math.sqrt(q.shape[3]), q.dtype
    sq, sk = q.shape[1], k.shape[1]

    def by_heads(x, repeats):
        x = x.transpose(1, 2)
        return x.contiguous() if repeats == 1 else x.repeat_interleave(repeats, 1)

    q, k, v = by_heads(q, 1).mul_(scale), by_heads(k, group), by_heads(v, group)
    hidden = None
    if causal or window:
        right, left = (0, None) if causal else (window[1], window[0])
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu_(1 + sk - sq + right)
        if left is not None:
            hidden.logical_or_(torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril_(sk - sq - left - 1))
    s = torch.matmul(q, k.transpose(2, 3))
    if softcap:
        s = s / softcap
        s = torch.tanh(s)
        s = s * softcap
    if hidden is not None:
        s.masked_fill_(hidden, -math.inf)
    p = torch.softmax(s.float(), -1).to(dtype)
    del s
    if dropout_p:
        p = torch.nn.functional.dropout(p, dropout_p)
    return torch.matmul(p, v).transpose(1, 2).contiguous()


def tiled(q, k, v, **options):
    return tilewise.attention(q, k, v, **options)


def math_backend(q, k, v, causal=False):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
        ).transpose(1, 2)


def requested(which):
    return torch.cuda.memory_stats()["requested_bytes.all." + which]


def measure(function, shape):
    """Peaks above the inputs: of the forward pass, and of both."""
    b, hq, hk, sq, sk, d, dtype, options = shape
    make = lambda s, h: torch.randn(b, s, h, d, device="cuda", dtype=DTYPES[dtype]).requires_grad_()  # noqa: E731
    q, k, v = make(sq, hq), make(sk, hk), make(sk, hk)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    o = function(q, k, v, **options)
    forward = requested("peak") - before
    torch.cuda.reset_peak_memory_stats()
    o.backward(torch.randn_like(o))
    torch.cuda.synchronize()
    both = max(forward, requested("peak") - before)
    del o, q, k, v
    return forward, both


def main():
    arguments = parser(__doc__, "memory_gpu.json").parse_args()
    shapes = SHAPES[:2] if arguments.quick else SHAPES
    warm = (1, 8, 4, 256, 256, 64, "bf16", {"causal": True})
    for function in (standard, tiled):
        measure(function, warm)
    rows, failed = [], 0
    for shape in shapes:
        text = problem_text(*shape)
        memory = tilewise.memory(text)
        for name, function, use in (("standard", standard, memory.standard), ("tilewise", tiled, memory.tiled)):
            for which, predicted, measured in zip(
                ("forward", "backward"), (use.peak_forward, max(use.peak_forward, use.peak_backward)), measure(function, shape)
            ):
                ok = abs(measured - predicted) <= 0.01 * predicted + 2 * MIB
                failed += not ok
                rows.append(dict(problem=text, what=name, predicted=predicted, measured=measured, ok=ok, planned=memory.planned)
                            | {"pass": which, "error": measured / predicted - 1})  # fmt: skip
                print("%10.1f MiB %10.1f MiB %+7.2f%% %-4s %-8s %-8s %s" % (
                    predicted / MIB, measured / MIB, 100 * (measured / predicted - 1), "ok" if ok else "FAIL", name, which, text), flush=True)  # fmt: skip
    peers = [dict(problem=problem_text(*shape), what="torch SDPA, math backend", forward=peak[0], backward=peak[1])
             for shape in shapes[:6] for peak in [measure(math_backend, shape)]]  # fmt: skip
    for peer in peers:
        print("%10.1f MiB %10.1f MiB %s, forward and both: %s" % (peer["forward"] / MIB, peer["backward"] / MIB, peer["what"], peer["problem"]))
    print("%d within 1 %% and 2 MiB, %d beyond" % (len(rows) - failed, failed))
    write(arguments.output, dict(machine=machine(), method=__doc__, rows=rows, peers=peers, failed=failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
