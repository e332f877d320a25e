"""Tilewise behind torch.nn.functional.scaled_dot_product_attention, on the CPU and on GPUs.

On the CPU torch sends a call either to its fused kernel, aten::_scaled_dot_product_flash_attention_for_cpu, or (with
dropout, a mask that needs a gradient, head_dim_v != head_dim, ...) to aten::_scaled_dot_product_attention_math. Both, and
the backward pass of the first, are overridden while the switch is on. On CUDA, where torch chooses between four
backends, aten::scaled_dot_product_attention itself is. Calls that Tilewise does not take go on to torch.
"""

import threading
import warnings

import torch

from .. import _abi, _build, _call
from ..errors import Unsupported
from ._attention import attention, rows, special
from ._kind import kind, target, view

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # float64 stays with torch: here it is the slow reference
_FUSED = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_MATH = "_scaled_dot_product_attention_math"
_WHOLE = "scaled_dot_product_attention"
_MAX_HEAD_DIM = 256
_SLOT = _abi.SLOT


def _causal(is_causal, sq, sk):
    """torch's is_causal is aligned top-left (row i sees j <= i): (causal, window, keys to keep)."""
    if not is_causal:
        return False, _call.NO_WINDOW, sk
    if sk >= sq:  # keys beyond sq are seen by nobody
        return True, _call.NO_WINDOW, sq
    return False, (-1, sq - sk), sk


def _takes(q, k, v):
    return (
        q.dtype in _DTYPES
        and k.dtype == q.dtype
        and v.dtype == q.dtype
        and q.dim() == 4
        and k.dim() == 4
        and v.dim() == 4
        and (q.is_cpu or q.is_cuda)
        and q.device == k.device == v.device
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and 0 < q.shape[-1] <= _MAX_HEAD_DIM
        and 0 < v.shape[-1] <= _MAX_HEAD_DIM
        and k.shape[2] == v.shape[2]
    )


def _mask_4d(mask, q, k):
    """The mask as [b|1, hq|1, sq|1, sk|1], or None if it does not broadcast so."""
    if mask.dim() > 4:
        return None
    mask = _build.bias_4d(mask) if mask.dim() else None
    if mask is None:
        return None
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return mask if all(n in (1, m) for n, m in zip(mask.shape, full)) else None


