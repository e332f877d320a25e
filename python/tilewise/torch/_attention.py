"""Attention for torch tensors: argument handling and the eager autograd function.

Eager calls go straight to the C ABI (an autograd.Function, or no function at all where nothing needs a gradient). Under
torch.compile, torch.export, fake tensors and torch.func they go through the ops of `_ops`.
"""

import torch

from .. import _abi, _build, _call
from .._frontend import Frontend, check_packed, describe, results, seqlens_of
from .._options import integer, window_of
from ..errors import InvalidArgument, Unsupported
from ._kind import CODES, kind, run_dense_on_cuda, target

_frontend = Frontend(kind)
_LOWER = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts
_tensors = frozenset((torch.Tensor, torch.nn.Parameter))
_plain = _tensors | {type(None)}
_forward_ad = torch.autograd.forward_ad
_is_compiling = torch.compiler.is_compiling
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_empty_like, _float32 = torch.empty_like, torch.float32
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_GRADIENTS = (("dq", 0), ("dk", 1), ("dv", 2), ("dbias", 3), ("dalibi", 4), ("dsink", 5))


class _Attention(torch.autograd.Function):
    """(o, lse) with gradients for q, k, v, bias, alibi_slopes and sinks, through o and lse alike."""

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi_slopes, sinks, call):
        ctx.set_materialize_grads(False)
        ctx.call = call
        extra = call.extra(bias, alibi_slopes, sinks)
        o, lse, max_logit, mask = _build.forward(
            kind, q, k, v, extra, call.options, call.seqlens, call.target, packed_q=call.packed_q, want_lse=True,
            want_max_logit=call.want_max_logit, want_dropout_mask=call.want_dropout_mask, batch=call.batch,
            seqlen_k=call.seqlen_k,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse, bias, alibi_slopes, sinks, *call.tensors)
        extras = tuple(x for x in (max_logit, mask) if x is not None)
        if extras:
            ctx.mark_non_differentiable(*extras)
        return (o, lse) + extras

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        wanted = tuple(name for name, index in _GRADIENTS if ctx.needs_input_grad[index])
        if not wanted or (dout is None and dlse is None):
            return (None,) * 7
        compute = _gradients if not torch.is_grad_enabled() else _Once.apply  # enabled: create_graph=True
        found = dict(zip(wanted, compute(ctx.call, wanted, dout, dlse, *ctx.saved_tensors)))
        return tuple(found.get(name) for name, _ in _GRADIENTS) + (None,)


