"""Tilewise: exact attention, tile by tile, in linear memory, for NumPy, torch and every array with DLPack.

>>> import numpy as np, tilewise
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 16), dtype=np.float32)
>>> tilewise.attention(q, k, v, causal=True).shape
(1, 8, 2, 16)

`attention`, `attention_varlen` (packed sequences), `attention_with_kvcache`, `attention_backward`, `softmax`,
`merge_states` and `OnlineSoftmax` compute; `plan`, `explain`, `kernels` and `machine` tell what runs and why, `memory` what it takes and what fits.
`tilewise.torch` adds autograd, torch.compile and `sdpa`; `tilewise.integrations.transformers` and
`tilewise.compat` connect what exists. Nothing imports torch or NumPy before the caller does.
"""

import sys as _sys

from ._api import (
    attention,
    attention_backward,
    attention_varlen,
    attention_with_kvcache,
    explain,
    kernels,
    machine,
    merge_states,
    plan,
    softmax,
)
from ._library import __version__, library_path
from ._memory import Memory, gpus, memory, models
from .errors import DeviceError, Error, InternalError, InvalidArgument, OutOfMemory, Unsupported
from .online_softmax import OnlineSoftmax
from .planning import Kernel, Plan, dropout_keep

__all__ = [
    "attention", "attention_varlen", "attention_with_kvcache", "attention_backward", "softmax", "merge_states",
    "OnlineSoftmax", "plan", "explain", "memory", "models", "gpus", "Memory", "kernels", "machine", "dropout_keep", "Plan", "Kernel", "Error",
    "InvalidArgument", "Unsupported", "OutOfMemory", "DeviceError", "InternalError", "library_path", "__version__",
]  # fmt: skip

if hasattr(_sys.modules.get("torch"), "Tensor"):
    # The caller has torch: register the ops now, so that the first compiled call finds everything in place.
    try:
        from . import torch as torch
    except Exception as _error:  # a torch that is too old; the first call on a tensor says so
        del _error
