"""What Python adds to a call, at a size where the work is nothing: microseconds over the C call.

The C call is tw_forward through ctypes with everything packed beforehand, less a ctypes call that does nothing.
"""

import time

import numpy as np
import torch
from common import machine, parser, write

import tilewise
import tilewise.torch
from tilewise import _abi, _call
from tilewise._library import lib
from tilewise.torch._kind import target, view


def per_call(function, repeats, number):
    """Best of `repeats` means over `number` calls, in microseconds of this thread's CPU time: interruptions only ever add."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(number):
            function()
        best = min(best, (time.thread_time() - start) / number)
    return best * 1e6


def main():
    arguments = parser(__doc__, "python_call_overhead.json").parse_args()
    repeats, number = (100, 20) if arguments.quick else (2000, 20)
    torch.set_num_threads(1)
    shape = (1, 1, 1, 16)
    q, k, v = (torch.randn(shape) for _ in range(3))
    o, lse = torch.empty(shape), torch.empty(1, 1, 1)
    views = [(n, view(x, "")) for n, x in enumerate((q, k, v, o, lse))]
    where = target(None, None, 0)
    ready = {}
    for name, chosen in (("forward", views[:4]), ("forward_lse", views)):
        ready[name] = scratch = _call.Scratch()
        scratch.fill(_call.options(), _call.NO_SEQLENS, chosen)
    grads = [torch.empty(shape) for _ in range(3)]
    ready["backward"] = scratch = _call.Scratch()
    names = ("dout", "dq", "dk", "dv")
    scratch.fill(_call.options(direction=_abi.BACKWARD), _call.NO_SEQLENS,
                 views + [(_abi.SLOT[n], view(x, "")) for n, x in zip(names, [o] + grads)])  # fmt: skip

    def c_call(name, function):
        scratch = ready[name]
        return lambda: function(scratch.problem, scratch.tensors, where, None)

    nothing = per_call(lambda: lib.tw_plan_destroy(None), repeats, number)
    c = {
        "forward": per_call(c_call("forward", lib.tw_forward), repeats, number) - nothing,
        "forward_lse": per_call(c_call("forward_lse", lib.tw_forward), repeats, number) - nothing,
        "backward": per_call(c_call("backward", lib.tw_backward), repeats, number) - nothing,
    }
    n = [x.numpy() for x in (q, k, v)]
    g = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward_backward():
        torch.autograd.grad(tilewise.torch.attention(*g), g, o)

    class Nothing(torch.autograd.Function):
        """What autograd itself costs: the same inputs, the same number of results, no work."""

        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx, dout):
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

    rows = {
        "torch, no gradient": (lambda: tilewise.torch.attention(q, k, v), c["forward"]),
        "torch, tilewise.attention": (lambda: tilewise.attention(q, k, v), c["forward"]),
        "torch, with lse": (lambda: tilewise.torch.attention(q, k, v, return_lse=True), c["forward_lse"]),
        "torch, autograd forward": (lambda: tilewise.torch.attention(*g), c["forward_lse"]),
        "torch, forward and backward": (forward_backward, c["forward_lse"] + c["backward"]),
        "numpy": (lambda: tilewise.attention(*n), c["forward"]),
        "torch op (as under torch.compile)": (
            lambda: torch.ops.tilewise.forward(q, k, v, None, None, None, None, None, None, None, None, None, 0, 0, False,
                                               -1, -1, None, 0.0, 0.0, 0, 0, False, False, 0, 0),
            c["forward_lse"],
        ),
    }  # fmt: skip
    report = {"machine": machine(), "shape": list(shape), "dtype": "float32", "c_call_us": c, "rows": []}
    for name, (function, base) in rows.items():
        total = per_call(function, repeats, number)
        report["rows"].append({"name": name, "call_us": total, "c_call_us": base, "over_c_call_us": total - base})
        print("%-36s %7.2f us, C call %6.2f us, over it %6.2f us" % (name, total, base, total - base))
    h, h_grad = ([x.transpose(1, 2) for x in y] for y in ((q, k, v), g))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    beside = {
        "empty autograd.Function, forward": lambda: Nothing.apply(*g),
        "empty autograd.Function, forward and backward": lambda: torch.autograd.grad(Nothing.apply(*g), g, o),
        "torch sdpa, no gradient": lambda: sdpa(*h),
        "torch sdpa, autograd forward": lambda: sdpa(*h_grad),
        "torch sdpa, forward and backward": lambda: torch.autograd.grad(sdpa(*h_grad), g, o),
    }
    report["beside_us"] = {}
    for name, function in beside.items():
        report["beside_us"][name] = per_call(function, repeats, number)
        print("beside it: %-46s %7.2f us" % (name, report["beside_us"][name]))
    report["load_average_after"] = machine()["load_average"]
    if not arguments.quick:
        write(arguments.output, report)


if __name__ == "__main__":
    np.random.seed(0)
    main()
