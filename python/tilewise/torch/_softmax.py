"""softmax and merge_states for torch tensors, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ._attention import _frontend, _threads


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, num_threads):
        y, lse = _frontend.softmax(x, return_lse=True, num_threads=num_threads)
        ctx.save_for_backward(y)
        ctx.set_materialize_grads(False)
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dlse):
        (y,) = ctx.saved_tensors
        p = y.float()
        dx = torch.zeros_like(p)
        if dy is not None:
            product = dy.float() * p
            dx = product - p * product.sum(-1, keepdim=True)
        if dlse is not None:
            dx = dx + p * dlse.unsqueeze(-1)
        return dx.to(y.dtype), None


def softmax(x, *, return_lse=False, num_threads=0):
    num_threads = num_threads or _threads()
    if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
        y, lse = _Softmax.apply(x, num_threads)
        return (y, lse) if return_lse else y
    return _frontend.softmax(x, return_lse=return_lse, num_threads=num_threads)


class _MergeStates(torch.autograd.Function):
    """o = w1 o1 + w2 o2 with w_n = exp(lse_n - lse); dlse_n = w_n (do . (o_n - o) + dlse)."""

    @staticmethod
    def forward(ctx, o, lse, o_other, lse_other):
        merged, merged_lse = _frontend.merge_states(o, lse, o_other, lse_other)
        ctx.save_for_backward(o, lse, o_other, lse_other, merged, merged_lse)
        ctx.set_materialize_grads(False)
        return merged, merged_lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        o1, lse1, o2, lse2, o, lse = ctx.saved_tensors
        grads = []
        for part, part_lse in ((o1, lse1), (o2, lse2)):
            weight = torch.where(part_lse == -torch.inf, 0.0, torch.exp(part_lse - lse))
            d_part, d_part_lse = None, torch.zeros_like(lse)
            if do is not None:
                rows = weight.transpose(-1, -2).unsqueeze(-1)
                d_part = (rows * do).to(part.dtype)
                inner = (do.float() * (part.float() - o.float())).sum(-1).transpose(-1, -2)
                d_part_lse = d_part_lse + weight * inner
            if dlse is not None:
                d_part_lse = d_part_lse + weight * dlse
            grads += [d_part, d_part_lse]
        return tuple(grads)


def merge_states(o, lse, o_other, lse_other):
    if torch.is_grad_enabled() and any(x.requires_grad for x in (o, lse, o_other, lse_other)):
        return _MergeStates.apply(o, lse, o_other, lse_other)
    return _frontend.merge_states(o, lse, o_other, lse_other)
