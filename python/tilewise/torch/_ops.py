"""torch.library ops over the same calls: for torch.compile, torch.export, fake tensors and opcheck.

  tilewise::forward    (o, lse)                       differentiable
  tilewise::backward   (dq, dk, dv, dbias, dalibi, dsink), each empty where not wanted
  tilewise::kvcache    (o, lse), appends to k_cache and v_cache in place

Those of softmax and merge_states are in `_softmax`.

Outputs have one layout everywhere, contiguous o [b, sq, hq, dv] or [total_q, hq, dv] and contiguous lse, and the fakes
say so.
"""

import torch

from .. import _abi, _build, _call
from ..errors import Unsupported
from . import _transforms
from ._attention import forward_dense, gradients_dense
from ._kind import kind, target

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table", "rng_state")

_TENSORS = "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, " + ", ".join("Tensor? %s" % n for n in LENGTHS)
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, SymInt window_left, SymInt window_right, "
    "float? softmax_scale, float softcap, float dropout_p, int dropout_seed, int dropout_offset, bool deterministic, "
    "bool batch_invariant, int num_splits, int sm_margin"
)
NUM_OPTIONS = 14
_QKV_GRADS = _build.GRADS[:3]

library = torch.library.Library("tilewise", "DEF")
library.define("forward(Tensor q, Tensor k, Tensor v, %s, %s) -> (Tensor, Tensor)" % (_TENSORS, _OPTIONS))
library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, %s, bool[] wanted, %s) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)" % (_TENSORS, _OPTIONS)
)
library.define(
    "kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_new, Tensor? v_new, Tensor? cache_seqlens, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? rotary_seqlens, Tensor? cu_seqlens_q, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "SymInt max_seqlen_q, bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, float softcap, "
    "bool rotary_interleaved, bool batch_invariant, int num_splits, int sm_margin) -> (Tensor, Tensor)"
)


def _signed(value):
    """uint64 as the int64 that a schema's `int` holds."""
    return value - 2**64 if value >= 2**63 else value


def _abi_options(causal, window_left, window_right, softmax_scale, softcap, dropout_p, seed, offset, deterministic,
                 batch_invariant, num_splits, sm_margin, direction=_abi.FORWARD):  # fmt: skip
    return _call.options(causal, (window_left, window_right), softmax_scale, softcap, dropout_p, seed % 2**64,
                         offset % 2**64, False, deterministic, batch_invariant, num_splits, sm_margin, direction)  # fmt: skip


def _extra(names_and_tensors):
    return [(name, x) for name, x in names_and_tensors if x is not None]


# ---- forward ----


def _forward(q, k, v, bias, alibi_slopes, sinks, *rest):
    lengths, options = rest[: len(LENGTHS)], rest[len(LENGTHS) :]
    extra = _extra((("bias", bias), ("alibi_slopes", alibi_slopes), ("sink", sinks)) + tuple(zip(LENGTHS, lengths)))
    if not extra and q.dim() == k.dim() == v.dim() == 4 and q.get_device() == k.get_device() == v.get_device():
        return forward_dense(q, k, v, _abi_options(*options[2:]), target(None, None, 0), True)
    o, lse, _, _ = _build.forward(kind, q, k, v, extra, _abi_options(*options[2:]), options[:2], target(None, None, 0),
                                  packed_q=lengths[0] is not None, want_lse=True)  # fmt: skip
    return o, lse


def _forward_fake(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, *rest):
    o = q.new_empty(tuple(q.shape[:-1]) + (v.shape[-1],))
    lse = q.new_empty(_build.lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)
    return o, lse


for _key in ("CPU", "CUDA"):
    library.impl("forward", _forward, _key)
torch.library.register_fake("tilewise::forward", _forward_fake, lib=library)


# ---- backward ----


def _backward(dout, dlse, q, k, v, o, lse, bias, alibi_slopes, sinks, *rest):
    lengths, wanted, options = rest[: len(LENGTHS)], rest[len(LENGTHS)], rest[len(LENGTHS) + 1 :]
    extra = _extra((("bias", bias), ("alibi_slopes", alibi_slopes), ("sink", sinks)) + tuple(zip(LENGTHS, lengths)))
    names = tuple(name for name, want in zip(_build.GRADS, wanted) if want)
    # num_splits and batch_invariant shape the forward pass only
    flags = _abi_options(*options[2:11], False, 0, options[13], direction=_abi.BACKWARD)
    if not extra and dlse is None and names == _QKV_GRADS and q.dim() == k.dim() == v.dim() == 4:
        grads = gradients_dense(dout, q, k, v, o, lse, flags, target(None, None, 0))
        if grads is not None:
            return tuple(grads[:3]) + tuple(q.new_empty(0) for _ in _build.GRADS[3:])
    got = _build.backward(kind, dout, dlse, q, k, v, o, lse, extra, names, flags, options[:2], target(None, None, 0))
    found = dict(zip(names, got))
    return tuple(found[name] if name in found else q.new_empty(0) for name in _build.GRADS)


def _backward_fake(dout, dlse, q, k, v, o, lse, bias, alibi_slopes, sinks, *rest):
    wanted = rest[len(LENGTHS)]
    likes = (q, k, v, bias, alibi_slopes, sinks)
    return tuple(
        torch.empty(like.shape, dtype=like.dtype, device=like.device) if want else q.new_empty(0)
        for like, want in zip(likes, wanted)
    )


