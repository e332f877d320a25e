"""Strides in, one layout out, no hidden copies."""

import itertools

import oracle
import pytest
import torch

import tilewise

B, S, H, D = 2, 24, 4, 32


def contiguous():
    return [torch.randn(B, S, H, D) for _ in range(3)]


def fused():
    return list(torch.randn(B, S, 3, H, D).unbind(2))


def heads_first():
    return [torch.randn(B, H, S, D).transpose(1, 2) for _ in range(3)]


def every_other():
    return [torch.randn(B, 2 * S, H, D)[:, ::2] for _ in range(3)]


def sequence_first():
    return [torch.randn(S, B, H, D).transpose(0, 1) for _ in range(3)]


def expanded():
    return [torch.randn(B, S, H, D)] + [torch.randn(1, S, 1, D).expand(B, S, H, D) for _ in range(2)]


def offset():
    return [torch.randn(B, S, H, D + 1)[..., 1:] for _ in range(3)]


def dout_contiguous(shape):
    return torch.randn(shape)


def dout_strided(shape):
    return torch.randn(shape[1], 2 * shape[0], *shape[2:])[:, ::2].transpose(0, 1)


def dout_expanded(shape):
    return torch.ones(()).expand(shape)


INPUTS = [contiguous, fused, heads_first, every_other, sequence_first, expanded, offset]
DOUTS = [dout_contiguous, dout_strided, dout_expanded]


@pytest.mark.parametrize("make_dout", DOUTS)
@pytest.mark.parametrize("make", INPUTS)
def test_strides(make, make_dout):
    q, k, v = (x.detach() for x in make())
    ours = [x.requires_grad_() for x in (q, k, v)]  # leaves with these very strides
    theirs = oracle.leaves(*ours)
    o, lse = tilewise.attention(*ours, causal=True, return_lse=True)
    want, _ = oracle.attention(*theirs, causal=True)
    oracle.assert_close(o, want, torch.float32)
    assert o.stride() == (S * H * D, H * D, D, 1) and lse.stride() == (H * S, S, 1)
    dout = make_dout(tuple(o.shape))
    got = torch.autograd.grad(o, ours, dout)
    oracle.assert_grads(got, torch.autograd.grad(want, theirs, dout.double()), torch.float32, "qkv")


def test_strided_calls_copy_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a copy")

    for make in INPUTS:
        q, k, v = make()
        want = tilewise.attention(q.contiguous(), k.contiguous(), v.contiguous())
        with monkeypatch.context() as patch:
            for name in ("contiguous", "clone", "copy_", "to", "reshape"):
                patch.setattr(torch.Tensor, name, refuse)
            got = tilewise.attention(q, k, v)
        assert torch.equal(got, want), make.__name__


def test_last_dimension_not_contiguous():
    q, k, v = (torch.randn(B, S, D, H).transpose(2, 3) for _ in range(3))
    want = tilewise.attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(tilewise.attention(q, k, v), want)
    q.requires_grad_()
    tilewise.attention(q, k, v).sum().backward()
    assert q.grad.shape == q.shape


def test_order_of_calls_does_not_matter():
    """Same shapes, other strides and dtypes, one after the other: nothing is remembered from call to call."""
    q, k, v = contiguous()
    flat = [torch.randn(1, S, 1, D).expand(B, S, H, D) for _ in range(2)]
    calls = [
        lambda: tilewise.attention(q, k, v),
        lambda: tilewise.attention(q, *flat),
        lambda: tilewise.attention(q.half(), k.half(), v.half()),
        lambda: tilewise.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()),
        lambda: tilewise.attention(q, k, v, softcap=2.0),
        lambda: tilewise.attention(q, k, v, causal=True),
    ]
    first = [call() for call in calls]
    for a, b in itertools.permutations(range(len(calls)), 2):
        assert torch.equal(calls[a](), first[a]) and torch.equal(calls[b](), first[b])


