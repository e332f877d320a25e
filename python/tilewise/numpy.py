"""Tilewise for NumPy arrays: `attention`, `attention_varlen`, `attention_with_kvcache`, `attention_backward`, `softmax`
and `merge_states`, as in `tilewise`, without looking at the type of the arguments first.

float32, float16, float64 (reference kernel) and, with the ml_dtypes package, bfloat16. Strides are free as long as the
last dimension is contiguous; arrays with another last stride are copied.
"""

import ctypes

import numpy as np

from . import _abi, _call
from ._frontend import Frontend
from ._library import check, lib
from ._options import InvalidArgument

__all__ = ["attention", "attention_varlen", "attention_with_kvcache", "attention_backward", "softmax", "merge_states"]

_CODES = {
    np.dtype(np.float32): _abi.FLOAT32,
    np.dtype(np.float16): _abi.FLOAT16,
    np.dtype(np.float64): _abi.FLOAT64,
    np.dtype(np.int32): _abi.INT32,
    np.dtype(np.int64): _abi.INT64,
    np.dtype(np.bool_): _abi.BOOL,
}
_byte, _address = ctypes.c_char, ctypes.addressof
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _code(x, name):
    code = _CODES.get(x.dtype)
    if code is None:
        if x.dtype.name != "bfloat16":
            raise InvalidArgument(
                "%s has dtype %s, must be native float32, float16, bfloat16, float64, int32, int64 or bool"
                % (name, x.dtype.str if x.dtype.names is None else x.dtype)
            )
        code = _CODES[x.dtype] = _abi.BFLOAT16  # ml_dtypes.bfloat16
    return code


def _data(x):
    """The address of x's memory; of a contiguous and writable array in a quarter of the time that NumPy's own answer takes."""
    if x.flags.carray:
        try:
            return _address(_byte.from_buffer(x))
        except (TypeError, ValueError):  # no buffer of it: no elements, or ml_dtypes
            pass
    return x.__array_interface__["data"][0]


def _rows(x):
    """`view` of a C-contiguous array [.., .., .., d] of floats, else None."""
    code = _CODES.get(x.dtype)
    if code is None or not x.flags.c_contiguous:
        return None
    a, b, c, d = x.shape
    f = c * d
    return (_data(x), code, 0, 0, 4, a, b, c, d, b * f, f, d, 1)


class NumpyKind:
    """See `_build`."""

    def attention_dense(self, q, k, v, key, return_lse, backend, kernel, num_threads):
        array = np.ndarray
        if type(q) is not array or type(k) is not array or type(v) is not array or not q.ndim == k.ndim == v.ndim == 4:
            return None
        q_view, k_view, v_view = _rows(q), _rows(k), _rows(v)
        if q_view is None or k_view is None or v_view is None:
            return None
        _, code, _, _, _, b, sq, hq, _, _, _, _, _ = q_view
        dv = v_view[8]
        o1 = hq * dv
        o = np.empty((b, sq, hq, dv), q.dtype)
        views = (*q_view, *k_view, *v_view, _data(o), code, 0, 0, 4, b, sq, hq, dv, sq * o1, o1, dv, 1)
        options, where = _call.known_options(key), _call.target(backend, kernel, num_threads)
        if not return_lse:
            _call.forward_dense(options, views, False, where)
            return o
        lse = np.empty((b, hq, sq), np.float32)
        _call.forward_dense(options, (*views, _data(lse), 0, 0, 0, 3, b, hq, sq, 0, hq * sq, sq, 1, 0), True, where)
        return o, lse

    def same(self, **arrays):
        for name, x in arrays.items():
            if x is not None and not isinstance(x, np.ndarray):
                raise InvalidArgument("%s is a %s, must be a numpy.ndarray like q" % (name, type(x).__name__))

    def view(self, x, name):
        code, shape, n = _code(x, name), x.shape, x.ndim
        if not 1 <= n <= _abi.MAX_DIMS:
            raise InvalidArgument("%s has shape %s, must have 1 to %d dimensions" % (name, shape, _abi.MAX_DIMS))
        item = x.dtype.itemsize
        strides = []
        for size, stride in zip(shape, x.strides):
            if stride % item and size > 1:
                raise InvalidArgument("%s has strides %s, must be multiples of its %d-byte items" % (name, x.strides, item))
            strides.append(stride // item)
        if shape[-1] <= 1:
            strides[-1] = 1
        pad = (0,) * (_abi.MAX_DIMS - n)
        return (_data(x), code, 0, 0, n) + shape + pad + tuple(strides) + pad

    def rows(self, x, name):
        if x.shape[-1] > 1 and x.strides[-1] != x.dtype.itemsize:
            x = np.ascontiguousarray(x)
        return x, self.view(x, name)

    def flat_rows(self, x, name):
        """x with at most 4 dimensions, its view, and its shape."""
        self.same(**{name: x})
        if x.ndim < 1:
            raise InvalidArgument("%s has shape (), must have at least 1 dimension" % name)
        shape = x.shape
        if x.ndim > _abi.MAX_DIMS:
            x = x.reshape((-1, x.shape[-1]) if x.size else (0, x.shape[-1]))
        x, view = self.rows(x, name)
        return x, view, shape

    def empty(self, shape, code, like):
        return np.empty(shape, _DTYPES.get(code) or like.dtype)

    def copy(self, x):
        return np.array(x, order="C")

    def lengths(self, x, like):
        """int32 array from a list of ints; arrays pass through, the library checks their dtype."""
        return np.array(x, np.int32) if isinstance(x, (list, tuple)) else x

    def filled(self, x, batch, like, name):
        """[batch] int32 from an int, a 0-d array, a list or an array."""
        if isinstance(x, np.ndarray) and x.ndim:
            return x
        if isinstance(x, (list, tuple)):
            return np.array(x, np.int32)
        return np.full(batch, x, np.int32)

    def writable(self, x, name):
        if not x.flags.writeable:
            raise InvalidArgument("%s is read-only, but k_new and v_new are written into it" % name)

    def extras(self, **arrays):
        return [(name, x) for name, x in arrays.items() if x is not None]

    forward = staticmethod(_call.forward)
    backward = staticmethod(_call.backward)

    def softmax(self, x, y, lse, target):
        with _call.Tensors(x, y, lse) as (x, y, lse):
            check(lib.tw_softmax(x, y, lse, target, None))

    def merge(self, *views):
        with _call.Tensors(*views) as addresses:
            check(lib.tw_merge_states(*addresses, None))


kind = NumpyKind()
_frontend = Frontend(kind)
attention = _frontend.attention
attention_varlen = _frontend.attention_varlen
attention_with_kvcache = _frontend.attention_with_kvcache
attention_backward = _frontend.attention_backward
softmax = _frontend.softmax
merge_states = _frontend.merge_states
describe = _frontend.describe
