"""Tilewise for torch tensors: autograd, torch.compile, and `sdpa` behind F.scaled_dot_product_attention.

`attention`, `attention_varlen`, `attention_with_kvcache`, `attention_backward`, `softmax` and `merge_states` are those of
`tilewise`, without looking at the type of the arguments first.
"""

from ._attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_with_kvcache,
)
from ._attention import describe_call as describe
from ._kind import kind
from ._sdpa import sdpa
from ._softmax import merge_states, softmax

__all__ = [
    "attention", "attention_varlen", "attention_with_kvcache", "attention_backward", "softmax", "merge_states", "sdpa",
]  # fmt: skip

import sys as _sys

import torch as _torch

from .. import _api
from . import _ops as _ops  # registers the ops, so that exported programs load

_api._by_type.update({_torch.Tensor: _sys.modules[__name__], _torch.nn.Parameter: _sys.modules[__name__]})
