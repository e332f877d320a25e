"""One call of the C ABI from a few tuples.

A tensor is a *view*: the 13 members of tw_tensor as a tuple (data, dtype, device, device_index, ndim, shape[4],
stride[4]). `slot` numbers the members of tw_tensors (`_abi.SLOT`). Everything is packed into a buffer from a free list,
so that a call allocates nothing that grows with the number of arguments, and a call within a call (a finalizer, an
executor) gets a buffer of its own.
"""

import ctypes
import math
import operator
import struct

from . import _abi
from ._library import check, lib
from ._options import NO_WINDOW, window_of
from .errors import InvalidArgument

_PROBLEM_OFFSET = 0
_TENSORS_OFFSET = _abi.PROBLEM.size
_SLOTS_OFFSET = _TENSORS_OFFSET + _abi.TENSORS.size
_SLOT_OFFSETS = tuple(_SLOTS_OFFSET + n * _abi.TENSOR.size for n in range(len(_abi.TENSOR_FIELDS)))
_OUT_OFFSET = _SLOTS_OFFSET + len(_abi.TENSOR_FIELDS) * _abi.TENSOR.size  # a second problem
_SIZE = _OUT_OFFSET + _abi.PROBLEM.size

_pack_tensor = _abi.TENSOR.pack_into
_pack_four = struct.Struct("@" + 4 * _abi.TENSOR.format[1:]).pack_into
_pack_five = struct.Struct("@" + 5 * _abi.TENSOR.format[1:]).pack_into
_pack_three = struct.Struct("@" + 3 * _abi.TENSOR.format[1:]).pack_into
_pack_options = _abi.OPTIONS.pack_into
_pack_seqlens = _abi.SEQLENS.pack_into
_NAN = math.nan

NO_SEQLENS = (0, 0)
_tw_forward, _tw_backward, _tw_run = lib.tw_forward, lib.tw_backward, lib.tw_run
_DOUT, _DQ = _SLOT_OFFSETS[_abi.SLOT["dout"]], _SLOT_OFFSETS[_abi.SLOT["dq"]]
# Sets of slots: q, k, v, o; with lse; with lse, dout, dq, dk and dv.
_QKVO, _QKVO_LSE = 15, 31
_GRADIENTS = _QKVO_LSE | sum(1 << _abi.SLOT[name] for name in ("dout", "dq", "dk", "dv"))


class Scratch:
    """Memory for one call: tw_problem, tw_tensors, 31 tw_tensor and a second tw_problem.

    `options`, `seqlens` and `present` say what the buffer holds from the call before: the same again is not packed again.
    """

    __slots__ = ("buffer", "memory", "address", "problem", "tensors", "out", "tables", "options", "seqlens", "present")

    def __init__(self):
        self.buffer = ctypes.create_string_buffer(_SIZE)
        self.memory = memoryview(self.buffer).cast("B")
        self.address = ctypes.addressof(self.buffer)
        self.problem = self.address + _PROBLEM_OFFSET
        self.tensors = self.address + _TENSORS_OFFSET
        self.out = self.address + _OUT_OFFSET
        self.options = self.present = None
        self.seqlens = NO_SEQLENS
        self.tables = {}  # set of slots present -> tw_tensors as bytes

    def table(self, present):
        """Makes tw_tensors point to the slots in the set `present`."""
        table = self.tables.get(present)
        if table is None:
            pointers = [
                self.address + _SLOT_OFFSETS[n] if present >> n & 1 else 0 for n in range(len(_abi.TENSOR_FIELDS))
            ]
            table = self.tables[present] = _abi.TENSORS.pack(_abi.TENSORS.size, 0, *pointers)
        self.memory[_TENSORS_OFFSET:_SLOTS_OFFSET] = table
        self.present = present

    def settings(self, options, seqlens):
        _pack_options(self.buffer, 0, *options)
        _pack_seqlens(self.buffer, _abi.SEQLENS_OFFSET, *seqlens)
        self.options, self.seqlens = options, seqlens

    def fill_dense(self, options, views, present):
        """`fill` for the commonest calls: views of q, k, v, o and perhaps lse as one flat tuple."""
        if self.options is not options or self.seqlens != NO_SEQLENS:
            self.settings(options, NO_SEQLENS)
        (_pack_four if present == _QKVO else _pack_five)(self.buffer, _SLOTS_OFFSET, *views)
        if self.present != present:
            self.table(present)

    def fill(self, options, seqlens, views):
        self.settings(options, seqlens)
        present = 0
        for slot, view in views:
            present |= 1 << slot
            _pack_tensor(self.buffer, _SLOT_OFFSETS[slot], *view)
        self.table(present)


