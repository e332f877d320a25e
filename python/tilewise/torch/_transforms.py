"""torch.func: grad, vjp, jacrev and vmap of dense attention; jvp and second derivatives are refused by name.

The ops of `_ops` as autograd functions that functorch can lower. vmap folds the mapped dimension into the batch.
"""

import torch

from ..errors import Unsupported

_NUM_LENGTHS = 6
_DROPOUT_P = 7  # among the options


def active():
    """True under a torch.func transform; jvp, and forward-mode AD without torch.func, are refused."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    jvp = torch._C._functorch.TransformType.Jvp
    if any(level.key() == jvp for level in stack) or (not stack and torch.autograd.forward_ad._current_level >= 0):
        raise Unsupported("tilewise.attention: forward-mode derivatives (jvp) are not available; use reverse mode")
    return bool(stack)


def _fold(x, dim, size):
    """[.., size, .., b, ..] with the mapped dimension `dim` (None: the same for all) -> [size * b, ..]."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _unfold(x, size):
    return x.unflatten(0, (size, x.shape[0] // size))


class Forward(torch.autograd.Function):
    """tilewise::forward."""

    @staticmethod
    def forward(*inputs):
        return torch.ops.tilewise.forward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        from ._ops import setup_context

        setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx, dout, dlse):
        from ._ops import backward_formula

        return backward_formula(ctx, dout, dlse, Backward.apply)

    @staticmethod
    def vmap(info, in_dims, q, k, v, bias, alibi_slopes, sinks, *rest):
        lengths, options = rest[:_NUM_LENGTHS], rest[_NUM_LENGTHS:]
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, rng_state = lengths
        if cu_seqlens_q is not None or cu_seqlens_k is not None or page_table is not None:
            raise Unsupported("torch.func.vmap over packed or paged attention is not available; use dense tensors")
        if options[_DROPOUT_P] > 0:
            raise Unsupported("torch.func.vmap over attention with dropout_p > 0 is not available")
        if in_dims[5] is not None:
            raise Unsupported("torch.func.vmap over sinks is not available")
        size = info.batch_size
        batch = q.shape[0] if in_dims[0] is None else q.movedim(in_dims[0], 0).shape[1]
        q, k, v = (_fold(x, dim, size) for x, dim in zip((q, k, v), in_dims))
        if bias is not None and (in_dims[3] is not None or bias.shape[0] != 1):
            bias = bias.unsqueeze(0).expand(size, *bias.shape) if in_dims[3] is None else bias.movedim(in_dims[3], 0)
            bias = bias.expand(size, batch, *bias.shape[2:]).flatten(0, 1)
        if alibi_slopes is not None and (in_dims[4] is not None or alibi_slopes.dim() == 2):
            slopes = alibi_slopes
            slopes = slopes.expand(size, *slopes.shape) if in_dims[4] is None else slopes.movedim(in_dims[4], 0)
            if slopes.dim() == 2:  # [size, hq]
                slopes = slopes.unsqueeze(1).expand(size, batch, slopes.shape[-1])
            alibi_slopes = slopes.flatten(0, 1)
        used = [_fold(x, dim, size) for x, dim in zip((seqused_q, seqused_k), in_dims[8:10])]
        o, lse = Forward.apply(q, k, v, bias, alibi_slopes, sinks, None, None, *used, None, rng_state, *options)
        return (_unfold(o, size), _unfold(lse, size)), (0, 0)


class Backward(torch.autograd.Function):
    """tilewise::backward."""

    @staticmethod
    def forward(*inputs):
        return torch.ops.tilewise.backward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise Unsupported("tilewise.attention: second derivatives (double backward) are not available")

    @staticmethod
    def vmap(info, in_dims, dout, dlse, q, k, v, o, lse, bias, alibi_slopes, sinks, *rest):
        lengths, wanted, options = rest[:_NUM_LENGTHS], rest[_NUM_LENGTHS], rest[_NUM_LENGTHS + 1 :]
        if any(x is not None for x in lengths) or bias is not None or alibi_slopes is not None or sinks is not None:
            raise Unsupported("torch.func.vmap over the gradient of attention takes q, k and v only")
        if options[_DROPOUT_P] > 0:
            raise Unsupported("torch.func.vmap over attention with dropout_p > 0 is not available")
        size = info.batch_size
        folded = [_fold(x, dim, size) for x, dim in zip((dout, dlse, q, k, v, o, lse), in_dims)]
        grads = Backward.apply(*folded, None, None, None, *lengths, wanted, *options)
        return tuple(_unfold(g, size) if w else g for g, w in zip(grads, wanted)), tuple(0 if w else None for w in wanted)
