"""Finds, loads and checks the shared library.

The library is `tilewise/lib/libtilewise.so` inside the package; the environment variable TILEWISE_LIBRARY names another
one (for development). It links to neither Python nor torch, so one file serves every version of both.
"""

import ctypes
import os
from ctypes import c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p

from . import _abi
from .errors import BY_STATUS, InternalError

_NAMES = ("libtilewise.so", "libtilewise.dylib", "tilewise.dll")


def _path():
    override = os.environ.get("TILEWISE_LIBRARY")
    if override:
        if not os.path.exists(override):
            raise ImportError("tilewise: TILEWISE_LIBRARY=%s does not exist" % override)
        return override
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
    for name in _NAMES:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    raise ImportError(
        "tilewise: no shared library in %s. Install the wheel (pip install .), or set TILEWISE_LIBRARY to a built "
        "libtilewise.so" % folder
    )


# name: (result, arguments). Pointers are passed as integers.
_P, _SIGNATURES = c_void_p, {}
_SIGNATURES.update(
    tw_version=(c_char_p, ()),
    tw_last_error=(c_char_p, ()),
    tw_struct_size=(c_size_t, (c_char_p,)),
    tw_describe=(c_int32, (_P, _P, _P)),
    tw_problem_init=(None, (_P,)),
    tw_problem_parse=(c_int32, (c_char_p, _P)),
    tw_problem_text=(c_size_t, (_P, _P, c_size_t)),
    tw_forward=(c_int32, (_P, _P, _P, _P)),
    tw_backward=(c_int32, (_P, _P, _P, _P)),
    tw_plan_create=(c_int32, (_P, _P, _P)),
    tw_plan_destroy=(None, (_P,)),
    tw_plan_get_info=(c_int32, (_P, _P)),
    tw_plan_text=(c_size_t, (_P, _P, c_size_t)),
    tw_run=(c_int32, (_P, _P, _P, c_size_t, _P)),
    tw_default_num_threads=(c_int32, ()),
    tw_softmax=(c_int32, (_P, _P, _P, _P, _P)),
    tw_accumulator_create=(c_int32, (c_int64, c_int64, _P)),
    tw_accumulator_destroy=(None, (_P,)),
    tw_accumulator_push=(c_int32, (_P, _P, _P)),
    tw_accumulator_merge=(c_int32, (_P, _P)),
    tw_accumulator_lse=(c_int32, (_P, _P)),
    tw_accumulator_result=(c_int32, (_P, _P)),
    tw_accumulator_probabilities=(c_int32, (_P, _P, _P)),
    tw_merge_states=(c_int32, (_P, _P, _P, _P, _P)),
    tw_dropout_keep=(c_int32, (c_double, c_uint64, c_uint64, c_int64, c_int64, c_int64)),
    tw_kernel_count=(c_int32, ()),
    tw_kernel_at=(c_int32, (c_int32, _P)),
    tw_explain=(c_size_t, (_P, _P, _P, c_size_t)),
    tw_machine_text=(c_size_t, (_P, c_size_t)),
    tw_memory=(c_int32, (_P, _P, _P, _P)),
    tw_memory_largest=(c_int32, (_P, _P, _P, c_int64, c_char_p, c_int32, _P)),
    tw_memory_explain=(c_size_t, (_P, _P, _P, c_char_p, _P, c_size_t)),
    tw_model_count=(c_int32, ()),
    tw_model_at=(c_int32, (c_int32, _P)),
    tw_gpu_count=(c_int32, ()),
    tw_gpu_at=(c_int32, (c_int32, _P)),
)


def _load():
    path = _path()
    try:
        library = ctypes.CDLL(path)  # releases the GIL while a call runs
    except OSError as error:
        raise ImportError("tilewise: cannot load %s: %s" % (path, error)) from error
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise ImportError("tilewise: %s has no function %s; it is not this package's version" % (path, name)) from None
        function.restype = result
        function.argtypes = arguments
    check_sizes(library.tw_struct_size, path)
    return library, path


def check_sizes(struct_size, path):
    """Compares the layouts in `_abi` with the library's own."""
    for name, size in _abi.SIZES.items():
        theirs = struct_size(name.encode())
        if theirs != size:
            raise ImportError(
                "tilewise: %s has %d bytes in this package but %d in %s: the library and the package are of different "
                "versions" % (name, size, theirs, path)
            )


lib, library_path = _load()
__version__ = lib.tw_version().decode()


def check(status):
    """Raises the exception of a failed call."""
    if status:
        raise BY_STATUS.get(status, InternalError)(lib.tw_last_error().decode())


def text(function, *arguments):
    """The result of one of the ABI's text functions."""
    size = function(*arguments, None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    function(*arguments, ctypes.addressof(buffer), size + 1)
    return buffer.value.decode()