_free = []  # list.pop and list.append are atomic


def _take(options, seqlens, views):
    try:
        scratch = _free.pop()
    except IndexError:
        scratch = Scratch()
    try:
        scratch.fill(options, seqlens, views)
    except (struct.error, TypeError) as error:
        _blame(options, seqlens, error)
    return scratch


def _blame(options, seqlens, error):
    """Names the option that does not fit its C type."""
    values = dict(zip(_abi.PROBLEM_FIELDS, options))
    values["max_seqlen_q"], values["max_seqlen_k"] = seqlens
    for name, value in values.items():
        number = float if name in ("softmax_scale", "softcap", "dropout_p") else int
        low, high = (0, 2**64) if name in ("dropout_seed", "dropout_offset") else (-(2**63), 2**63)
        if name in ("num_splits", "sm_margin"):
            low, high = -(2**31), 2**31
        try:
            if number is float:
                struct.pack("d", value)
            elif not low <= operator.index(value) < high:
                raise InvalidArgument("%s %r, must be in [%d, %d)" % (name, value, low, high)) from error
        except (struct.error, TypeError):
            kind = "a number" if number is float else "an integer"
            raise InvalidArgument("%s %r, must be %s" % (name, value, kind)) from error
    raise error


def options(
    causal=False,
    window=NO_WINDOW,
    softmax_scale=None,
    softcap=0.0,
    dropout_p=0.0,
    seed=0,
    offset=0,
    rotary_interleaved=False,
    deterministic=False,
    batch_invariant=False,
    num_splits=0,
    sm_margin=0,
    direction=_abi.FORWARD,
):
    """The caller's part of tw_problem as a tuple for `_abi.OPTIONS`."""
    return (
        _abi.PROBLEM.size,
        direction,
        1 if causal else 0,
        0,
        window[0],
        window[1],
        _NAN if softmax_scale is None else softmax_scale,
        softcap,
        dropout_p,
        seed,
        offset,
        1 if rotary_interleaved else 0,
        1 if deterministic else 0,
        1 if batch_invariant else 0,
        num_splits,
        sm_margin,
    )


_known_options = {}
_PLAIN = frozenset((bool, int, float, type(None)))


def known_options(key):
    """`options` of `key`, a tuple (causal, window, softmax_scale, softcap, deterministic, batch_invariant, num_splits,
    sm_margin): the same object for the same key, so that `Scratch.fill_dense` need not pack it again."""
    try:
        return _known_options[key]
    except (KeyError, TypeError):  # TypeError: something in it has no hash
        causal, window, scale, softcap, deterministic, batch_invariant, num_splits, sm_margin = key
        made = options(causal, window_of(window), scale, softcap, 0.0, 0, 0, False, deterministic, batch_invariant,
                       num_splits, sm_margin)  # fmt: skip
        # Values that cannot change later, and not without end.
        if len(_known_options) < 256 and all(
            type(x) in _PLAIN for x in key[:1] + key[2:] + (window if type(window) is tuple else (window,))
        ):
            _known_options[key] = made
        return made


def _take_dense(options, views, present, dout=None, grads=None):
    try:
        scratch = _free.pop()
    except IndexError:
        scratch = Scratch()
    try:
        scratch.fill_dense(options, views, present)
    except (struct.error, TypeError) as error:
        _blame(options, NO_SEQLENS, error)
    if dout is not None:
        _pack_tensor(scratch.buffer, _DOUT, *dout)
        _pack_three(scratch.buffer, _DQ, *grads)
    return scratch


def forward_dense(options, views, want_lse, target):
    """tw_forward on dense CPU tensors without extras; see `Scratch.fill_dense`."""
    scratch = _take_dense(options, views, _QKVO_LSE if want_lse else _QKVO)
    status = _tw_forward(scratch.problem, scratch.tensors, target, None)
    if status:
        check(status)
    _free.append(scratch)


def backward_dense(options, views, dout, grads, target):
    """tw_backward likewise: `views` of q, k, v, o and lse, `dout`, and `grads`, the views of dq, dk and dv."""
    scratch = _take_dense(options, views, _GRADIENTS, dout, grads)
    status = _tw_backward(scratch.problem, scratch.tensors, target, None)
    if status:
        check(status)
    _free.append(scratch)


