"""The online softmax as an object."""

import ctypes

from . import _abi, _call
from ._library import check, lib
from ._options import integer
from .errors import InvalidArgument
from .planning import owned


class OnlineSoftmax:
    """Softmax over scores that arrive in pieces, or do not fit in memory.

    Keeps, for each of `num_rows` rows, a running maximum, a running sum and, with `value_dim` > 0, a running weighted sum
    of value vectors: one read of every score, no second pass, safe against overflow whenever the maximum arrives.
    The maximum is float32, the sums are float64. CPU.

    Args:
        num_rows: number of rows, > 0.
        value_dim: length of the value vectors; 0 = no values.

    Results are arrays of the kind pushed first (NumPy before any push; torch tensors come without gradient).

    >>> import numpy as np, tilewise
    >>> scores = np.float32([[1, 2, 3, 4]])
    >>> values = np.float32([[1], [2], [3], [4]])
    >>> stream = tilewise.OnlineSoftmax(num_rows=1, value_dim=1)
    >>> stream.push(scores[:, :2], values[:2])
    >>> stream.push(scores[:, 2:], values[2:])
    >>> p = np.exp(scores) / np.exp(scores).sum()
    >>> np.allclose(stream.result(), p @ values)
    True
    >>> np.allclose(stream.lse(), np.log(np.exp(scores).sum()))
    True
    >>> np.allclose(stream.probabilities(scores[:, :2]), p[:, :2])
    True
    """

    def __init__(self, num_rows, value_dim=0):
        self.num_rows, self.value_dim = integer(num_rows, "num_rows"), integer(value_dim, "value_dim")
        handle = ctypes.c_void_p()
        check(lib.tw_accumulator_create(self.num_rows, self.value_dim, ctypes.addressof(handle)))
        self._handle = handle.value
        owned(self, lib.tw_accumulator_destroy, self._handle)
        self._kind = self._like = None

    def _kind_of(self, x):
        if self._kind is None:
            from ._api import frontend

            self._kind, self._like = frontend(x).kind, x
        return self._kind

    def push(self, scores, values=None):
        """Adds a chunk: scores [num_rows, n]; values [n, value_dim], or [num_rows, n, value_dim] (None iff value_dim = 0)."""
        kind = self._kind_of(scores)
        if (values is not None) != (self.value_dim > 0):
            raise InvalidArgument("values: must be given if and only if value_dim > 0, which is %d" % self.value_dim)
        kind.same(scores=scores, values=values)
        scores, scores_view = kind.rows(scores, "scores")
        view = None
        if values is not None:
            values, view = kind.rows(values, "values")
        with _call.Tensors(scores_view, view) as (scores_at, values_at):
            check(lib.tw_accumulator_push(self._handle, scores_at, values_at))

    def merge(self, other):
        """Adds everything that `other` has seen (of the same num_rows and value_dim)."""
        if not isinstance(other, OnlineSoftmax):
            raise InvalidArgument("other is a %s, must be an OnlineSoftmax" % type(other).__name__)
        check(lib.tw_accumulator_merge(self._handle, other._handle))
        if self._kind is None:
            self._kind, self._like = other._kind, other._like

    def _out(self, shape, function, *before):
        if self._kind is None:
            import numpy as np

            self._kind_of(np.empty(0, np.float32))
        out = self._kind.empty(shape, _abi.FLOAT32, self._like)
        with _call.Tensors(self._kind.view(out, "out"), *before) as addresses:
            check(function(self._handle, *addresses[1:], addresses[0]))
        return out

    def lse(self):
        """log(sum(exp(scores))) so far: float32 [num_rows]; -inf where nothing but -inf came."""
        return self._out((self.num_rows,), lib.tw_accumulator_lse)

    def result(self):
        """softmax(scores) @ values so far: float32 [num_rows, value_dim]; 0 for an empty row."""
        if not self.value_dim:
            raise InvalidArgument("result: this OnlineSoftmax was made with value_dim = 0")
        return self._out((self.num_rows, self.value_dim), lib.tw_accumulator_result)

    def probabilities(self, scores):
        """exp(scores - lse) for a chunk pushed before, the second pass of a softmax over a stream: float32 [num_rows, n]."""
        kind = self._kind_of(scores)
        scores, view = kind.rows(scores, "scores")
        return self._out(tuple(scores.shape), lib.tw_accumulator_probabilities, view)
