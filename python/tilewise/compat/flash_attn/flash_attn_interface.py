"""flash_attn.flash_attn_interface: attention functions over float16 and bfloat16 torch tensors.

Shapes: q (batch, seqlen_q, heads, dim), k and v (batch, seqlen_k, heads_k, dim); packed along the sequence in the varlen
functions. Masks align bottom-right, windows are inclusive with -1 = unbounded. As in flash-attn, `softmax_lse` has +inf
where a row sees no key, and neither it nor S_dmask carries a gradient. Beyond flash-attn: CPU tensors, pages of any size,
head_dim_v != head_dim, and dropout together with softcap.
"""

import torch

from ... import torch as _torch
from ...errors import InvalidArgument
from ...torch._attention import draw_rng_state
from .. import _common
from .._common import check_inputs, length, round_multiple, window

USE_TRITON_ROCM = False


def maybe_contiguous(x):
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def _plus_inf(lse):
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _minus_inf(lse):
    return torch.where(lse == torch.inf, -torch.inf, lse)


def _check_dropout(dropout_p):
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidArgument("dropout_p %r, must be in [0, 1)" % (dropout_p,))


def _scores(q, k, softmax_scale, causal, window, softcap, alibi_slopes):
    """float32 scores of one dense problem with -inf where masked; for S_dmask alone."""
    b, sq, hq, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    keys = k.float().repeat_interleave(hq // hk, 2)
    s = torch.einsum("bihd,bjhd->bhij", q.float(), keys) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(sq)[:, None] + sk - sq
    j = torch.arange(sk)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        s = s - slopes[:, :, None, None] * (i - j).abs()
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    left, right = window
    if causal or right >= 0:
        hidden |= j > i + (0 if causal else right)
    if left >= 0:
        hidden |= j < i - left
    return s.masked_fill(hidden, -torch.inf)


def _signed_probabilities(s, kept):
    """exp(s - row max), negative where dropped."""
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(s.shape[:-1] + (1,))
    p = torch.where(s == -torch.inf, 0.0, torch.exp(s - torch.where(top == -torch.inf, 0.0, top)))
    return torch.where(kept, p, -p)


def _s_dmask(q, k, kept, softmax_scale, causal, window, softcap, alibi_slopes):
    b, sq, hq, _ = q.shape
    sk = k.shape[1]
    out = q.new_zeros(b, hq, round_multiple(sq, 128), round_multiple(sk, 128))
    s = _scores(q, k, softmax_scale, causal, window, softcap, alibi_slopes)
    out[:, :, :sq, :sk] = _signed_probabilities(s, kept).to(q.dtype)
    return out


def _s_dmask_varlen(q, k, kept, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window, softcap, alibi_slopes):
    b = cu_q.shape[0] - 1
    out = q.new_zeros(b, q.shape[1], round_multiple(max_q, 128), round_multiple(max_k, 128))
    for n in range(b):
        rows, keys = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
        slopes = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        s = _scores(q[None, rows], k[None, keys], softmax_scale, causal, window, softcap, slopes)[0]
        out[n, :, : s.shape[1], : s.shape[2]] = _signed_probabilities(s, kept[n, :, : s.shape[1], : s.shape[2]]).to(q.dtype)
    return out


def _dense(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
           return_attn_probs, rng_state=None):  # fmt: skip
    check_inputs(q, ("key", k), ("value", v))
    _check_dropout(dropout_p)
    bounds = window(window_size, causal)
    wants = bool(return_attn_probs)
    got = _torch.attention(q, k, v, causal=causal, window=bounds, softmax_scale=softmax_scale, softcap=softcap,
                           alibi_slopes=alibi_slopes, dropout_p=dropout_p, rng_state=rng_state,
                           deterministic=deterministic, return_lse=wants,
                           return_dropout_mask=wants and dropout_p > 0)  # fmt: skip
    if not wants:
        return got
    with torch.no_grad():
        mask = q.new_empty(0)
        if dropout_p > 0:
            mask = _s_dmask(q, k, got[2], softmax_scale, causal, bounds, softcap, alibi_slopes)
        return got[0], _plus_inf(got[1].detach()), mask


def _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table=None, rng_state=None,
            leftpad_k=None, seqused_k=None):  # fmt: skip
    check_inputs(q, ("key", k), ("value", v))
    _check_dropout(dropout_p)
    _common.refuse(leftpad_k=leftpad_k)
    bounds = window(window_size, causal)
    wants = bool(return_attn_probs)
    max_q, max_k = length(max_seqlen_q, "max_seqlen_q"), length(max_seqlen_k, "max_seqlen_k")
    lengths = dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_q)
    if block_table is None:
        lengths.update(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_k, seqused_k=seqused_k)
    else:
        used = torch.diff(cu_seqlens_k) if seqused_k is None else seqused_k
        lengths.update(page_table=block_table, seqused_k=used.to(torch.int32))
    wants_mask = wants and dropout_p > 0 and block_table is None
    got = _torch.attention_varlen(q, k, v, **lengths, causal=causal, window=bounds, softmax_scale=softmax_scale,
                                  softcap=softcap, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
                                  rng_state=rng_state, deterministic=deterministic, return_lse=wants,
                                  return_dropout_mask=wants_mask)  # fmt: skip
    if not wants:
        return got
    with torch.no_grad():
        mask = q.new_empty(0)
        if wants_mask:
            mask = _s_dmask_varlen(q, k, got[2], cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal, bounds,
                                   softcap, alibi_slopes)  # fmt: skip
        return got[0], _plus_inf(got[1].detach()), mask


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """qkv (batch, seqlen, 3, heads, dim) -> out (batch, seqlen, heads, dim), or (out, softmax_lse, S_dmask)."""
    q, k, v = qkv.unbind(2)
    return _dense(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """q (batch, seqlen_q, heads, dim), kv (batch, seqlen_k, 2, heads_k, dim)."""
    k, v = kv.unbind(2)
    return _dense(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """q (batch, seqlen_q, heads, dim), k and v (batch, seqlen_k, heads_k, dim) -> out like q, or (out, softmax_lse, S_dmask)."""
    return _dense(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):  # fmt: skip
    """qkv (total, 3, heads, dim), cu_seqlens int32 (batch + 1,)."""
    q, k, v = qkv.unbind(1)
    return _varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
                   softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """q (total_q, heads, dim), kv (total_k, 2, heads_k, dim)."""
    k, v = kv.unbind(1)
    return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):  # fmt: skip
    """q (total_q, heads, dim), k and v (total_k, heads_k, dim), or paged (num_blocks, page_size, heads_k, dim)."""
    return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table)  # fmt: skip


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False):  # fmt: skip
    """q (batch, seqlen_q, heads, dim) over a cache; k and v are appended in place at cache_seqlens. No gradient."""
    check_inputs(q, ("k_cache", k_cache), ("v_cache", v_cache))
    with torch.no_grad():
        got = _torch.attention_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, page_table=block_table,
            cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved, causal=causal, window=window(window_size, causal),
            softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
            return_lse=return_softmax_lse,
        )  # fmt: skip
    return (got[0], _plus_inf(got[1])) if return_softmax_lse else got


