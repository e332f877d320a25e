"""Tilewise as an attention implementation of Hugging Face transformers.

    import tilewise.integrations.transformers
    tilewise.integrations.transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tilewise")

`enable` registers the name in AttentionInterface and in AttentionMaskInterface. The mask function looks at the pattern that
the model asks for. Causal, sliding-window and bidirectional patterns with padding on either side need no [sq, sk] mask: the
padding becomes lengths, and the pattern options of the call. Any other pattern (packed sequences, chunks, image blocks)
becomes transformers' own boolean mask, which Tilewise takes as it is.
"""

import torch

from ..errors import Unsupported
from ..torch import attention, attention_varlen, attention_with_kvcache

NAME = "tilewise"


def enable(name=NAME):
    """Registers Tilewise under `name` (idempotent). Raises ImportError if transformers is missing or older than 4.53."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError("tilewise.integrations.transformers needs transformers >= 4.53 (AttentionMaskInterface)") from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


# ---- the mask ----


class Padding:
    """What the mask function found out, attached to the mask that travels through the model as `mask.tilewise`.

    `causal` and `window` are the pattern, aligned bottom-right over the first `length` keys (None: all). Of these, entry b
    has the keys of `keep` [b, sk]: as lengths where they are a run that ends the sequence (`leftpad`), or starts it under a
    pattern that has no alignment (`seqused_k`), else as `key_mask`.
    """

    def __init__(self, causal, window, keep, last):
        self.causal, self.window = causal, window
        b, sk = keep.shape
        positions = torch.arange(1, sk + 1, dtype=torch.int32, device=keep.device)
        end = (keep * positions).amax(1).to(torch.int32) if sk else keep.new_zeros(b, dtype=torch.int32)
        leftpad = end - keep.sum(1, dtype=torch.int32)  # the number of missing keys before the last one
        run = (((positions > leftpad[:, None]) & (positions <= end[:, None])) == keep).all()
        aligned = causal or window is not None
        self.leftpad = self.key_mask = None
        self.seqused_k = None if last == sk else torch.full((b,), last, dtype=torch.int32, device=keep.device)
        if bool(run & ((end == last) if aligned else (leftpad == 0)).all()):
            if aligned and bool(leftpad.any()):
                self.leftpad = leftpad
            if not aligned:
                self.seqused_k = end
        if self.leftpad is not None or (not bool(keep[:, :last].all()) and (aligned or self.seqused_k is not end)):
            self.key_mask = keep[:, None, None, :]


def _pattern(function):
    """(causal, window) of a mask function that is a conjunction of transformers' own, else None."""
    from transformers import masking_utils as m

    if function is m.causal_mask_function:
        return True, None
    if function is getattr(m, "bidirectional_mask_function", None):  # not in transformers 4
        return False, None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ())) if hasattr(function, "__code__") else {}
    name = getattr(function, "__qualname__", "")
    if name.startswith("and_masks.") and "mask_functions" in cells:
        causal, window = False, None
        for part in cells["mask_functions"].cell_contents:
            found = _pattern(part)
            if found is None or (window is not None and found[1] is not None):
                return None
            causal, window = causal or found[0], found[1] or window
        return causal, window
    if name.startswith("sliding_window_overlay.") and "sliding_window" in cells:
        return False, (cells["sliding_window"].cell_contents - 1, -1)
    if name.startswith("sliding_window_bidirectional_overlay.") and "sliding_window" in cells:
        size = cells["sliding_window"].cell_contents
        return False, (size, size)
    return None


