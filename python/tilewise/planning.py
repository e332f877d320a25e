"""Plans, explanations, the table of kernels, the machine: what runs, why, and what it costs, without running it."""

import ctypes
import weakref

from . import _abi, _call
from ._library import check, lib, text
from .errors import InvalidArgument


class Plan:
    """What a call will do. Made by `tilewise.plan`; `str(plan)` is the library's own text.

    Attributes: problem (one line of text), backend, kernel, config, num_splits, num_tasks, workspace_bytes (memory above
    inputs and outputs), standard_bytes (what standard attention needs above them), flops, bytes_moved.
    """

    def __init__(self, problem, address):
        info = ctypes.create_string_buffer(_abi.PLAN_INFO.pack(_abi.PLAN_INFO.size, 0, b"", b"", 0, 0, 0, 0, 0.0, 0.0))
        check(lib.tw_plan_get_info(address, ctypes.addressof(info)))
        (_, backend, kernel, config, self.num_splits, self.num_tasks, self.workspace_bytes, self.standard_bytes,
         self.flops, self.bytes_moved) = _abi.PLAN_INFO.unpack_from(info)  # fmt: skip
        self.problem = problem_text(problem)
        self.backend = _abi.BACKEND_NAMES[backend]
        self.kernel, self.config = _abi.text(kernel), _abi.text(config)
        self._text = text(lib.tw_plan_text, address)

    def __str__(self):
        return self._text

    def __repr__(self):
        return "<tilewise.Plan %r: %s, workspace %d bytes>" % (self.problem, self.kernel, self.workspace_bytes)


def create(problem, target):
    """(address of a tw_plan, workspace bytes); the caller owns it."""
    plan = ctypes.c_void_p()
    memory = ctypes.create_string_buffer(problem, _abi.PROBLEM.size)
    check(lib.tw_plan_create(ctypes.addressof(memory), target, ctypes.addressof(plan)))
    info = ctypes.create_string_buffer(_abi.PLAN_INFO.pack(_abi.PLAN_INFO.size, 0, b"", b"", 0, 0, 0, 0, 0.0, 0.0))
    check(lib.tw_plan_get_info(plan.value, ctypes.addressof(info)))
    return plan.value, _abi.PLAN_INFO.unpack_from(info)[6]


def parse(problem):
    """The bytes of a tw_problem from its text."""
    memory = ctypes.create_string_buffer(_abi.PROBLEM.size)
    check(lib.tw_problem_parse(problem.encode(), ctypes.addressof(memory)))
    return memory.raw


def problem_text(problem):
    memory = ctypes.create_string_buffer(problem, _abi.PROBLEM.size)
    return text(lib.tw_problem_text, ctypes.addressof(memory))


def problem_of(problem, arrays, options):
    if isinstance(problem, str):
        if arrays or options:
            raise InvalidArgument("a problem as text takes no arrays and no options beside backend, kernel and num_threads")
        return parse(problem)
    if len(arrays) != 2:
        raise InvalidArgument("give a problem as text, or q, k and v")
    from ._api import frontend

    return frontend(problem).describe(problem, *arrays, **options)


def plan(problem, *arrays, backend=None, kernel=None, num_threads=0, **options):
    memory = problem_of(problem, arrays, options)
    address, _ = create(memory, _call.target(backend, kernel, num_threads))
    try:
        return Plan(memory, address)
    finally:
        lib.tw_plan_destroy(address)


def explain(problem, *arrays, backend=None, kernel=None, num_threads=0, **options):
    memory = ctypes.create_string_buffer(problem_of(problem, arrays, options), _abi.PROBLEM.size)
    return text(lib.tw_explain, ctypes.addressof(memory), _call.target(backend, kernel, num_threads))


class Kernel:
    """A row of the table of kernels: name, backend, direction ("forward", "backward" or "both"), isa, available, summary."""

    def __init__(self, index):
        info = ctypes.create_string_buffer(_abi.KERNEL_INFO.pack(_abi.KERNEL_INFO.size, 0, 0, 0, b"", b"", b""))
        check(lib.tw_kernel_at(index, ctypes.addressof(info)))
        _, backend, direction, available, name, isa, summary = _abi.KERNEL_INFO.unpack_from(info)
        self.name, self.isa, self.summary = _abi.text(name), _abi.text(isa), _abi.text(summary)
        self.backend = _abi.BACKEND_NAMES[backend]
        self.direction = {0: "forward", 1: "backward"}.get(direction, "both")
        self.available = bool(available)

    def __repr__(self):
        state = "" if self.available else ", not on this machine"
        return "<tilewise.Kernel %s (%s, %s%s)>" % (self.name, self.backend, self.direction, state)


def kernels():
    return [Kernel(n) for n in range(lib.tw_kernel_count())]


def machine():
    return text(lib.tw_machine_text)


def dropout_keep(dropout_p, seed, offset, batch_head, i, j):
    """Whether dropout keeps the pair (i, j) of batch * num_heads_q + head: the function that every kernel draws from.

    >>> import tilewise
    >>> tilewise.dropout_keep(0.0, 1, 0, 0, 2, 3)
    True
    """
    return bool(lib.tw_dropout_keep(dropout_p, seed, offset, batch_head, i, j))


def owned(object_, destroy, address):
    """Calls `destroy(address)` when `object_` goes."""
    return weakref.finalize(object_, destroy, address)
