"""Dense attention on torch tensors, forward and backward, against the float64 oracle."""

import oracle
import pytest
import torch

import tilewise

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(b=2, sq=37, sk=41, hq=4, hk=2, d=32, dv=None, dtype=torch.float32):
    q = torch.randn(b, sq, hq, d).to(dtype)
    return q, torch.randn(b, sk, hk, d).to(dtype), torch.randn(b, sk, hk, dv or d).to(dtype)


def check(q, k, v, bias=None, alibi_slopes=None, sinks=None, factor=4.0, **options):
    """o, lse and every gradient, through o and lse at once."""
    dtype = q.dtype
    ours = [x.detach().clone().requires_grad_() if x is not None and x.dtype.is_floating_point else x
            for x in (q, k, v, bias, alibi_slopes, sinks)]  # fmt: skip
    theirs = oracle.leaves(q, k, v, bias, alibi_slopes, sinks)

    def run(function, x):
        return function(*x[:3], bias=x[3], alibi_slopes=x[4], sinks=x[5], **options)

    o, lse = run(lambda *a, **kw: tilewise.attention(*a, return_lse=True, **kw), ours)
    want_o, want_lse = run(oracle.attention, theirs)
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert o.is_contiguous() and lse.is_contiguous()
    oracle.assert_close(o, want_o, dtype, "o")
    oracle.assert_close(lse, want_lse, torch.float32 if dtype == torch.float64 else dtype, "lse", 2.0)
    plain = tilewise.attention(*[x.detach() for x in ours[:3]], bias=None if ours[3] is None else ours[3].detach(),
                               alibi_slopes=alibi_slopes, sinks=sinks, **options)  # fmt: skip
    assert torch.equal(plain, o), "without gradient"
    w_o, w_lse = torch.randn_like(o), torch.randn_like(lse)
    finite = torch.isfinite(want_lse)
    loss = (o * w_o).sum().double() + (lse * w_lse)[finite].sum().double()
    want_loss = (want_o * w_o.double()).sum() + (want_lse * w_lse.double())[finite].sum()
    names = [n for n, x in zip(("q", "k", "v", "bias", "alibi_slopes", "sinks"), ours)
             if x is not None and x.dtype.is_floating_point]  # fmt: skip
    take = lambda xs: [x for x in xs if x is not None and x.dtype.is_floating_point]  # noqa: E731
    got = torch.autograd.grad(loss, take(ours))
    want = torch.autograd.grad(want_loss, take(theirs))
    for x, y in zip(got, take(ours)):
        assert x.dtype == y.dtype and x.shape == y.shape
    plain = [None] * len(want)
    if bias is not None and dtype != torch.float32:  # a sum over many rows: what rounding o costs, plain attention shows
        rough = oracle.leaves(q, k, v, bias, alibi_slopes, sinks, dtype=dtype)
        rough_o, rough_lse = oracle.attention(*rough[:3], bias=rough[3], alibi_slopes=rough[4], sinks=rough[5], arithmetic=dtype, **options)
        rough_loss = (rough_o.double() * w_o.double()).sum() + (rough_lse.double() * w_lse.double())[finite].sum()
        plain = torch.autograd.grad(rough_loss, take(rough))
    for name, x, y, z in zip(names, got, want, plain):
        oracle.assert_close(x, y, dtype, name, factor, z)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_plain(dtype, causal):
    check(*inputs(dtype=dtype), causal=causal)


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 3), (5, 5)])
def test_heads(heads):
    check(*inputs(hq=heads[0], hk=heads[1]), causal=True)


@pytest.mark.parametrize("d, dv", [(1, 1), (8, 8), (20, 12), (59, 59), (64, 128), (111, 111), (192, 128), (256, 256)])
def test_head_dims(d, dv):
    check(*inputs(b=1, hq=2, hk=1, d=d, dv=dv), causal=True)


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (5, -1), (-1, 4), (2, 7), (100, 100), [3, 2], (None, 4)])
def test_window(window):
    reading = tuple(-1 if x is None else x for x in window)
    q, k, v = inputs()
    want, _ = oracle.attention(q, k, v, window=reading)
    oracle.assert_close(tilewise.attention(q, k, v, window=window), want, torch.float32)
    check(q, k, v, window=reading)
    tensor = torch.tensor(reading)
    assert torch.equal(tilewise.attention(q, k, v, window=tensor), tilewise.attention(q, k, v, window=reading))


