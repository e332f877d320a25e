"""Arrays of other libraries (JAX, CuPy, ...) through DLPack, without a copy of the inputs.

Results on the CPU are computed in NumPy arrays and handed over with the library's own `from_dlpack`; results on a CUDA
device are allocated by the library itself (`empty` of its array-API namespace).
"""

import ctypes

from . import _abi, _call
from ._frontend import Frontend
from ._options import InvalidArgument
from .errors import Unsupported

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _DLTensor(ctypes.Structure):
    """DLTensor, the first member of DLManagedTensor (layout stable since DLPack 0.x)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_CODES = {
    (2, 32): _abi.FLOAT32, (2, 16): _abi.FLOAT16, (4, 16): _abi.BFLOAT16, (2, 64): _abi.FLOAT64,
    (0, 32): _abi.INT32, (0, 64): _abi.INT64, (6, 8): _abi.BOOL,
}  # fmt: skip
_CPU_DEVICES, _CUDA_DEVICES = (1, 3), (2, 13)


class DLArray:
    """What `_build` needs of an array: shape, ndim, reshape, and the view. Keeps the capsule alive."""

    def __init__(self, source, name):
        self.source = source
        # On CUDA the call runs on the legacy default stream (1 in DLPack), so the array is made ready there.
        on_cuda = source.__dlpack_device__()[0] in _CUDA_DEVICES
        self.capsule = source.__dlpack__(stream=1) if on_cuda else source.__dlpack__()
        if not _is_valid(self.capsule, b"dltensor"):
            raise Unsupported("%s: its __dlpack__() did not return an unused 'dltensor' capsule" % name)
        tensor = _DLTensor.from_address(_pointer_of(self.capsule, b"dltensor"))
        code = _CODES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
        if code is None:
            raise InvalidArgument(
                "%s has DLPack dtype code %d with %d bits, must be float32, float16, bfloat16, float64, int32, int64 or bool"
                % (name, tensor.code, tensor.bits)
            )
        if tensor.device_type in _CPU_DEVICES:
            device = (_abi.CPU, 0)
        elif tensor.device_type in _CUDA_DEVICES:
            device = (_abi.CUDA, tensor.device_id)
        else:
            raise Unsupported("%s: DLPack device type %d, must be CPU (1) or CUDA (2)" % (name, tensor.device_type))
        self.ndim = tensor.ndim
        self.shape = tuple(tensor.shape[n] for n in range(self.ndim))
        if tensor.strides:
            strides = [tensor.strides[n] for n in range(self.ndim)]
        else:
            strides = []
            step = 1
            for size in reversed(self.shape):
                strides.insert(0, step)
                step *= size
        self.head = ((tensor.data or 0) + tensor.byte_offset, code) + device
        self.strides = tuple(strides)

    def reshape(self, shape):
        ones = len(shape) - self.ndim
        if tuple(shape) != (1,) * ones + self.shape:
            raise Unsupported("reshape of a DLPack array to %s" % (tuple(shape),))
        other = object.__new__(DLArray)
        other.source, other.capsule, other.head = self.source, self.capsule, self.head
        other.ndim, other.shape, other.strides = len(shape), tuple(shape), (0,) * ones + self.strides
        return other


def _namespace(x):
    try:
        return x.__array_namespace__()
    except AttributeError:
        raise Unsupported("arrays of type %s have no __array_namespace__, so results cannot be made" % type(x).__name__) from None


class DLPackKind:
    """See `_build`. Outputs are NumPy arrays (CPU) or arrays of the caller's library (CUDA), wrapped like the inputs."""

    def same(self, **arrays):
        for name, x in arrays.items():
            if x is not None and not isinstance(x, DLArray):
                raise InvalidArgument("%s is a %s, must be an array with __dlpack__ like q" % (name, type(x).__name__))

    def view(self, x, name):
        if not isinstance(x, DLArray):
            from . import numpy

            return numpy.kind.view(x, name)
        if not 1 <= x.ndim <= _abi.MAX_DIMS:
            raise InvalidArgument("%s has shape %s, must have 1 to %d dimensions" % (name, x.shape, _abi.MAX_DIMS))
        strides = x.strides[:-1] + (1 if x.shape[-1] <= 1 else x.strides[-1],)
        pad = (0,) * (_abi.MAX_DIMS - x.ndim)
        return x.head + (x.ndim,) + x.shape + pad + strides + pad

    def rows(self, x, name):
        return x, self.view(x, name)

    def attention_dense(self, *_):
        return None

    def flat_rows(self, x, name):
        self.same(**{name: x})
        return x, self.view(x, name), x.shape

    def empty(self, shape, code, like):
        if like.head[2] != _abi.CPU:
            source = like.source
            xp = _namespace(source)
            dtype = source.dtype if code == like.head[1] else getattr(xp, _abi.DTYPE_NAMES[code])
            return DLArray(xp.empty(shape, dtype=dtype, device=source.device), "out")
        import numpy as np

        if code == _abi.BFLOAT16:
            import ml_dtypes

            return np.empty(shape, ml_dtypes.bfloat16)
        return np.empty(shape, _abi.DTYPE_NAMES[code])

    def lengths(self, x, like):
        if isinstance(x, (list, tuple)):
            raise InvalidArgument("lengths as a list: must be int32 arrays of the library of q")
        return x

    def filled(self, x, batch, like, name):
        return self.lengths(x, like)

    def writable(self, x, name):
        raise Unsupported("%s: appending in place needs NumPy arrays or torch tensors" % name)

    def copy(self, x):
        raise Unsupported("merge_states: pass NumPy arrays or torch tensors")

    def extras(self, **arrays):
        return [(name, x) for name, x in arrays.items() if x is not None]

    forward = staticmethod(_call.forward)
    backward = staticmethod(_call.backward)

    def softmax(self, *arguments):
        from . import numpy

        numpy.kind.softmax(*arguments)


_frontend = Frontend(DLPackKind())


def _wrap(x, name):
    return DLArray(x, name) if hasattr(x, "__dlpack__") else x


def _unwrap(x, xp):
    if isinstance(x, tuple):
        return tuple(_unwrap(y, xp) for y in x)
    if isinstance(x, DLArray):
        return x.source
    return xp.from_dlpack(x)


def _through(name):
    function = getattr(_frontend, name)

    def call(*args, **kwargs):
        if kwargs.get("out") is not None:
            raise Unsupported("out: needs NumPy arrays or torch tensors")
        xp = _namespace(args[0])
        wrapped = [_wrap(x, "argument %d" % n) for n, x in enumerate(args)]
        return _unwrap(function(*wrapped, **{key: _wrap(x, key) for key, x in kwargs.items()}), xp)

    call.__name__ = name
    return call


attention = _through("attention")
attention_varlen = _through("attention_varlen")
attention_with_kvcache = _through("attention_with_kvcache")
attention_backward = _through("attention_backward")
softmax = _through("softmax")
merge_states = _through("merge_states")


def describe(q, k, v, **options):
    return _frontend.describe(_wrap(q, "q"), _wrap(k, "k"), _wrap(v, "v"), **{n: _wrap(x, n) for n, x in options.items()})