def attention_mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=None,
                   attention_mask=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=False, **kwargs):  # fmt: skip
    """The function registered in AttentionMaskInterface: None, a [b, sk] mask with `.tilewise`, or a 4-d boolean mask."""
    from transformers import masking_utils as m

    def dense():
        arguments = dict(kwargs, batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset,
                         mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
                         allow_is_bidirectional_skip=False)  # fmt: skip
        if cache_position is not None:
            arguments["cache_position"] = cache_position
        else:
            arguments.update(q_length=q_length, q_offset=q_offset)
        return m.sdpa_mask(**arguments)

    cache_position = kwargs.pop("cache_position", None)  # what transformers 4 gives in place of q_length and q_offset
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return dense()
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    pattern = _pattern(mask_function) if mask_function is not None else (True, None)
    if pattern is None:
        return dense()
    causal, window = pattern
    if window is not None and window[1] < 0 and window[0] >= kv_length - 1:
        window = None
    first = q_offset - kv_offset  # position of query 0 among the keys
    last = first + q_length  # one past the last query
    keep = None
    if attention_mask is not None:
        keep = attention_mask.to(torch.bool)
        if kv_offset and keep.shape[1] == kv_length < q_offset + q_length:
            # generate() makes the masks of a static cache itself, and the model then asks again with that mask, which
            # begins at kv_offset already.
            keep = torch.nn.functional.pad(keep, (kv_offset, 0), value=True)
        keep = torch.nn.functional.pad(keep, (0, max(0, kv_offset + kv_length - keep.shape[1])))
        keep = keep[:, kv_offset : kv_offset + kv_length]
    if causal and last < kv_length:  # a static cache: keys after the last query are not there yet
        if keep is None:
            keep = torch.ones((batch_size, kv_length), dtype=torch.bool, device=kwargs.get("device", "cpu"))
        keep = keep.clone()
        keep[:, last:] = False
    if keep is not None and bool(keep.all()):
        keep = None
    if keep is None:
        if window is None and (not causal or last == kv_length):
            return None
        keep = torch.ones((batch_size, kv_length), dtype=torch.bool, device=kwargs.get("device", "cpu"))
    if (causal or window is not None) and (first < 0 or last > kv_length or (not causal and last != kv_length)):
        return dense()
    keep.tilewise = Padding(causal, window, keep, last if causal else kv_length)
    return keep


# ---- the function ----


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None,
                      softcap=None, is_causal=None, s_aux=None, position_bias=None, **kwargs):  # fmt: skip
    """The function registered in AttentionInterface: query [b, hq, sq, d], key and value [b, hk, sk, ..] unrepeated.

    Returns (out [b, sq, hq, dv], None).
    """
    if kwargs.get("output_attentions"):
        from transformers.utils import logging

        logging.get_logger(__name__).warning_once(
            "tilewise does not form attention weights: output_attentions=True gives None. Use attn_implementation='eager'."
        )
    if kwargs.get("head_mask") is not None:
        raise Unsupported("tilewise: head_mask is not available; use attn_implementation='eager'")
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if key.dtype != query.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    window = None if sliding_window is None else (sliding_window - 1, -1)
    options = dict(softmax_scale=scaling, softcap=softcap or 0.0, sinks=s_aux, dropout_p=dropout)
    if position_bias is not None:
        options["bias"] = position_bias

    if kwargs.get("cu_seq_lens_q") is not None and q.shape[0] == 1:  # packed by the data collator
        if position_bias is not None:
            raise Unsupported("tilewise: position_bias with packed sequences is not available")
        o = attention_varlen(
            q[0], k[0], v[0], cu_seqlens_q=kwargs["cu_seq_lens_q"].to(torch.int32),
            cu_seqlens_k=kwargs["cu_seq_lens_k"].to(torch.int32), max_seqlen_q=kwargs.get("max_length_q"),
            max_seqlen_k=kwargs.get("max_length_k"), causal=causal, window=window, **options,
        )  # fmt: skip
        return o.unsqueeze(0), None

    found = getattr(attention_mask, "tilewise", None)
    if attention_mask is None:
        return attention(q, k, v, causal=causal, window=window, **options), None
    if attention_mask.dim() == 2 and found is None:  # a plain padding mask: 1 = keep
        attention_mask = attention_mask[:, -k.shape[1] :].to(torch.bool)[:, None, None, :]
        options["bias"] = _joined(attention_mask, position_bias)
        return attention(q, k, v, causal=causal, window=window, **options), None
    if found is None:
        # 4-dimensional, boolean (True = visible) or float (added): the whole pattern
        attention_mask = attention_mask[..., : k.shape[1]]
        options["bias"] = _joined(attention_mask, position_bias)
        return attention(q, k, v, **options), None

    grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, s_aux, position_bias)
    )
    if found.leftpad is not None and not grad and not dropout and position_bias is None:
        # Left padding as a number. It has no backward pass, where the padding is a mask over keys instead.
        options.pop("dropout_p")
        lengths = found.seqused_k if found.seqused_k is not None else k.shape[1]
        o = attention_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=found.leftpad, causal=found.causal,
                                   window=found.window, **options)  # fmt: skip
        return o, None
    if found.key_mask is not None:
        options["bias"] = _joined(found.key_mask, position_bias)
    return attention(q, k, v, causal=found.causal, window=found.window, seqused_k=found.seqused_k, **options), None


def _joined(mask, position_bias):
    if position_bias is None:
        return mask
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, -torch.inf)
    return mask + position_bias