@pytest.mark.parametrize("grad", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("d", [59, 111])
def test_odd_head_dims_keep_their_shape(d, grad):
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[grad]
    with context():
        q, k, v = (torch.randn(1, 7, 2, d, requires_grad=grad == "grad") for _ in range(3))
        cu = torch.tensor([0, 7], dtype=torch.int32)
        for o in (
            tilewise.attention(q, k, v),
            tilewise.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=7, max_seqlen_k=7)[None],
        ):
            assert o.shape == (1, 7, 2, d) and o.is_contiguous()
    with torch.no_grad():
        assert tilewise.attention_with_kvcache(q, k, v).shape == (1, 7, 2, d)


def test_out():
    q, k, v = contiguous()
    want = tilewise.attention(q, k, v, causal=True)
    for out in (torch.empty_like(q), torch.empty(B, H, S, D).transpose(1, 2), torch.empty(B, S, H, 2 * D)[..., :D]):
        got = tilewise.attention(q, k, v, causal=True, out=out.fill_(torch.nan))
        assert got is out and torch.equal(got, want)
    cu = torch.arange(0, B + 1, dtype=torch.int32) * S
    packed = [x.reshape(B * S, H, D) for x in (q, k, v)]
    out = torch.empty(B * S, H, D)
    tilewise.attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=S, max_seqlen_k=S, causal=True, out=out)
    assert torch.equal(out.view_as(want), want)
    out = torch.empty_like(q[:, :1])
    tilewise.attention_with_kvcache(q[:, :1], k, v, out=out)
    assert torch.equal(out, tilewise.attention_with_kvcache(q[:, :1], k, v))
    with pytest.raises(tilewise.InvalidArgument, match="broadcast"):
        tilewise.attention(q, k, v, out=torch.empty(1, S, H, D).expand(B, S, H, D))
    with pytest.raises(tilewise.InvalidArgument, match="out has shape"):
        tilewise.attention(q, k, v, out=torch.empty(B, S, H, D + 1))
    with pytest.raises(tilewise.InvalidArgument, match="out"):
        tilewise.attention(q.requires_grad_(), k, v, out=torch.empty_like(q))


def test_negative_bit():
    """The imaginary part of a conjugate is a view whose negation is still to come."""
    x = torch.randn(3, 2, 5, 4, 16, dtype=torch.complex64)
    q, k, v = x.conj().imag.unbind(0)
    assert q.is_neg()
    want = tilewise.attention(*(-x.imag).unbind(0))
    assert torch.equal(tilewise.attention(q, k, v), want)
    assert torch.equal(tilewise.attention(q, k, v, return_max_logit=True)[0], want)
    with pytest.raises(tilewise.InvalidArgument, match="bias has the negative bit"):
        tilewise.attention(q, k, v, bias=torch.randn(5, 5, dtype=torch.complex64).conj().imag)


def test_options_are_not_mixed_up():
    """Calls with the same options share what they pack; nothing of one call stays in the next."""
    q, k, v = torch.randn(3, 5, 3, 4, 16).unbind(0)
    window = [1, 0]
    calls = [{}, {"causal": True}, {"window": (2, 1)}, {"softcap": 2.0}, {"softmax_scale": 0.5}, {"causal": 1, "softcap": 0}]
    want = [oracle.attention(q, k, v, **{**c, "causal": bool(c.get("causal"))})[0] for c in calls]
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    for _ in range(2):
        for options, expected in zip(calls, want):
            oracle.assert_close(tilewise.attention(q, k, v, **options), expected, torch.float32)
            tilewise.attention_varlen(*(x.reshape(-1, 4, 16)[:10] for x in (q, k, v)), cu_seqlens_q=cu, cu_seqlens_k=cu,
                                      max_seqlen_q=5, max_seqlen_k=5, softcap=1.0)  # fmt: skip
        for options, expected in zip(calls, want) if q.is_cpu else ():
            got = tilewise.attention(q.numpy(), k.numpy(), v.numpy(), **options)
            oracle.assert_close(torch.from_numpy(got), expected, torch.float32)
    assert torch.equal(tilewise.attention(q, k, v, window=window), tilewise.attention(q, k, v, window=(1, 0)))
    window[0] = 0  # a list that changes is read again
    assert torch.equal(tilewise.attention(q, k, v, window=window), tilewise.attention(q, k, v, window=(0, 0)))