for _key in ("CPU", "CUDA"):
    library.impl("backward", _backward, _key)
torch.library.register_fake("tilewise::backward", _backward_fake, lib=library)


def setup_context(ctx, inputs, output):
    tensors, ctx.options = inputs[: 6 + len(LENGTHS)], inputs[6 + len(LENGTHS) :]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def backward_formula(ctx, dout, dlse, backward=None):
    tensors = ctx.saved_tensors
    num_inputs = 6 + len(LENGTHS)
    (q, k, v, *options), (o, lse) = tensors[:num_inputs], tensors[num_inputs:]
    nothing = (None,) * (num_inputs + NUM_OPTIONS)
    if dout is None and dlse is None:
        return nothing
    if dout is None:
        dout = torch.zeros_like(o)
    wanted = list(ctx.needs_input_grad[:6])
    if not any(wanted):
        return nothing
    if tensors[6 + LENGTHS.index("page_table")] is not None:
        raise Unsupported("page_table: attention over paged keys has no gradient; use torch.no_grad()")
    grads = (backward or torch.ops.tilewise.backward)(dout, dlse, q, k, v, o, lse, *options, wanted, *ctx.options)
    return tuple(g if want else None for g, want in zip(grads, wanted)) + nothing[6:]


torch.library.register_autograd("tilewise::forward", backward_formula, setup_context=setup_context, lib=library)


def _refuse_second_derivatives(ctx, *_):
    raise Unsupported("tilewise.attention: second derivatives (double backward) are not available")


torch.library.register_autograd(
    "tilewise::backward", _refuse_second_derivatives, setup_context=lambda ctx, inputs, output: None, lib=library
)


# ---- KV cache ----


def _kvcache(q, k_cache, v_cache, k_new, v_new, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, rotary_cos,
             rotary_sin, rotary_seqlens, cu_seqlens_q, bias, alibi_slopes, sinks, max_seqlen_q, causal, window_left,
             window_right, softmax_scale, softcap, rotary_interleaved, batch_invariant, num_splits, sm_margin):  # fmt: skip
    from ._attention import _frontend

    return _frontend.attention_with_kvcache(
        q, k_cache, v_cache, k_new, v_new, cache_seqlens=cache_seqlens, page_table=page_table,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q or None, causal=causal, window=(window_left, window_right),
        softmax_scale=softmax_scale, softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks,
        batch_invariant=batch_invariant, num_splits=num_splits, sm_margin=sm_margin, return_lse=True,
    )  # fmt: skip


def _kvcache_fake(q, k_cache, v_cache, k_new, v_new, cache_seqlens, page_table, cache_batch_idx, cache_leftpad,
                  rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_q, *rest):  # fmt: skip
    o = q.new_empty(tuple(q.shape[:-1]) + (v_cache.shape[-1],))
    return o, q.new_empty(_build.lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    library.impl("kvcache", _kvcache, _key)
torch.library.register_fake("tilewise::kvcache", _kvcache_fake, lib=library)


# ---- what `_attention` calls ----


def attention(q, k, v, bias, alibi_slopes, sinks, lengths, options, max_seqlen_q, max_seqlen_k):
    """`options` as made by `_call.options`."""
    forward = torch.ops.tilewise.forward
    if not torch.compiler.is_compiling() and _transforms.active():
        forward = _transforms.Forward.apply
    _, _, causal, _, left, right, scale, softcap, p, seed, offset, _, deterministic, invariant, splits, margin = options
    scale = None if scale != scale else scale
    return forward(
        q, k, v, bias, alibi_slopes, sinks, *[lengths.get(name) for name in LENGTHS], max_seqlen_q, max_seqlen_k,
        bool(causal), left, right, scale, softcap, p, _signed(seed), _signed(offset), bool(deterministic),
        bool(invariant), splits, margin,
    )  # fmt: skip


def attention_with_kvcache(q, k_cache, v_cache, k_new, v_new, *, cache_seqlens=None, page_table=None,
                           cache_batch_idx=None, cache_leftpad=None, rotary_cos=None, rotary_sin=None,
                           rotary_interleaved=False, rotary_seqlens=None, cu_seqlens_q=None, max_seqlen_q=None,
                           causal=False, window=None, softmax_scale=None, softcap=0.0, bias=None, alibi_slopes=None,
                           sinks=None, batch_invariant=False, num_splits=0, sm_margin=0, return_lse=False,
                           **refused):  # fmt: skip
    from .._options import window_of

    for name, value in refused.items():
        if value:
            raise Unsupported(
                "attention_with_kvcache: %s is not available under torch.compile, torch.export and torch.func" % name
            )
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    left, right = window_of(window)
    o, lse = torch.ops.tilewise.kvcache(
        q, k_cache, v_cache, k_new, v_new, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, rotary_cos,
        rotary_sin, rotary_seqlens, cu_seqlens_q, _build.bias_4d(bias), alibi_slopes, sinks, max_seqlen_q or 0, causal,
        left, right, softmax_scale, softcap, rotary_interleaved, batch_invariant, num_splits, sm_margin,
    )  # fmt: skip
    return (o, lse) if return_lse else o
