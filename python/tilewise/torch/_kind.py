"""Torch tensors as `_build` needs them, on the CPU and on CUDA devices."""

import os
import threading

import torch

from .. import _abi, _call
from .._library import check, lib
from .._options import InvalidArgument
from ..planning import create, owned

CODES = {
    torch.float32: _abi.FLOAT32,
    torch.float16: _abi.FLOAT16,
    torch.bfloat16: _abi.BFLOAT16,
    torch.float64: _abi.FLOAT64,
    torch.int32: _abi.INT32,
    torch.int64: _abi.INT64,
    torch.bool: _abi.BOOL,
}
DTYPES = {code: dtype for dtype, code in CODES.items()}

# torch.set_num_threads governs calls on torch tensors, unless the environment says otherwise.
_own_threads = bool(os.environ.get("TILEWISE_NUM_THREADS"))


def target(backend, kernel, num_threads):
    if not num_threads and not _own_threads:
        num_threads = torch.get_num_threads()
    return _call.target(backend, kernel, num_threads)


def view(x, name):
    """The 13 members of tw_tensor."""
    code = CODES.get(x.dtype)
    if code is None:
        raise InvalidArgument(
            "%s has dtype %s, must be float32, float16, bfloat16, float64, int32, int64 or bool" % (name, x.dtype)
        )
    if x.is_cpu:
        device = index = 0
    elif x.is_cuda:
        device, index = 1, x.device.index or 0
    else:
        raise InvalidArgument("%s is on device %s, must be cpu or cuda" % (name, x.device))
    if x.is_neg():
        raise InvalidArgument("%s has the negative bit, must be resolved with resolve_neg()" % name)
    n = x.dim()
    if n == 4:
        a, b, c, d = x.shape
        e, f, g, h = x.stride()
        return (x.data_ptr(), code, device, index, 4, a, b, c, d, e, f, g, h if d > 1 else 1)
    if n == 3:
        a, b, c = x.shape
        e, f, g = x.stride()
        return (x.data_ptr(), code, device, index, 3, a, b, c, 0, e, f, g if c > 1 else 1, 0)
    if n == 2:
        a, b = x.shape
        e, f = x.stride()
        return (x.data_ptr(), code, device, index, 2, a, b, 0, 0, e, f if b > 1 else 1, 0, 0)
    if n == 1:
        a = x.shape[0]
        return (x.data_ptr(), code, device, index, 1, a, 0, 0, 0, x.stride(0) if a > 1 else 1, 0, 0, 0)
    raise InvalidArgument("%s has shape %s, must have 1 to %d dimensions" % (name, tuple(x.shape), _abi.MAX_DIMS))


