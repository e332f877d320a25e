"""Hypothesis: random problems, every option, forward and backward, against the float64 oracle."""

import oracle
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise

SIZES = st.one_of(st.integers(0, 9), st.integers(10, 70), st.sampled_from([64, 65, 95, 96, 97, 128, 130, 257]))
KINDS = ("normal", "peaked", "constant", "one_hot", "low_rank", "negative")


def tensor(kind, shape, dtype):
    if kind == "peaked":
        x = torch.randn(shape) * 4
    elif kind == "constant":
        x = torch.full(shape, 0.5)
    elif kind == "one_hot":
        x = torch.nn.functional.one_hot(torch.randint(0, shape[-1], shape[:-1]), shape[-1]).float()
    elif kind == "low_rank":
        x = torch.randn(shape[:-1] + (1,)) * torch.randn(shape[-1:])
    elif kind == "negative":
        x = torch.randn(shape) - 3
    else:
        x = torch.randn(shape)
    return x.to(dtype)


@st.composite
def problems(draw):
    b, hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sq, sk = draw(SIZES), draw(SIZES)
    d = draw(st.one_of(st.integers(1, 24), st.sampled_from([32, 40, 64, 72, 96, 128])))
    dv = draw(st.one_of(st.just(d), st.integers(1, 72)))
    p = {
        "seed": draw(st.integers(0, 2**31)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64])),
        "kind": draw(st.sampled_from(KINDS)),
        "sizes": (b, sq, sk, hk * group, hk, d, dv),
        "causal": draw(st.booleans()),
    }
    if draw(st.booleans()):
        p["window"] = (draw(st.integers(-1, 80)), -1 if p["causal"] else draw(st.integers(-1, 80)))
    if draw(st.booleans()):
        p["softmax_scale"] = draw(st.sampled_from([0.0, 0.5, -0.25, 1.0]))
    if draw(st.booleans()):
        p["softcap"] = draw(st.sampled_from([1.0, 5.0, 30.0]))
    if draw(st.booleans()):
        p["bias"] = (draw(st.tuples(*[st.booleans()] * 4)), draw(st.sampled_from(["float", "bool"])))
    if draw(st.booleans()):
        p["alibi"] = draw(st.booleans())
    p["num_threads"] = draw(st.integers(1, 3))
    p["sinks"] = draw(st.booleans())
    p["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    return p


def build(p):
    torch.manual_seed(p["seed"])
    b, sq, sk, hq, hk, d, dv = p["sizes"]
    dtype = p["dtype"]
    q, k = tensor(p["kind"], (b, sq, hq, d), dtype), tensor(p["kind"], (b, sk, hk, d), dtype)
    v = torch.randn(b, sk, hk, dv).to(dtype)
    bias = slopes = sinks = None
    if "bias" in p:
        shape = tuple(n if full else 1 for n, full in zip((b, hq, sq, sk), p["bias"][0]))
        bias = torch.randn(shape) if p["bias"][1] == "float" else torch.rand(shape) > 0.3
    if "alibi" in p:
        slopes = torch.rand((b, hq) if p["alibi"] else (hq,))
    if p["sinks"]:
        sinks = torch.randn(hq)
    options = {n: p[n] for n in ("causal", "window", "softmax_scale", "softcap") if n in p}
    return (q, k, v, bias, slopes, sinks), options


@given(problems())
def test_agrees_with_float64(p):
    tensors, options = build(p)
    dtype, p_drop = p["dtype"], p["dropout_p"]
    ours = [x.clone().requires_grad_() if x is not None and x.dtype.is_floating_point else x for x in tensors]
    extra = {}
    kept = None
    if p_drop:
        extra = {"dropout_p": p_drop, "dropout_seed": p["seed"], "return_dropout_mask": True}
    got = tilewise.attention(*ours[:3], bias=ours[3], alibi_slopes=ours[4], sinks=ours[5], return_lse=True,
                             num_threads=p["num_threads"], **options, **extra)  # fmt: skip
    o, lse = got[:2]
    if p_drop:
        kept = got[2]

    def by_oracle(arithmetic):
        x = oracle.leaves(*tensors, dtype=arithmetic)
        o, lse = oracle.attention(*x[:3], bias=x[3], alibi_slopes=x[4], sinks=x[5], kept=kept, dropout_p=p_drop,
                                  arithmetic=arithmetic, **options)  # fmt: skip
        finite = torch.isfinite(lse)
        loss = (o * w.to(arithmetic)).sum() + (lse * w_lse.to(arithmetic))[finite].sum()
        return o, lse, torch.autograd.grad(loss, [t for t in x if t is not None and t.requires_grad])

    w, w_lse = torch.randn_like(o), torch.randn_like(lse)
    want, plain = by_oracle(torch.float64), by_oracle(torch.float32 if dtype == torch.float64 else dtype)
    finite = torch.isfinite(want[1])
    named = [(n, x) for n, x in zip(("q", "k", "v", "bias", "alibi_slopes", "sinks"), ours) if x is not None and x.requires_grad]
    loss = (o * w).sum().double() + (lse * w_lse)[finite].sum().double()
    got = (o, lse, torch.autograd.grad(loss, [x for _, x in named]))
    # lse, slopes, sinks and their gradients are float32 in every dtype; through them, float64 has float32's error too.
    kind = torch.float32 if dtype == torch.float64 else dtype
    # The backward pass recomputes P = exp(s - lse): the rounding of s and of lse, relative to P, is that of sum |q_c k_c|.
    # Standard attention normalises P afterwards, so that part of this error cancels there, and needs an allowance here.
    scale = options.get("softmax_scale", tensors[0].shape[-1] ** -0.5)
    pairs = torch.einsum("bihd,bjhd->bhij", tensors[0].float().abs(), tensors[1].float().abs().repeat_interleave(p["sizes"][3] // p["sizes"][4], 2))
    condition = 1 + abs(scale) * (pairs.max().item() if pairs.numel() else 0.0)
    recomputed = condition * torch.finfo(torch.float32).eps / oracle.RELATIVE[kind]
    for name, x, y, z in zip(["o", "lse"] + [n for n, _ in named], got[:2] + got[2], want[:2] + want[2], plain[:2] + plain[2]):
        oracle.assert_close(x, y, kind, name, 2.0 if name in ("o", "lse") else 6.0 + 4.0 * recomputed, z)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5), st.booleans(), st.integers(0, 30),
       st.integers(0, 2**31))  # fmt: skip
def test_packed_equals_sequence_by_sequence(lengths, causal, tail, seed):
    torch.manual_seed(seed)
    hq, hk, d = 4, 2, 24
    cu_q = torch.tensor([0] + [m for m, _ in lengths]).cumsum(0).int()
    cu_k = torch.tensor([0] + [n for _, n in lengths]).cumsum(0).int()
    q = torch.randn(int(cu_q[-1]) + tail, hq, d)
    k, v = torch.randn(2, int(cu_k[-1]) + tail, hk, d)
    q[int(cu_q[-1]) :], k[int(cu_k[-1]) :], v[int(cu_k[-1]) :] = torch.nan, torch.nan, torch.nan
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), map(max, zip(*lengths)))) if q.is_cuda else {}  # not read from a GPU
    o, lse = tilewise.attention_varlen(*leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal, return_lse=True, **longest)
    w = torch.randn(o.shape)
    grads = torch.autograd.grad((o * w).sum(), leaves)
    assert (o[int(cu_q[-1]) :] == 0).all() and (lse[:, int(cu_q[-1]) :] == -torch.inf).all()
    assert (grads[0][int(cu_q[-1]) :] == 0).all() and all((g[int(cu_k[-1]) :] == 0).all() for g in grads[1:])
    for n in range(len(lengths)):
        rows, keys = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
        part = oracle.leaves(q[None, rows], k[None, keys], v[None, keys])
        want, want_lse = oracle.attention(*part, causal=causal)
        oracle.assert_close(o[None, rows], want, torch.float32, "o")
        oracle.assert_close(lse[None, :, rows], want_lse, torch.float32, "lse")
        want = torch.autograd.grad((want * w[None, rows]).sum(), part)
        got = (grads[0][None, rows], grads[1][None, keys], grads[2][None, keys])
        oracle.assert_grads(got, want, torch.float32, "qkv")


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 2**31))
def test_cache_in_chunks_equals_one_call(chunks, size, hk, paged, seed):
    """Filling a cache chunk by chunk gives what causal attention over everything gives, dense and paged."""
    torch.manual_seed(seed)
    b, d, total = 2, 16, chunks * size
    q, k, v = torch.randn(b, total, 2 * hk, d), torch.randn(b, total, hk, d), torch.randn(b, total, hk, d)
    want, _ = oracle.attention(q, k, v, causal=True)
    page = 3
    pages = -(-total // page)
    options = {}
    if paged:
        k_cache, v_cache = torch.full((2, b * pages + 1, page, hk, d), torch.nan)
        options["page_table"] = torch.randperm(b * pages + 1)[: b * pages].reshape(b, pages).int()
    else:
        k_cache, v_cache = torch.full((2, b, total + 3, hk, d), torch.nan)
    for n in range(chunks):
        part = slice(n * size, (n + 1) * size)
        o = tilewise.attention_with_kvcache(q[:, part], k_cache, v_cache, k[:, part], v[:, part], cache_seqlens=n * size,
                                            causal=True, **options)  # fmt: skip
        oracle.assert_close(o, want[:, part], torch.float32)