# ---- the functions below the public ones, which other packages call ----


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                        alibi_slopes, return_softmax):  # fmt: skip
    """-> (out, softmax_lse, S_dmask, rng_state int64 [2])."""
    rng_state = draw_rng_state(q.device) if dropout_p > 0 else torch.zeros(2, dtype=torch.int64, device=q.device)
    with torch.no_grad():
        out, lse, mask = _dense(q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right),
                                softcap, alibi_slopes, False, True, rng_state if dropout_p > 0 else None)  # fmt: skip
    return out, lse, mask if return_softmax else q.new_empty(0), rng_state


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                               softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                               alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
                               seqused_k=None, zero_tensors=False, num_splits=0):  # fmt: skip
    """-> (out, softmax_lse, S_dmask, rng_state int64 [2])."""
    if block_table is not None and num_splits > 1:
        raise InvalidArgument("num_splits > 1 is not supported for varlen paged KV")
    rng_state = draw_rng_state(q.device) if dropout_p > 0 else torch.zeros(2, dtype=torch.int64, device=q.device)
    with torch.no_grad():
        out, lse, mask = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                 softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
                                 False, True, block_table, rng_state if dropout_p > 0 else None, leftpad_k,
                                 seqused_k)  # fmt: skip
    return out, lse, mask if return_softmax else q.new_empty(0), rng_state


def _backward(dout, q, k, v, out, softmax_lse, given, dropout_p, rng_state, **options):
    if dropout_p > 0 and rng_state is None:
        raise InvalidArgument("rng_state None, must be what the forward pass returned when dropout_p > 0")
    grads = _torch.attention_backward(dout, q, k, v, out, _minus_inf(softmax_lse), dropout_p=dropout_p,
                                      rng_state=rng_state if dropout_p > 0 else None, **options)  # fmt: skip
    for name, into, grad in zip(("dq", "dk", "dv"), given, grads):
        if into is not None:
            if into.shape != grad.shape:
                raise InvalidArgument("%s has shape %s, must have %s" % (name, tuple(into.shape), tuple(grad.shape)))
            into.copy_(grad)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                         window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip
    """Writes dq, dk and dv in place -> softmax_d = rowsum(dout * out), float32 (batch, heads, round128(seqlen_q))."""
    check_inputs(q, ("key", k), ("value", v))
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, rng_state, softmax_scale=softmax_scale,
              causal=causal, window=window((window_size_left, window_size_right), causal), softcap=softcap,
              alibi_slopes=alibi_slopes, deterministic=deterministic)  # fmt: skip
    b, sq, hq, _ = q.shape
    softmax_d = q.new_zeros(b, hq, round_multiple(sq, 128), dtype=torch.float32)
    softmax_d[:, :, :sq] = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return softmax_d


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
                                softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False):  # fmt: skip
    """Writes dq, dk and dv in place -> softmax_d, float32 (heads, total_q + 128 * batch)."""
    check_inputs(q, ("key", k), ("value", v))
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, rng_state, cu_seqlens_q=cu_seqlens_q,
              cu_seqlens_k=cu_seqlens_k, max_seqlen_q=length(max_seqlen_q, "max_seqlen_q"),
              max_seqlen_k=length(max_seqlen_k, "max_seqlen_k"), softmax_scale=softmax_scale, causal=causal,
              window=window((window_size_left, window_size_right), causal), softcap=softcap,
              alibi_slopes=alibi_slopes, deterministic=deterministic)  # fmt: skip
    softmax_d = q.new_zeros(q.shape[1], q.shape[0] + 128 * (cu_seqlens_q.shape[0] - 1), dtype=torch.float32)
    softmax_d[:, : q.shape[0]] = (dout.float() * out.float()).sum(-1).t()
    return softmax_d


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