def run_dense(plan_of, options, views, workspace_of, stream, dout=None, grads=None):
    """tw_run on dense CUDA tensors without extras: `views` of q, k, v, o and perhaps lse, and of the gradients.

    `plan_of(key, describe)` gives the plan for a key of everything that a problem is made of; `describe()` makes its bytes.
    tw_run compares the tensors with the plan's problem, so that a wrong plan is an error and no wrong result.
    """
    present = _GRADIENTS if dout is not None else _QKVO_LSE if len(views) == 65 else _QKVO
    scratch = _take_dense(options, views, present, dout, grads)

    def describe():
        check(lib.tw_describe(scratch.problem, scratch.tensors, scratch.out))
        return ctypes.string_at(scratch.out, _abi.PROBLEM.size)

    # device, then dtype and shape of q, k and v
    key = (options, present, views[3], views[1], views[5:9], views[14], views[18:22], views[27], views[31:35])
    plan = plan_of(key, describe)
    workspace = workspace_of(plan)
    status = _tw_run(plan.address, scratch.tensors, workspace.data_ptr() or None, plan.workspace_bytes, stream)
    if status:
        check(status)
    _free.append(scratch)


def for_backward(options):
    """The options of a forward call as those of its backward pass."""
    # num_splits and batch_invariant shape the forward pass only.
    return options[:1] + (_abi.BACKWARD,) + options[2:13] + (0, 0) + options[15:]


def forward(options, views, seqlens=NO_SEQLENS, target=None):
    """tw_forward on CPU tensors."""
    scratch = _take(options, seqlens, views)
    status = lib.tw_forward(scratch.problem, scratch.tensors, target, None)
    if status:
        check(status)
    _free.append(scratch)


def backward(options, views, seqlens=NO_SEQLENS, target=None):
    """tw_backward on CPU tensors."""
    scratch = _take(options, seqlens, views)
    status = lib.tw_backward(scratch.problem, scratch.tensors, target, None)
    if status:
        check(status)
    _free.append(scratch)


def describe(options, views, seqlens=NO_SEQLENS):
    """tw_describe: the complete problem as bytes."""
    scratch = _take(options, seqlens, views)
    check(lib.tw_describe(scratch.problem, scratch.tensors, scratch.out))
    problem = ctypes.string_at(scratch.out, _abi.PROBLEM.size)
    _free.append(scratch)
    return problem


def run(plan, options, views, seqlens, workspace, workspace_bytes, stream):
    """tw_run: `plan` and `workspace` are addresses, `stream` is a cudaStream_t."""
    scratch = _take(options, seqlens, views)
    check(lib.tw_run(plan, scratch.tensors, workspace, workspace_bytes, stream))
    _free.append(scratch)


class Target:
    """Where to run: a tw_target. `address` is what the ABI takes; None stands for all defaults."""

    def __init__(self, backend=None, kernel=None, num_threads=0, device_index=0):
        if backend not in _abi.BACKENDS:
            raise InvalidArgument("backend %r, must be None, 'auto', 'cpu', 'cuda' or 'reference'" % (backend,))
        if kernel is not None and not isinstance(kernel, str):
            raise InvalidArgument("kernel %r, must be None or the name of a row of tilewise.kernels()" % (kernel,))
        self._kernel = ctypes.create_string_buffer(kernel.encode()) if kernel else None
        name = ctypes.addressof(self._kernel) if kernel else 0
        self._buffer = ctypes.create_string_buffer(
            _abi.TARGET.pack(_abi.TARGET.size, _abi.BACKENDS[backend], device_index, num_threads, name, 0, 0)
        )
        self.address = ctypes.addressof(self._buffer)


_targets, _keys = {}, {}  # key -> Target, and its address -> key


def target(backend=None, kernel=None, num_threads=0, device_index=0):
    """Address of a cached tw_target, or None if everything is at its default."""
    key = (backend, kernel, num_threads, device_index)
    if key == (None, None, 0, 0):
        return None
    found = _targets.get(key)
    if found is None:
        found = _targets[key] = Target(*key)  # kept for good: a call on another thread may be reading it
        _keys[found.address] = key
    return found.address


def on_device(address, device_index):
    """The target at `address` (None: all defaults) with another device_index."""
    backend, kernel, num_threads, _ = _keys[address] if address else (None, None, 0, 0)
    return target(backend, kernel, num_threads, device_index)


class Tensors:
    """A few tw_tensor for the small functions: `with Tensors(view, None) as (address, none)`."""

    def __init__(self, *views):
        size = _abi.TENSOR.size
        self._buffer = ctypes.create_string_buffer(size * len(views))
        start = ctypes.addressof(self._buffer)
        self._addresses = []
        for n, view in enumerate(views):
            if view is not None:
                _pack_tensor(self._buffer, n * size, *view)
            self._addresses.append(None if view is None else start + n * size)

    def __enter__(self):
        return self._addresses

    def __exit__(self, *_):
        pass
