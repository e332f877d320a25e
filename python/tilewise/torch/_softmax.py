"""softmax and merge_states for torch tensors, with gradients: eager autograd functions, and ops for what traces.

  tilewise::softmax        (y, lse)
  tilewise::merge_states   (o, lse)
"""

import torch
from torch.autograd.function import once_differentiable

from ._attention import _frontend, _is_compiling, _threads, refuse_transforms, special
from ._ops import library


def _softmax_gradient(y, dy, dlse):
    p = y.float()
    dx = torch.zeros_like(p)
    if dy is not None:
        product = dy.float() * p
        dx = product - p * product.sum(-1, keepdim=True)
    if dlse is not None:
        dx = dx + p * dlse.unsqueeze(-1)
    return dx.to(y.dtype)


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
        return _softmax_gradient(y, dy, dlse), None


def softmax(x, *, return_lse=False, num_threads=0):
    if isinstance(x, torch.Tensor):
        refuse_transforms("softmax")
        if _is_compiling() or special(x):
            y, lse = torch.ops.tilewise.softmax(x, num_threads)
            return (y, lse) if return_lse else y
    num_threads = num_threads or _threads()
    if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
        y, lse = _Softmax.apply(x, num_threads)
        return (y, lse) if return_lse else y
    return _frontend.softmax(x, return_lse=return_lse, num_threads=num_threads)


def _merge_gradient(o1, lse1, o2, lse2, o, lse, do, dlse):
    """o = w1 o1 + w2 o2 with w_n = exp(lse_n - lse); dlse_n = w_n (do . (o_n - o) + dlse)."""
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


class _MergeStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, lse, o_other, lse_other):
        merged, merged_lse = _frontend.merge_states(o, lse, o_other, lse_other)
        ctx.save_for_backward(o, lse, o_other, lse_other, merged, merged_lse)
        ctx.set_materialize_grads(False)
        return merged, merged_lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        return _merge_gradient(*ctx.saved_tensors, do, dlse)


def merge_states(o, lse, o_other, lse_other):
    tensors = (o, lse, o_other, lse_other)
    if all(isinstance(x, torch.Tensor) for x in tensors):
        refuse_transforms("merge_states")
        if _is_compiling() or special(*tensors):
            return torch.ops.tilewise.merge_states(*tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _MergeStates.apply(*tensors)
    return _frontend.merge_states(*tensors)


# ---- the ops ----


def _softmax_op(x, num_threads):
    return _frontend.softmax(x, return_lse=True, num_threads=num_threads or _threads())


def _softmax_fake(x, num_threads):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _softmax_context(ctx, inputs, output):
    ctx.save_for_backward(output[0])
    ctx.set_materialize_grads(False)


def _merge_fake(o, lse, o_other, lse_other):
    return o.new_empty(o.shape), lse.new_empty(lse.shape)


def _merge_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


library.define("softmax(Tensor x, int num_threads) -> (Tensor, Tensor)")
library.define("merge_states(Tensor o, Tensor lse, Tensor o_other, Tensor lse_other) -> (Tensor, Tensor)")
for _key in ("CPU", "CUDA"):
    library.impl("softmax", _softmax_op, _key)
    library.impl("merge_states", _frontend.merge_states, _key)
torch.library.register_fake("tilewise::softmax", _softmax_fake, lib=library)
torch.library.register_fake("tilewise::merge_states", _merge_fake, lib=library)
torch.library.register_autograd(
    "tilewise::softmax", lambda ctx, dy, dlse: (_softmax_gradient(*ctx.saved_tensors, dy, dlse), None),
    setup_context=_softmax_context, lib=library,
)  # fmt: skip
torch.library.register_autograd(
    "tilewise::merge_states", lambda ctx, do, dlse: _merge_gradient(*ctx.saved_tensors, do, dlse),
    setup_context=_merge_context, lib=library,
)  # fmt: skip