class _Sdpa:
    """`tilewise.torch.sdpa`: a context manager and a global switch.

    with tilewise.torch.sdpa():          # inside, F.scaled_dot_product_attention runs on Tilewise
        model(x)
    tilewise.torch.sdpa.enable()         # for good, or until .disable()

    The switch is the process's, not the thread's; contexts nest. Taken: float32, float16 and bfloat16 on the CPU and CUDA,
    attn_mask (bool, float, with a gradient too), is_causal (torch's top-left alignment), scale, enable_gqa, dropout_p,
    head dims up to 256. Everything else goes to torch as before. Code compiled with torch.compile looks at the switch when
    it runs, for calls that compiled to torch's fused kernel on the CPU.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._depth = 0
        self._library = None
        self.calls = 0  # that Tilewise took, forward passes only; for tests and the curious

    def __call__(self):
        return _Context(self)

    @property
    def enabled(self):
        return self._depth > 0

    def enable(self):
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._install()

    def disable(self):
        """Undoes one enable()."""
        with self._lock:
            if self._depth == 0:
                return
            self._depth -= 1
            if self._depth == 0:
                library, self._library = self._library, None
                library._destroy()

    def _install(self):
        if not hasattr(torch.library, "get_kernel"):
            raise Unsupported("tilewise.torch.sdpa needs torch >= 2.9 (torch.library.get_kernel); this is %s" % torch.__version__)
        fused = torch.library.get_kernel("aten::" + _FUSED, "CPU")
        backward = torch.library.get_kernel("aten::" + _BACKWARD, "CPU")
        library = torch.library.Library("aten", "IMPL")

        def forward_cpu(keys, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
            got = self._forward(q, k, v, dropout_p, is_causal, attn_mask, scale)
            if got is None:
                return fused.call_boxed(keys, q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
            return got

        def backward_cpu(keys, dout, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
            got = self._backward(dout, q, k, v, out, lse, dropout_p, is_causal, attn_mask, scale)
            if got is None:
                return backward.call_boxed(
                    keys, dout, q, k, v, out, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
                )
            return got

        math = getattr(torch.ops.aten, _MATH).default

        def math_cpu(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, *, scale=None,
                     enable_gqa=False):  # fmt: skip
            got = self._math(q, k, v, attn_mask, dropout_p, is_causal, dropout_mask, scale)
            if got is None:
                return math.decompose(q, k, v, attn_mask, dropout_p, is_causal, dropout_mask, scale=scale,
                                      enable_gqa=enable_gqa)  # fmt: skip
            return got

        whole = getattr(torch.ops.aten, _WHOLE).default

        def whole_cuda(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
            got = None
            if enable_gqa or (q.dim() == 4 and k.dim() == 4 and q.shape[1] == k.shape[1]):
                got = self._math(q, k, v, attn_mask, dropout_p, is_causal, None, scale)
            if got is None:
                return whole.decompose(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return got[0]

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl(_FUSED, forward_cpu, "CPU", with_keyset=True)
            library.impl(_BACKWARD, backward_cpu, "CPU", with_keyset=True)
            library.impl(_MATH, math_cpu, "AutogradCPU")
            library.impl(_MATH, math_cpu, "CPU")
            if torch.cuda.is_available():
                library.impl(_WHOLE, whole_cuda, "AutogradCUDA")
                library.impl(_WHOLE, whole_cuda, "CUDA")
        self._library = library

    # q, k, v [b, h, s, d] as torch has them; their [b, s, h, d] views go to the kernel, no copy.

    def _problem(self, q, k, v, dropout_p, is_causal, mask, scale, direction):
        if dropout_p or not _takes(q, k, v):
            return None
        causal, window, keep = _causal(is_causal, q.shape[2], k.shape[2])
        extra = []
        if mask is not None:
            mask = _mask_4d(mask, q, k)
            if mask is None or is_causal:
                return None
            extra.append(("bias", mask))
        if keep != k.shape[2]:
            k, v = k[:, :, :keep], v[:, :, :keep]
        options = _call.known_options((causal, window, scale, 0.0, False, False, 0, 0))
        if direction == _abi.BACKWARD:
            options = _call.for_backward(options)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), extra, options

    def _forward(self, q, k, v, dropout_p, is_causal, mask, scale):
        problem = self._problem(q, k, v, dropout_p, is_causal, mask, scale, _abi.FORWARD)
        if problem is None or v.shape[-1] != q.shape[-1]:
            return None
        like = q
        q, k, v, extra, options = problem
        b, sq, hq, _ = q.shape
        # Strides as torch's kernel has them: compiled code relies on them.
        o = torch.empty_like(like)
        if o.shape[-1] > 1 and o.stride(-1) != 1:
            return None
        o = o.transpose(1, 2)
        lse = q.new_empty((b, sq, hq), dtype=torch.float32).transpose(1, 2)
        dense = None if extra else [rows(x) for x in (q, k, v, o)]
        if dense is not None and None not in dense:
            q_view, k_view, v_view, o_view = dense
            lse_view = (lse.data_ptr(), _abi.FLOAT32, 0, 0, 3, b, hq, sq, 0, sq * hq, 1, hq if sq > 1 else 1, 0)
            _call.forward_dense(options, (*q_view, *k_view, *v_view, *o_view, *lse_view), True, target(None, None, 0))
            self.calls += 1
            return o.transpose(1, 2), lse
        q, q_view = kind.rows(q, "query")
        k, k_view = kind.rows(k, "key")
        v, v_view = kind.rows(v, "value")
        views = [(0, q_view), (1, k_view), (2, v_view), (3, view(o, "out")), (4, view(lse, "lse"))]
        views += [(_SLOT[name], view(x, "attn_mask")) for name, x in extra]
        _call.forward(options, views, _call.NO_SEQLENS, target(None, None, 0))
        self.calls += 1
        return o.transpose(1, 2), lse

    def _backward(self, dout, q, k, v, out, lse, dropout_p, is_causal, mask, scale):
        problem = self._problem(q, k, v, dropout_p, is_causal, mask, scale, _abi.BACKWARD)
        if problem is None:
            return None
        sk = k.shape[2]
        q, k, v, extra, options = problem
        dq, dk, dv = _build.backward(
            kind, dout.transpose(1, 2), None, q, k, v, out.transpose(1, 2), lse, extra, ("dq", "dk", "dv"), options,
            _call.NO_SEQLENS, target(None, None, 0),
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        if dk.shape[2] != sk:
            pad = (0, 0, 0, sk - dk.shape[2])
            dk, dv = torch.nn.functional.pad(dk, pad), torch.nn.functional.pad(dv, pad)
        return dq, dk, dv

    def _math(self, q, k, v, mask, dropout_p, is_causal, dropout_mask, scale):
        if dropout_mask is not None or not _takes(q, k, v) or special(q, k, v, mask):
            return None
        causal, window, keep = _causal(is_causal, q.shape[2], k.shape[2])
        if mask is not None:
            mask = _mask_4d(mask, q, k)
            if mask is None or is_causal or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
                return None
        if not 0 <= dropout_p < 1:
            return None
        if keep != k.shape[2]:
            k, v = k[:, :, :keep], v[:, :, :keep]
        with torch.autocast(q.device.type, enabled=False):
            o = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, window=window,
                          softmax_scale=scale, bias=mask, dropout_p=dropout_p)  # fmt: skip
        self.calls += 1
        # torch's second result, the probabilities, is what this avoids; F.scaled_dot_product_attention drops it.
        return o.transpose(1, 2), q.new_empty(0)


class _Context:
    def __init__(self, switch):
        self._switch = switch

    def __enter__(self):
        self._switch.enable()
        return self._switch

    def __exit__(self, *_):
        self._switch.disable()


sdpa = _Sdpa()
