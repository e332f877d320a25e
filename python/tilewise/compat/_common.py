"""What both flash-attn modules need."""

import torch

from .._options import integer, window_of
from ..errors import InvalidArgument, Unsupported


def check_inputs(q, *others):
    """flash-attn computes in float16 and bfloat16 only; code that relies on that refusal sees the same."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise InvalidArgument(
            "q: dtype %s, must be torch.float16 or torch.bfloat16 (FlashAttention only support fp16 and bf16 data type; "
            "tilewise.attention takes float32)" % q.dtype
        )
    for name, x in others:
        if x.dtype != q.dtype:
            raise InvalidArgument(
                "%s: dtype %s, must be that of q, %s: query and %s must have the same dtype" % (name, x.dtype, q.dtype, name)
            )


def window(window_size, causal):
    left, right = window_of(tuple(int(x) for x in window_size) if window_size is not None else None)
    if causal and right > 0:  # causal wins
        right = 0
    return left, right


def refuse(**arguments):
    """Arguments that are accepted for the signature's sake and have no meaning here unless at their default."""
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise Unsupported("%s: not available in Tilewise; must be at its default" % name)


def length(value, name):
    return integer(value, name)


def round_multiple(x, m):
    return (x + m - 1) // m * m
