"""flash_attn.layers.rotary: rotary position embedding in torch operations (differentiable, any device)."""

import torch


def _pairs(x, interleaved):
    """The two members of every rotated pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x.chunk(2, -1)


def _unpair(first, second, interleaved):
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def rotate_half(x, interleaved=False):
    """(x0, x1) -> (-x1, x0) for every pair."""
    first, second = _pairs(x, interleaved)
    return _unpair(-second, first, interleaved)


def _rotate(x, cos, sin, interleaved):
    """x (..., heads, dim), cos and sin (..., 1, rotary_dim / 2); float32 arithmetic, dtype of x."""
    width = 2 * cos.shape[-1]
    first, second = _pairs(x[..., :width].float(), interleaved)
    cos, sin = cos.float(), sin.float()
    turned = _unpair(first * cos - second * sin, first * sin + second * cos, interleaved).to(x.dtype)
    return torch.cat((turned, x[..., width:]), -1) if width < x.shape[-1] else turned


def _positions(x, seqlen_offsets, cu_seqlens):
    """The position of every token: (seqlen,), (batch, seqlen) or (total,)."""
    if cu_seqlens is None:
        steps = torch.arange(x.shape[1], device=x.device)
        if isinstance(seqlen_offsets, torch.Tensor):
            return seqlen_offsets.to(torch.int64).reshape(-1, 1) + steps
        return steps + seqlen_offsets
    lengths = torch.diff(cu_seqlens).to(torch.int64)
    total = x.shape[0]
    entry = torch.repeat_interleave(torch.arange(lengths.shape[0], device=x.device), lengths)
    position = torch.arange(entry.shape[0], device=x.device) - cu_seqlens.to(torch.int64)[entry]
    if isinstance(seqlen_offsets, torch.Tensor):
        position = position + seqlen_offsets.to(torch.int64)[entry]
    else:
        position = position + seqlen_offsets
    return torch.nn.functional.pad(position, (0, total - position.shape[0]))


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """x (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens; cos and sin (positions, rotary_dim / 2).

    `seqlen_offsets` (int or (batch,) tensor) shifts the positions. interleaved: pairs (0, 1), (2, 3), ..; else halves.
    """
    if cos.shape != sin.shape:
        raise ValueError("cos has shape %s but sin %s" % (tuple(cos.shape), tuple(sin.shape)))
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError("cos has rotary_dim %d, must be <= head dim %d" % (2 * cos.shape[-1], x.shape[-1]))
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    out = _rotate(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), interleaved)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x (batch, seqlen, heads, dim), cos and sin (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2)."""
    return _rotate(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
    """Rotates q and k of qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, hq + 2 hk, dim) with num_heads_q."""
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None:
            raise ValueError("num_heads_q None, must be given for qkv of 4 dimensions")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_k, heads_k), 2)
    q = apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    k = apply_rotary_emb(k, cos_k, sin_k, interleaved, seqlen_offsets=seqlen_offsets)
    out = torch.stack((q, k, v), 2) if qkv.dim() == 5 else torch.cat((q, k, v), 2)
    return out if qkv.requires_grad and torch.is_grad_enabled() else qkv.copy_(out)


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotates k of kv (batch, seqlen, 2, heads, dim)."""
    k, v = kv.unbind(2)
    out = torch.stack((apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=seqlen_offsets), v), 2)
    return out if kv.requires_grad and torch.is_grad_enabled() else kv.copy_(out)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with cached cos and sin; xPos where `scale_base` is given."""

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-even / dim), persistent=False)
        scale = (even + 0.4 * dim) / (1.4 * dim) if scale_base is not None else None
        self.register_buffer("scale", scale, persistent=False)
        self._cached = None

    def _tables(self, seqlen, device, dtype):
        key = (device, dtype)
        if self._cached is None or self._cached[0] != key or self._cached[1] < seqlen:
            t = torch.arange(seqlen, device=device, dtype=torch.float32)
            angles = torch.outer(t, self.inv_freq.to(device))
            cos, sin = angles.cos(), angles.sin()
            if self.scale is None:
                tables = (cos.to(dtype), sin.to(dtype), None, None)
            else:
                power = (t - seqlen // 2) / self.scale_base
                scale = self.scale.to(device) ** power[:, None]
                tables = tuple(x.to(dtype) for x in (cos * scale, sin * scale, cos / scale, sin / scale))
            self._cached = (key, seqlen, tables)
        return self._cached[2]

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """qkv alone -> rotated qkv; q as `qkv` with kv (batch, seqlen, 2, heads, dim) -> (q, kv)."""
        seqlen = qkv.shape[1]
        longest = max_seqlen
        if longest is None:
            longest = seqlen + (int(seqlen_offset.max()) if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset)
        cos, sin, cos_k, sin_k = self._tables(longest, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, seqlen_offsets=seqlen_offset)
        kv = apply_rotary_emb_kv_(kv, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, self.interleaved,
                                  seqlen_offset)  # fmt: skip
        return q, kv