class _Dense(torch.autograd.Function):
    """`_Attention` for dense q, k and v and options alone: the commonest call, with the least Python."""

    @staticmethod
    def forward(ctx, q, k, v, options, where):
        o, lse = forward_dense(q, k, v, options, where, True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = options, where
        return o

    @staticmethod
    def backward(ctx, dout):
        return _backward_dense(ctx, dout, None)


class _DenseLse(torch.autograd.Function):
    """`_Dense` with the lse as a second result."""

    @staticmethod
    def forward(ctx, q, k, v, options, where):
        o, lse = got = forward_dense(q, k, v, options, where, True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.call = options, where
        return got

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward_dense(ctx, dout, dlse)


# Function.apply unwraps what a torch.func transform may have left, in Python, before it calls the apply of its base class:
# 4 us. `attention` has seen that no transform is active.
_apply_dense = super(torch.autograd.Function, _Dense).apply
_apply_dense_lse = super(torch.autograd.Function, _DenseLse).apply


def _backward_dense(ctx, dout, dlse):
    """-> (dq, dk, dv, None, None)."""
    wanted = ctx.needs_input_grad
    options, where = ctx.call
    if dlse is None and dout is not None and wanted[0] and wanted[1] and wanted[2] and not torch.is_grad_enabled():
        q, k, v, o, lse = ctx.saved_tensors
        grads = gradients_dense(dout, q, k, v, o, lse, _call.for_backward(options), where)
        if grads is not None:
            return grads
    wanted = tuple(name for name, needed in zip(("dq", "dk", "dv"), wanted) if needed)
    if not wanted or (dout is None and dlse is None):
        return (None,) * 5
    call = _Arguments()
    call.options, call.seqlens, call.target, call.names = options, _call.NO_SEQLENS, where, ()
    compute = _gradients if not torch.is_grad_enabled() else _Once.apply
    found = dict(zip(wanted, compute(call, wanted, dout, dlse, *ctx.saved_tensors, None, None, None)))
    return found.get("dq"), found.get("dk"), found.get("dv"), None, None


def _gradients(call, wanted, dout, dlse, q, k, v, o, lse, bias, alibi_slopes, sinks, *tensors):
    if dout is None:
        dout = torch.zeros_like(o)
    extra = call.extra(bias, alibi_slopes, sinks, tensors)
    return _build.backward(kind, dout, dlse, q, k, v, o, lse, extra, wanted, call.backward_options(), call.seqlens,
                           call.target)  # fmt: skip


class _Once(torch.autograd.Function):
    """The gradients as part of a graph that refuses to be differentiated."""

    @staticmethod
    def forward(ctx, *arguments):
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise Unsupported("tilewise.attention: second derivatives (double backward) are not available")


def rows(x):
    """`view` of a float tensor [.., .., .., d] whose last dimension is contiguous, else None."""
    code = CODES.get(x.dtype)
    a, b, c, d = x.shape
    e, f, g, h = x.stride()
    if code is None or (h != 1 and d > 1) or x.is_neg():
        return None
    index = x.get_device()  # -1 on the CPU
    device, index = (_abi.CPU, 0) if index < 0 else (_abi.CUDA, index)
    return (x.data_ptr(), code, device, index, 4, a, b, c, d, e, f, g, 1)


def forward_dense(q, k, v, options, where, want_lse):
    """-> (o, lse or None)."""
    q_view, k_view, v_view = rows(q), rows(k), rows(v)
    if q_view is None or k_view is None or v_view is None:
        return _build.forward(kind, q, k, v, (), options, _call.NO_SEQLENS, where, want_lse=want_lse)[:2]
    _, code, device, index, _, b, sq, hq, d, q0, q1, q2, _ = q_view
    dv = v_view[8]
    o1 = hq * dv
    o0 = sq * o1
    if q2 == dv == d and q1 == o1 and q0 == o0:
        o = _empty_like(q)  # half the time of new_empty
    else:
        o = q.new_empty((b, sq, hq, dv))
    views = (*q_view, *k_view, *v_view, o.data_ptr(), code, device, index, 4, b, sq, hq, dv, o0, o1, dv, 1)
    lse = None
    if want_lse:
        lse = q.new_empty((b, hq, sq), dtype=_float32)
        views = (*views, lse.data_ptr(), 0, device, index, 3, b, hq, sq, 0, hq * sq, sq, 1, 0)
    if device == _abi.CUDA:
        run_dense_on_cuda(options, views, where, q.device)
    else:
        _call.forward_dense(options, views, want_lse, where)
    return o, lse


def gradients_dense(dout, q, k, v, o, lse, options, where):
    """(dq, dk, dv, None, None), or None for tensors that need more care (saved-tensor hooks may have changed them)."""
    views = [rows(x) for x in (dout, q, k, v, o)]
    if None in views or not lse.is_contiguous() or dout.get_device() != q.get_device():
        return None
    dout_view, q_view, k_view, v_view, o_view = views
    grads, grad_views = [], []
    for x, x_view in ((q, q_view), (k, k_view), (v, v_view)):
        _, code, device, index, _, b, s, h, d, _, _, _, _ = x_view
        grad = _empty_like(x) if x.is_contiguous() else x.new_empty((b, s, h, d))
        grads.append(grad)
        grad_views += (grad.data_ptr(), code, device, index, 4, b, s, h, d, s * h * d, h * d, d, 1)
    b, hq, sq = lse.shape
    lse_view = (lse.data_ptr(), 0, device, index, 3, b, hq, sq, 0, hq * sq, sq, 1, 0)
    views = (*q_view, *k_view, *v_view, *o_view, *lse_view)
    if device == _abi.CUDA:
        run_dense_on_cuda(options, views, where, q.device, dout_view, grad_views)
    else:
        _call.backward_dense(options, views, dout_view, grad_views, where)
    return (*grads, None, None)


class _Arguments:
    """What a call has besides its differentiable tensors."""

    __slots__ = ("options", "seqlens", "target", "packed_q", "names", "tensors", "want_max_logit", "want_dropout_mask",
                 "batch", "seqlen_k")  # fmt: skip

    def extra(self, bias, alibi_slopes, sinks, tensors=None):
        extra = list(zip(self.names, self.tensors if tensors is None else tensors)) if self.names else []
        if bias is not None:
            extra.append(("bias", bias))
        if alibi_slopes is not None:
            extra.append(("alibi_slopes", alibi_slopes))
        if sinks is not None:
            extra.append(("sink", sinks))
        return extra

    def backward_options(self):
        return _call.for_backward(self.options)


def special(*tensors):
    """True if a call must go through the torch.library ops: tracing, fake tensors, transforms."""
    if _transforms_active() or _dispatch_modes() or _forward_ad._current_level >= 0:
        return True
    for x in tensors:
        if type(x) not in _plain:
            return True
    return tensors[0].is_meta


def refuse_transforms(name):
    """For functions without a rule for torch.func: refuses them by name under a transform."""
    if not _is_compiling() and (_transforms_active() or _forward_ad._current_level >= 0):
        raise Unsupported("tilewise.%s is not available under torch.func transforms and forward-mode derivatives" % name)


def _one_device(q, k, v):
    """Are all three on the CPU, or on one GPU, and in the dtype that autocast wants there?"""
    if q.is_cpu:
        if not (k.is_cpu and v.is_cpu):
            return False
        device = "cpu"
    elif q.is_cuda and q.get_device() == k.get_device() == v.get_device():
        device = "cuda"
    else:
        return False
    if not _autocast_enabled(device):
        return True
    dtype = torch.get_autocast_dtype(device)
    return q.dtype is dtype and k.dtype is dtype and v.dtype is dtype


def autocast(q, k, v):
    device = "cpu" if q.is_cpu else q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.dtype in _LOWER else x for x in (q, k, v))
    return q, k, v


def float_like(x):
    """float32 [..] from any float dtype: what the ABI takes for slopes and sinks. Differentiable."""
    return x if x is None or x.dtype is torch.float32 else x.float()


def draw_rng_state(device):
    """{seed, offset} from torch's generator: torch.manual_seed and checkpointing govern dropout."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def _call_attention(q, k, v, bias, alibi_slopes, sinks, lengths, causal, window, softmax_scale, softcap, dropout_p,
                    dropout_seed, dropout_offset, rng_state, deterministic, batch_invariant, num_splits, sm_margin,
                    max_seqlen_q, max_seqlen_k, return_lse, return_max_logit, return_dropout_mask, out, backend,
                    kernel, num_threads):  # fmt: skip
    """`lengths`: dict of the tensors cu_seqlens_q, .., page_table that are given."""
    q, k, v = autocast(q, k, v)
    if bias is not None and bias.dim() != 4:
        bias = _build.bias_4d(bias)
    alibi_slopes, sinks = float_like(alibi_slopes), float_like(sinks)
    seed = offset = 0
    if rng_state is None and dropout_p:
        if dropout_seed is None:
            rng_state = draw_rng_state(q.device)
        else:
            seed, offset = integer(dropout_seed, "dropout_seed"), integer(dropout_offset, "dropout_offset")
    if rng_state is not None:
        lengths = dict(lengths, rng_state=rng_state) if lengths else {"rng_state": rng_state}
    options = _call.options(causal, window, softmax_scale, softcap, dropout_p, seed, offset, False, deterministic,
                            batch_invariant, num_splits, sm_margin)  # fmt: skip
    packed_q = "cu_seqlens_q" in lengths
    if _is_compiling() or special(q, k, v, bias, alibi_slopes, sinks):
        from . import _ops

        if out is not None or return_max_logit or return_dropout_mask or backend or kernel or num_threads:
            raise Unsupported(
                "tilewise.attention: out, return_max_logit, return_dropout_mask, backend, kernel and num_threads are not "
                "available under torch.compile, torch.export, fake tensors and torch.func"
            )
        o, lse = _ops.attention(q, k, v, bias, alibi_slopes, sinks, lengths, options, max_seqlen_q, max_seqlen_k)
        return (o, lse) if return_lse else o
    where = target(backend, kernel, num_threads)
    seqlens = (max_seqlen_q, max_seqlen_k)
    batch, seqlen_k = 0, 0
    if return_max_logit or return_dropout_mask:
        batch = lengths["cu_seqlens_q"].shape[0] - 1 if packed_q else q.shape[0]
        seqlen_k = max_seqlen_k or k.shape[1]
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
        or (alibi_slopes is not None and alibi_slopes.requires_grad) or (sinks is not None and sinks.requires_grad)
    ):  # fmt: skip
        if out is not None:
            raise InvalidArgument("out: must be None where a gradient is needed; use torch.no_grad()")
        if "page_table" in lengths:
            raise Unsupported("page_table: attention over paged keys has no gradient; use torch.no_grad()")
        call = _Arguments()
        call.options, call.seqlens, call.target, call.packed_q = options, seqlens, where, packed_q
        call.names, call.tensors = tuple(lengths), tuple(lengths.values())
        call.want_max_logit, call.want_dropout_mask = return_max_logit, return_dropout_mask
        call.batch, call.seqlen_k = batch, seqlen_k
        got = _Attention.apply(q, k, v, bias, alibi_slopes, sinks, call)
        if not (return_max_logit or return_dropout_mask):
            return got if return_lse else got[0]
        return got if return_lse else (got[0],) + got[2:]
    extra = list(lengths.items()) if lengths else []
    if bias is not None:
        extra.append(("bias", bias))
    if alibi_slopes is not None:
        extra.append(("alibi_slopes", alibi_slopes))
    if sinks is not None:
        extra.append(("sink", sinks))
    got = _build.forward(kind, q, k, v, extra, options, seqlens, where, packed_q=packed_q, want_lse=return_lse,
                         want_max_logit=return_max_logit, want_dropout_mask=return_dropout_mask, batch=batch,
                         seqlen_k=seqlen_k, out=out)  # fmt: skip
    return results(*got, return_lse, return_max_logit, return_dropout_mask)


_NONE = {}


def attention(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0, bias=None, alibi_slopes=None,
              sinks=None, dropout_p=0.0, dropout_seed=None, dropout_offset=0, rng_state=None, seqused_q=None,
              seqused_k=None, deterministic=False, batch_invariant=False, num_splits=0, sm_margin=0, return_lse=False,
              return_max_logit=False, return_dropout_mask=False, out=None, backend=None, kernel=None,
              num_threads=0):  # fmt: skip
    """`tilewise.attention` for torch tensors."""
    if (
        not _is_compiling() and type(q) in _tensors and type(k) in _tensors and type(v) in _tensors
        and q.dim() == k.dim() == v.dim() == 4 and _one_device(q, k, v) and bias is None
        and alibi_slopes is None and sinks is None and dropout_p == 0 and rng_state is None and seqused_q is None
        and seqused_k is None and not return_max_logit and not return_dropout_mask and out is None
        and not (_transforms_active() or _dispatch_modes()) and _forward_ad._current_level < 0
    ):  # fmt: skip
        options = _call.known_options(
            (causal, window, softmax_scale, softcap, deterministic, batch_invariant, num_splits, sm_margin)
        )
        where = target(backend, kernel, num_threads)
        if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return (_apply_dense_lse if return_lse else _apply_dense)(q, k, v, options, where)
        got = forward_dense(q, k, v, options, where, return_lse)
        return got if return_lse else got[0]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        _build.check_ranks(q, k, v, False, False)
    lengths = _NONE
    if seqused_q is not None or seqused_k is not None:
        lengths = _given(q, seqused_q=seqused_q, seqused_k=seqused_k)
    return _call_attention(q, k, v, bias, alibi_slopes, sinks, lengths, causal, window_of(window), softmax_scale,
                           softcap, dropout_p, dropout_seed, dropout_offset, rng_state, deterministic,
                           batch_invariant, num_splits, sm_margin, 0, 0, return_lse, return_max_logit,
                           return_dropout_mask, out, backend, kernel, num_threads)  # fmt: skip


def _given(q, **tensors):
    """What is there of the lengths; lists become tensors where q is."""
    return {name: kind.lengths(x, q) for name, x in tensors.items() if x is not None}


def attention_varlen(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                     seqused_q=None, seqused_k=None, page_table=None, causal=False, window=None, softmax_scale=None,
                     softcap=0.0, bias=None, alibi_slopes=None, sinks=None, dropout_p=0.0, dropout_seed=None,
                     dropout_offset=0, rng_state=None, deterministic=False, batch_invariant=False, num_splits=0,
                     sm_margin=0, return_lse=False, return_max_logit=False, return_dropout_mask=False, out=None,
                     backend=None, kernel=None, num_threads=0):  # fmt: skip
    """`tilewise.attention_varlen` for torch tensors."""
    packed_q, packed_k = check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table)
    lengths = _given(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
                     seqused_k=seqused_k, page_table=page_table)  # fmt: skip
    if return_dropout_mask and (max_seqlen_q is None or max_seqlen_k is None):
        raise InvalidArgument("return_dropout_mask: max_seqlen_q and max_seqlen_k must be given")
    max_seqlen_q = _length(max_seqlen_q, "max_seqlen_q") if packed_q else 0
    max_seqlen_k = _length(max_seqlen_k, "max_seqlen_k") if packed_k else 0
    return _call_attention(q, k, v, bias, alibi_slopes, sinks, lengths, causal, window_of(window), softmax_scale,
                           softcap, dropout_p, dropout_seed, dropout_offset, rng_state, deterministic,
                           batch_invariant, num_splits, sm_margin, max_seqlen_q, max_seqlen_k, return_lse,
                           return_max_logit, return_dropout_mask, out, backend, kernel, num_threads)  # fmt: skip


def _length(value, name):
    if value is None:
        return 0
    if isinstance(value, torch.SymInt):
        return value
    return seqlens_of(None, value, name)


def attention_with_kvcache(q, k_cache, v_cache, k_new=None, v_new=None, **options):
    """`tilewise.attention_with_kvcache` for torch tensors."""
    refuse_transforms("attention_with_kvcache")
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k_cache, v_cache, k_new, v_new)
    ):
        raise Unsupported("attention_with_kvcache has no gradient; call it under torch.no_grad(), or detach its arguments")
    if torch.compiler.is_compiling() or special(q, k_cache, v_cache, k_new, v_new):
        from . import _ops

        return _ops.attention_with_kvcache(q, k_cache, v_cache, k_new, v_new, **options)
    options["num_threads"] = options.get("num_threads", 0) or _threads()
    return _frontend.attention_with_kvcache(q, k_cache, v_cache, k_new, v_new, **options)


def _threads():
    from ._kind import _own_threads

    return 0 if _own_threads else torch.get_num_threads()


def attention_backward(dout, q, k, v, o, lse, **options):
    """`tilewise.attention_backward` for torch tensors."""
    refuse_transforms("attention_backward")
    options["num_threads"] = options.get("num_threads", 0) or _threads()
    with torch.no_grad():
        return _frontend.attention_backward(dout, q, k, v, o, lse, **options)


def describe_call(q, k, v, **options):
    return describe(kind, q, k, v, **options)
