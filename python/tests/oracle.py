"""The contract in plain torch, float64, differentiable: what every test compares with. It shares no code with Tilewise."""

import torch


def visible(sq, sk, causal=False, window=(-1, -1)):
    i = torch.arange(sq)[:, None] + sk - sq
    j = torch.arange(sk)[None]
    seen = torch.ones(sq, sk, dtype=torch.bool)
    left, right = window
    if causal:
        seen &= j <= i
    elif right >= 0:
        seen &= j <= i + right
    if left >= 0:
        seen &= j >= i - left
    return seen


def attention(q, k, v, *, arithmetic=torch.float64, causal=False, window=None, softmax_scale=None, softcap=0.0, bias=None, alibi_slopes=None,
              sinks=None, kept=None, dropout_p=0.0):  # fmt: skip
    """(o [b, sq, hq, dv], lse [b, hq, sq]) in `arithmetic`. `kept`: the dropout mask."""
    q, k, v = q.to(arithmetic), k.to(arithmetic), v.to(arithmetic)
    b, sq, hq, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(hq // hk, 2), v.repeat_interleave(hq // hk, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    seen = visible(sq, sk, causal, window or (-1, -1)).expand(b, hq, sq, sk)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(arithmetic)
        slopes = slopes[None, :, None, None] if slopes.dim() == 1 else slopes[:, :, None, None]
        distance = (torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)[None]).abs()
        s = s - slopes * distance.to(arithmetic)
    if bias is not None:
        if bias.dtype == torch.bool:
            seen = seen & bias
        else:
            s = s + bias.to(arithmetic)
    s = s.masked_fill(~seen, -torch.inf)
    logits = s
    if sinks is not None:
        logits = torch.cat((s, sinks.to(arithmetic)[None, :, None, None].expand(b, hq, sq, 1)), -1)
    if logits.shape[-1] == 0:
        return torch.einsum("bhij,bjhd->bihd", s, v), torch.full((b, hq, sq), -torch.inf, dtype=arithmetic)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    safe = torch.where(empty, 0.0, logits)
    lse = torch.logsumexp(safe, -1).masked_fill(empty[..., 0], -torch.inf)
    p = torch.softmax(safe, -1).masked_fill(empty, 0.0)[..., :sk]
    if kept is not None:
        p = p * kept / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def leaves(*tensors, dtype=torch.float64):
    """Copies in `dtype` that take gradients; None and bool pass."""
    return [
        x.detach().to(dtype).requires_grad_() if x is not None and x.dtype.is_floating_point else x for x in tensors
    ]


# What rounding alone explains, as a share of the largest value. Inputs are rounded alike on both sides, so what remains is
# the rounding of the result and, in 16 bits, of the probabilities.
RELATIVE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float64: 1e-12}


def distance(got, want):
    """(largest error, largest value); infinities must agree exactly, and nothing else may be infinite or NaN."""
    got, want = got.detach().double(), want.detach().double()
    if got.numel() == 0:
        return 0.0, 0.0
    infinite = torch.isinf(want)
    if not torch.equal(got[infinite], want[infinite]) or not torch.isfinite(got[~infinite]).all():
        return float("inf"), 0.0
    got, want = got.masked_fill(infinite, 0), want.masked_fill(infinite, 0)
    return (got - want).abs().max().item(), want.abs().max().item()


def assert_close(got, want, dtype, what="", factor=1.0, plain=None):
    """Error against float64 at most `factor` roundings of the largest value; or, with `plain` (the same function in the
    dtype's own arithmetic, in plain torch), at most 3 times its error more."""
    assert got.shape == want.shape, (what, got.shape, want.shape)
    error, largest = distance(got, want)
    allowed = factor * RELATIVE[dtype] * max(1.0, largest)
    if plain is not None:
        allowed += 3 * distance(plain, want)[0]
    assert error <= allowed, "%s: error %.3g, allowed %.3g, largest value %.3g, %s" % (what, error, allowed, largest, dtype)


def assert_grads(got, want, dtype, names, factor=4.0):
    """Gradients add a sum over the other side: four times the forward tolerance."""
    for name, x, y in zip(names, got, want):
        if y is None:
            assert x is None, name
            continue
        assert x is not None, name
        assert_close(x, y, dtype, name, factor)
