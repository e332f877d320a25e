"""The public functions of flash-attn 3 (module flash_attn_interface), computed by Tilewise. See `tilewise.compat`.

float16 and bfloat16. `num_splits`, `sm_margin` and `deterministic` are passed on; `pack_gqa` and `scheduler_metadata` are
hints that change no result and are ignored; qv, attention_chunk, the descales of 8-bit inputs and appending with
cu_seqlens_k_new are refused by name. `softmax_lse` is -inf where a row sees no key.
"""

import torch

from .. import torch as _torch
from ..errors import InvalidArgument, Unsupported
from ._common import check_inputs, length, refuse, window


def _wrap(got, return_attn_probs):
    return (got[0], got[1].detach()) if return_attn_probs else got


def _refuse(qv, q_descale, k_descale, v_descale, attention_chunk):
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False):  # fmt: skip
    """q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv) -> out, or (out, softmax_lse float32 (b, h, sq))."""
    check_inputs(q, ("k", k), ("v", v))
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    got = _torch.attention(q, k, v, causal=causal, window=window(window_size, causal), softmax_scale=softmax_scale,
                           softcap=softcap, num_splits=num_splits, deterministic=deterministic, sm_margin=sm_margin,
                           return_lse=return_attn_probs)  # fmt: skip
    return _wrap(got, return_attn_probs)


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
                              num_heads_q=None, sm_margin=0, return_attn_probs=False):  # fmt: skip
    """qkv (b, s, 3, h, d), or (b, s, hq + 2 hk, d) with num_heads_q."""
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise InvalidArgument("qkv has shape %s, must be (b, s, 3, h, d)" % (tuple(qkv.shape),))
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None or qkv.dim() != 4:
            raise InvalidArgument("num_heads_q None, must be given for qkv of shape (b, s, hq + 2 hk, d)")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        if num_heads_q + 2 * heads_k != qkv.shape[2]:
            raise InvalidArgument("num_heads_q %d does not leave an even number of the %d heads" % (num_heads_q, qkv.shape[2]))
        q, k, v = qkv.split((num_heads_q, heads_k, heads_k), 2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
                           attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs)  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):  # fmt: skip
    """q (total_q, h, d), k (total_k, hk, d), v (total_k, hk, dv) -> out, or (out, softmax_lse (h, total_q))."""
    check_inputs(q, ("k", k), ("v", v))
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    got = _torch.attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=length(max_seqlen_q, "max_seqlen_q"), max_seqlen_k=length(max_seqlen_k, "max_seqlen_k"),
        seqused_q=seqused_q, seqused_k=seqused_k, causal=causal, window=window(window_size, causal),
        softmax_scale=softmax_scale, softcap=softcap, num_splits=num_splits, deterministic=deterministic,
        sm_margin=sm_margin, return_lse=return_attn_probs,
    )  # fmt: skip
    return _wrap(got, return_attn_probs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False):  # fmt: skip
    """-> out, or (out, softmax_lse, out_accum, lse_accum); the last two are None. k and v are appended in place."""
    check_inputs(q, ("k_cache", k_cache), ("v_cache", v_cache))
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    refuse(cu_seqlens_k_new=cu_seqlens_k_new)
    with torch.no_grad():
        got = _torch.attention_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, page_table=page_table,
            cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, causal=causal, window=window(window_size, causal), softmax_scale=softmax_scale,
            softcap=softcap, num_splits=num_splits, sm_margin=sm_margin, return_lse=return_softmax_lse,
        )  # fmt: skip
    return (got[0], got[1], None, None) if return_softmax_lse else got


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges S partial results: out_partial float32 (S, b, s, h, d), lse_partial float32 (S, b, s, h) ->
    (out (b, s, h, d), lse (b, s, h)). Parts with lse = -inf count nothing; all of them: out 0, lse -inf."""
    if out_partial.dtype != torch.float32 or lse_partial.dtype != torch.float32:
        raise InvalidArgument("out_partial %s, lse_partial %s: must be float32" % (out_partial.dtype, lse_partial.dtype))
    if out_partial.dim() != 5 or lse_partial.shape != out_partial.shape[:-1]:
        raise InvalidArgument("out_partial has shape %s and lse_partial %s, must be (S, b, s, h, d) and (S, b, s, h)"
                              % (tuple(out_partial.shape), tuple(lse_partial.shape)))  # fmt: skip
    if out_partial.shape[0] > 256:
        raise Unsupported("out_partial has %d parts, must be at most 256" % out_partial.shape[0])
    lse = torch.logsumexp(lse_partial, 0)
    weight = torch.where(lse_partial == -torch.inf, 0.0, torch.exp(lse_partial - lse)).unsqueeze(-1)
    merged = torch.where(weight == 0, 0.0, out_partial * weight).sum(0)
    merged = merged.to(out_dtype or (out.dtype if out is not None else torch.float32))
    return (merged if out is None else out.copy_(merged)), lse


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):  # fmt: skip
    """An int32 tensor that `flash_attn_with_kvcache` takes as scheduler_metadata. Tilewise plans within the call, so it
    carries no information and any number of calls may share it."""
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device if isinstance(cache_seqlens, torch.Tensor) else None)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
                         sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
                         softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
                         deterministic=False, sm_margin=0):  # fmt: skip
    """Writes the gradients that are given in place -> softmax_d = rowsum(dout * out), float32 like softmax_lse."""
    check_inputs(q, ("k", k), ("v", v))
    grads = _torch.attention_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=sequed_q,
        seqused_k=sequed_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale,
        causal=is_causal, window=window((window_size_left, window_size_right), is_causal), softcap=softcap,
        deterministic=deterministic, sm_margin=sm_margin,
    )  # fmt: skip
    for into, grad in zip((dq, dk, dv), grads):
        if into is not None:
            into.copy_(grad)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)
