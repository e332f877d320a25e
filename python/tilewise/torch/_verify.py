"""`Memory.verify`: predicted against measured memory on a GPU, by torch's caching allocator.

Measured: the peak of bytes requested from the allocator, above q, k and v, in the forward pass and in both; after one pass, so
that cuBLAS's workspace is there before. Standard attention is what a framework composes of products, softmax and autograd.
"""

import collections
import gc
import math

import torch

import tilewise

from .. import _abi
from ..errors import Unsupported

RELATIVE, ABSOLUTE = 0.01, 2 << 20  # what a prediction may be off by

# direction: "forward" or "backward", which is for both passes; error: relative; ok: within 1 % and 2 MiB.
Check = collections.namedtuple("Check", "problem what direction predicted measured error ok")

_DTYPES = {_abi.FLOAT32: torch.float32, _abi.FLOAT16: torch.float16, _abi.BFLOAT16: torch.bfloat16}
_ALLOWED = _abi.HAS_LSE | _abi.HAS_DQ | _abi.HAS_DK | _abi.HAS_DV


def standard(q, k, v, causal=False, window=None, softcap=0.0, dropout_p=0.0, deterministic=False, return_lse=False):
    group, scale, dtype = q.shape[2] // k.shape[2], 1 / math.sqrt(q.shape[3]), q.dtype
    sq, sk = q.shape[1], k.shape[1]

    def by_heads(x, repeats):
        x = x.transpose(1, 2)
        return x.contiguous() if repeats == 1 else x.repeat_interleave(repeats, 1)

    q, k, v = by_heads(q, 1).mul_(scale), by_heads(k, group), by_heads(v, group)
    hidden = None
    left, right = window or (-1, -1)
    right = 0 if causal else right
    if left >= 0 or right >= 0:
        hidden = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
        if right >= 0:
            hidden.fill_(True).triu_(1 + sk - sq + right)
        if left >= 0:
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


def _requested(which):
    return torch.cuda.memory_stats()["requested_bytes.all." + which]


def measure(function, fields, **options):
    """Peaks above the inputs: of the forward pass, and of both (None for a forward problem)."""
    training = fields["pass"] == _abi.BACKWARD
    sizes = ((fields["seqlen_q"], fields["num_heads_q"], fields["head_dim"]), (fields["seqlen_k"], fields["num_heads_k"], fields["head_dim"]),
             (fields["seqlen_k"], fields["num_heads_k"], fields["head_dim_v"]))  # fmt: skip
    q, k, v = (torch.randn(fields["batch"], s, h, d, device="cuda", dtype=_DTYPES[fields["dtype"]]).requires_grad_(training) for s, h, d in sizes)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = _requested("current")
    with torch.set_grad_enabled(training):
        o = function(q, k, v, **options)
    forward, both = _requested("peak") - before, None
    if training:
        torch.cuda.reset_peak_memory_stats()
        o.backward(torch.randn_like(o))
        torch.cuda.synchronize()
        both = max(forward, _requested("peak") - before)
    return forward, both


def fields_of(problem, raw):
    """The members of a tw_problem that can be verified here, by name."""
    f = dict(zip(_abi.PROBLEM_FIELDS, _abi.PROBLEM.unpack(raw)))
    refuse = lambda why: Unsupported('verify: "%s" %s' % (problem, why))  # noqa: E731
    if f["device"] != _abi.CUDA:
        raise refuse("is of the CPU; `tilewise memory --verify` measures there")
    if f["q_layout"] or f["k_layout"] or f["features"] & ~_ALLOWED or f["cache_batch"] or f["seqlen_new"] or f["rotary_dim"]:
        raise refuse("is not dense with causal, window, softcap and dropout alone; `tilewise memory --verify` measures Tilewise's part")
    if f["dtype"] not in _DTYPES:
        raise refuse("is of %s; must be of float32, float16 or bfloat16" % _abi.DTYPE_NAMES[f["dtype"]])
    if not torch.cuda.is_available():
        raise refuse("is of a GPU: torch %s finds none here" % torch.__version__)
    return f


def verify(problem, raw, memory):
    f = fields_of(problem, raw)
    options = {"causal": bool(f["causal"]), "window": (f["window_left"], f["window_right"]), "softcap": f["softcap"],
               "dropout_p": f["dropout_p"], "deterministic": bool(f["deterministic"])}  # fmt: skip
    options["return_lse"] = f["pass"] == _abi.FORWARD and bool(f["features"] & _abi.HAS_LSE)
    small = dict(f, batch=1, seqlen_q=256, seqlen_k=256)
    checks = []
    for what, function, use in (("standard", standard, memory.standard), ("tilewise", tiled, memory.tiled)):
        measure(function, small, **options)
        both = max(use.peak_forward, use.peak_backward)
        for direction, predicted, measured in zip(("forward", "backward"), (use.peak_forward, both), measure(function, f, **options)):
            if measured is not None:
                ok = abs(measured - predicted) <= RELATIVE * predicted + ABSOLUTE
                checks.append(Check(problem, what, direction, predicted, measured, measured / max(predicted, 1) - 1, ok))
    return checks