@pytest.mark.parametrize("sq, sk", [(1, 5), (5, 1), (2, 5), (5, 2), (113, 203), (203, 113), (1, 1), (300, 7)])
def test_causal_alignment(sq, sk):
    check(*inputs(sq=sq, sk=sk), causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-8, 2.5])
def test_scale(scale):
    check(*inputs(), softmax_scale=scale, causal=True)


def test_softcap_changes_within_one_process():
    q, k, v = inputs()
    for cap in (0.0, 10.0, 1.5, 50.0, 0.0):
        check(q * 3, k, v, softcap=cap, causal=True, factor=8.0)


@pytest.mark.parametrize("shape", [(41,), (37, 41), (4, 37, 41), (2, 4, 37, 41), (2, 1, 1, 41), (1, 4, 37, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias(shape, dtype):
    check(*inputs(dtype=dtype), bias=torch.randn(shape), causal=True)


@pytest.mark.parametrize("shape", [(37, 41), (2, 1, 37, 41), (2, 1, 1, 41)])
def test_mask(shape):
    mask = torch.rand(shape) > 0.4
    check(*inputs(), bias=mask)
    full = torch.zeros(shape, dtype=torch.bool)  # nothing visible at all
    check(*inputs(), bias=full)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi(shape):
    check(*inputs(), alibi_slopes=torch.rand(shape), causal=True)
    check(*inputs(), alibi_slopes=torch.rand(shape))


def test_sinks():
    check(*inputs(), sinks=torch.randn(4), causal=True)
    check(*inputs(sq=41, sk=5), sinks=torch.randn(4), causal=True)  # rows without keys: lse = sink
    o = tilewise.attention(*inputs(), sinks=torch.randn(4, dtype=torch.bfloat16))  # slopes and sinks in other dtypes
    assert o.dtype == torch.float32


def test_everything_at_once():
    check(*inputs(), causal=True, window=(20, -1), softcap=5.0, bias=torch.randn(4, 37, 41), alibi_slopes=torch.rand(4),
          sinks=torch.randn(4), factor=8.0)  # fmt: skip


@pytest.mark.parametrize("p", [0.1, 0.48, 0.99])
def test_dropout(p):
    q, k, v = inputs()
    ours, theirs = [x.clone().requires_grad_() for x in (q, k, v)], oracle.leaves(q, k, v)
    o, kept = tilewise.attention(*ours, dropout_p=p, dropout_seed=7, dropout_offset=3, return_dropout_mask=True, causal=True)
    assert kept.dtype == torch.bool and abs(kept.double().mean().item() - (1 - p)) < 0.02
    want, _ = oracle.attention(*theirs, kept=kept, dropout_p=p, causal=True)
    oracle.assert_close(o, want, torch.float32)
    w = torch.randn_like(o)
    got = torch.autograd.grad((o * w).sum(), ours)
    oracle.assert_grads(got, torch.autograd.grad((want * w).sum(), theirs), torch.float32, "qkv")
    for h, i, j in ((0, 0, 0), (3, 36, 40), (1, 17, 5)):
        assert bool(kept[1, h, i, j]) == tilewise.dropout_keep(p, 7, 3, 4 + h, i, j)


def test_dropout_follows_torch_generator():
    q, k, v = inputs()
    torch.manual_seed(5)
    first, second = (tilewise.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    again = tilewise.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    state = torch.tensor([7, 3])
    a = tilewise.attention(q, k, v, dropout_p=0.5, rng_state=state)
    assert torch.equal(a, tilewise.attention(q, k, v, dropout_p=0.5, dropout_seed=7, dropout_offset=3))


def test_max_logit():
    q, k, v = inputs()
    o, lse, top = tilewise.attention(q, k, v, causal=True, return_lse=True, return_max_logit=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 32**-0.5
    scores = scores.masked_fill(~oracle.visible(37, 41, True), -torch.inf)
    torch.testing.assert_close(top, scores.amax((2, 3)), rtol=1e-5, atol=1e-5)
    leaf = q.clone().requires_grad_()
    o, top = tilewise.attention(leaf, k, v, causal=True, return_max_logit=True)
    assert o.requires_grad and not top.requires_grad


def test_seqused():
    q, k, v = inputs()
    used_q, used_k = torch.tensor([37, 11], dtype=torch.int32), torch.tensor([3, 41], dtype=torch.int32)
    k[0, 3:], v[0, 3:], q[1, 11:] = torch.nan, torch.inf, torch.nan  # never read
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = tilewise.attention(*leaves, seqused_q=used_q, seqused_k=used_k, causal=True, return_lse=True)
    grads = torch.autograd.grad(o.sum(), leaves)
    assert (o[1, 11:] == 0).all() and (lse[1, :, 11:] == -torch.inf).all()
    assert all(torch.isfinite(g).all() for g in grads)
    for b, (m, n) in enumerate(((37, 3), (11, 41))):
        part = oracle.leaves(q[b : b + 1, :m], k[b : b + 1, :n], v[b : b + 1, :n])
        want, _ = oracle.attention(*part, causal=True)
        oracle.assert_close(o[b : b + 1, :m], want, torch.float32)
        want = torch.autograd.grad(want.sum(), part)
        for g, w, length in zip(grads, want, (m, n, n)):
            oracle.assert_close(g[b : b + 1, :length], w, torch.float32, factor=4.0)
            assert (g[b, length:] == 0).all()


def test_hostile_values():
    """One key of enormous score gives exactly v; the softmax never sees a finite stand-in for minus infinity."""
    for dtype in DTYPES:
        x = torch.full((1, 1, 1, 64), 100.0, dtype=dtype)
        v = torch.randn(1, 1, 1, 64).to(dtype)
        assert torch.equal(tilewise.attention(x, x, v, softmax_scale=1e6), v)
    q = torch.ones(1, 1, 16, 128, dtype=torch.bfloat16)
    for level in (-1e4, -5e4, -524288.0):
        k = torch.full((1, 64, 1, 128), level / 128, dtype=torch.bfloat16)
        v = torch.ones(1, 64, 1, 128, dtype=torch.bfloat16)
        o, lse = tilewise.attention(q, k, v, softmax_scale=1.0, return_lse=True)
        assert torch.equal(o, torch.ones_like(o))
        raw = (q.double() * k[:, :1].double()).sum(-1).mean()
        torch.testing.assert_close(lse.double().mean(), raw + torch.log(torch.tensor(64.0).double()), rtol=1e-6, atol=1e-3)


def test_masked_nan_never_leaks():
    q, k, v = inputs(sq=5, sk=9)
    mask = torch.ones(9, dtype=torch.bool)
    mask[[2, 7]] = False
    want = tilewise.attention(q, k.index_fill(1, torch.tensor([2, 7]), 0), v.index_fill(1, torch.tensor([2, 7]), 0), bias=mask)
    k[:, 2], k[:, 7], v[:, 2], v[:, 7] = torch.nan, torch.inf, torch.inf, torch.nan
    assert torch.equal(tilewise.attention(q, k, v, bias=mask), want)
    k[:, 0, 0] = torch.nan  # a visible one does reach its heads
    got = tilewise.attention(q, k, v, bias=mask)
    assert got[:, :, :2].isnan().all() and torch.equal(got[:, :, 2:], want[:, :, 2:])


def test_merge_over_keys_equals_one_call():
    q, k, v = inputs()
    want, want_lse = tilewise.attention(q, k, v, return_lse=True)
    parts = [tilewise.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 9), (9, 9), (9, 41))]
    got = parts[0]
    for part in parts[1:]:
        got = tilewise.merge_states(*got, *part)
    torch.testing.assert_close(got[0], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 128])
def test_splits(splits):
    q, k, v = inputs(sq=1, sk=300)
    o, lse = tilewise.attention(q, k, v, num_splits=splits, return_lse=True)
    want, want_lse = oracle.attention(q, k, v)
    oracle.assert_close(o, want, torch.float32)
    oracle.assert_close(lse, want_lse, torch.float32)


def test_batch_invariant_rows():
    q, k, v = inputs(b=5)
    together = tilewise.attention(q, k, v, batch_invariant=True, causal=True)
    for b in range(5):
        alone = tilewise.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], batch_invariant=True, causal=True)
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("sq", [1, 37])
def test_kernels_agree(sq):
    q, k, v = inputs(sq=sq)
    want, _ = oracle.attention(q, k, v)
    tried = 0
    for kernel in tilewise.kernels():
        if not kernel.available or kernel.direction == "backward":
            continue
        try:
            got = tilewise.attention(q, k, v, kernel=kernel.name)
        except tilewise.Unsupported as refusal:  # by its own words: another dtype, or too many rows for decoding
            assert kernel.name in str(refusal) or "dtype" in str(refusal)
            continue
        oracle.assert_close(got, want, torch.float32, kernel.name)
        tried += 1
    assert tried >= (2 if q.is_cpu else 1)
