"""flash_attn.bert_padding: between padded (batch, seqlen, ...) and packed (total, ...) tensors. Differentiable."""

import torch
import torch.nn.functional as F


def index_first_axis(x, indices):
    """x[indices] along the first dimension."""
    return x.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """Zeros with first_axis_dim rows, of which `indices` hold the values."""
    out = values.new_zeros((first_axis_dim,) + tuple(values.shape[1:]))
    return out.index_copy(0, indices, values)


def index_first_axis_residual(x, indices):
    """(x[indices], x): x again, for the residual that follows."""
    return index_first_axis(x, indices), x


def _lengths(seqlens):
    cu_seqlens = F.pad(torch.cumsum(seqlens, 0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(seqlens.max()) if seqlens.numel() else 0


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """hidden_states (batch, seqlen, ...), attention_mask (batch, seqlen), 1 = keep ->
    (hidden (total, ...), indices (total,), cu_seqlens int32 (batch + 1,), max_seqlen int, seqused int32 (batch,)).

    `unused_mask` marks positions that are kept too but are not in use; `seqused` does not count them.
    """
    all_masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = all_masks.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(all_masks.flatten(), as_tuple=False).flatten()
    cu_seqlens, longest = _lengths(seqlens)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """Rows that hold several sequences: attention_mask_in_length (batch, seqlen) lists their lengths, then zeros ->
    (hidden (total, ...), indices, cu_seqlens int32 over all sequences, max_seqlen int)."""
    per_row = attention_mask_in_length.sum(-1)
    seqlen = attention_mask_in_length.shape[-1]
    mask = torch.arange(seqlen, device=per_row.device)[None] < per_row[:, None]
    seqlens = attention_mask_in_length.flatten()
    seqlens = seqlens[seqlens > 0].to(torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    cu_seqlens, longest = _lengths(seqlens)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states, indices, batch, seqlen):
    """(total, ...) -> (batch, seqlen, ...) with zeros where nothing was kept."""
    out = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return out.view((batch, seqlen) + tuple(out.shape[1:]))