class TorchKind:
    """See `_build`."""

    view = staticmethod(view)

    def same(self, **tensors):
        for name, x in tensors.items():
            if x is not None:
                self._tensor(x, name)

    @staticmethod
    def _tensor(x, name):
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument("%s is a %s, must be a torch.Tensor like q" % (name, type(x).__name__))

    def rows(self, x, name):
        if x.is_neg():  # its negation is still to come, as in z.conj().imag
            x = x.resolve_neg()
        got = view(x, name)
        if got[8 + x.dim()] != 1:  # last dimension not contiguous: the one copy that a call makes
            x = x.contiguous()
            got = view(x, name)
        return x, got

    def flat_rows(self, x, name):
        self._tensor(x, name)
        if x.dim() < 1:
            raise InvalidArgument("%s has shape (), must have at least 1 dimension" % name)
        shape = tuple(x.shape)
        if x.dim() > _abi.MAX_DIMS:
            x = x.reshape((-1, x.shape[-1]) if x.numel() else (0, x.shape[-1]))
        x, got = self.rows(x, name)
        return x, got, shape

    def empty(self, shape, code, like):
        return torch.empty(shape, dtype=DTYPES[code], device=like.device)

    def copy(self, x):
        return x.clone(memory_format=torch.contiguous_format)

    def lengths(self, x, like):
        return torch.tensor(x, dtype=torch.int32, device=like.device) if isinstance(x, (list, tuple)) else x

    def filled(self, x, batch, like, name):
        if isinstance(x, torch.Tensor):
            if x.dim():
                return x
            return x.to(torch.int32).expand(batch)
        if isinstance(x, (list, tuple)):
            return self.lengths(x, like)
        return torch.full((batch,), x, dtype=torch.int32, device=like.device)

    def writable(self, x, name):
        pass

    def extras(self, **tensors):
        return [(name, x) for name, x in tensors.items() if x is not None]

    def forward(self, options, views, seqlens, target):
        if views[0][1][2] == _abi.CUDA:
            _run_on_cuda(options, views, seqlens, target)
        else:
            _call.forward(options, views, seqlens, target)

    def backward(self, options, views, seqlens, target):
        if views[0][1][2] == _abi.CUDA:
            _run_on_cuda(options, views, seqlens, target)
        else:
            _call.backward(options, views, seqlens, target)

    def softmax(self, x, y, lse, target):
        with _call.Tensors(x, y, lse) as (x_at, y_at, lse_at):
            if x[2] == _abi.CUDA:
                with torch.cuda.device(x[3]):
                    check(lib.tw_softmax(x_at, y_at, lse_at, target, torch.cuda.current_stream(x[3]).cuda_stream))
            else:
                check(lib.tw_softmax(x_at, y_at, lse_at, target, None))

    def merge(self, *views):
        with _call.Tensors(*views) as addresses:
            if views[0][2] == _abi.CUDA:
                with torch.cuda.device(views[0][3]):
                    check(lib.tw_merge_states(*addresses, torch.cuda.current_stream(views[0][3]).cuda_stream))
            else:
                check(lib.tw_merge_states(*addresses, None))


# ---- CUDA: plan once per problem, workspace from torch's allocator on the current stream ----


class _Plan:
    """A tw_plan, destroyed with its last reference: a call that is running holds one."""

    __slots__ = ("address", "workspace_bytes", "__weakref__")

    def __init__(self, problem, target):
        self.address, self.workspace_bytes = create(problem, target)
        owned(self, lib.tw_plan_destroy, self.address)


_MAX_PLANS = 1024  # a few hundred bytes each; problems beyond (ever new lengths or seeds) push the oldest out
_plans = {}  # (problem, target) -> _Plan
_dense_plans = {}  # (what makes a dense problem, target) -> _Plan: the same plans, found without tw_describe
_plans_lock = threading.Lock()


def _keep(table, key, plan):
    with _plans_lock:
        while len(table) >= _MAX_PLANS:
            del table[next(iter(table))]
        table[key] = plan
    return plan


def _plan(problem, target):
    key = (problem, target)
    return _plans.get(key) or _keep(_plans, key, _Plan(problem, target))


# The stream's number without an object around it: 3 us less. The library makes the tensors' device the current one itself.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def _workspace(plan, device):
    # torch's blocks are 512-byte aligned, the library asks for 64. Freed at once and reused in stream order.
    return torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)


def _run_on_cuda(options, views, seqlens, target):
    index = views[0][1][3]
    plan = _plan(_call.describe(options, views, seqlens), _call.on_device(target, index))
    workspace = _workspace(plan, torch.device("cuda", index))
    _call.run(plan.address, options, views, seqlens, workspace.data_ptr() or None, plan.workspace_bytes, _raw_stream(index))


def run_dense_on_cuda(options, views, target, device, dout=None, grads=None):
    """The commonest call, dense tensors and options alone; see `_call.run_dense`."""

    def plan_of(key, describe):
        key = (key, target)
        return _dense_plans.get(key) or _keep(_dense_plans, key, _plan(describe(), _call.on_device(target, device.index)))

    _call.run_dense(plan_of, options, views, lambda plan: _workspace(plan, device), _raw_stream(device.index), dout, grads)


kind = TorchKind()
