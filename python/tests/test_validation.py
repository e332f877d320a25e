"""Wrong use: one clear error that names the argument, what came and what is allowed; nothing written, nothing ignored.

All of it holds under `python -O` too: no check is an assert.
"""

import re

import pytest
import torch

import tilewise

B, SQ, SK, H, HK, D = 2, 5, 7, 4, 2, 16


def qkv(dtype=torch.float32):
    return [torch.randn(s).to(dtype) for s in ((B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, D))]


def packed():
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    return [torch.randn(9, n, D) for n in (H, HK, HK)], cu


def int32(*x):
    return torch.tensor(x, dtype=torch.int32)


DENSE = {
    "window below -1": (dict(window=(-3, -1)), "window_left -3"),
    "window right below -1": (dict(window=(0, -2)), "window_right -2"),
    "causal with a window to the right": (dict(causal=True, window=(-1, 3)), "window_right 3"),
    "window of one number": (dict(window=3), "window 3, must be None or a pair"),
    "window of floats": (dict(window=(0.5, 1)), "window"),
    "infinite scale": (dict(softmax_scale=float("inf")), "softmax_scale inf"),
    "scale as text": (dict(softmax_scale="big"), "softmax_scale 'big', must be a number"),
    "negative softcap": (dict(softcap=-1.0), "softcap -1"),
    "dropout of 1": (dict(dropout_p=1.0, dropout_seed=0), "dropout_p 1"),
    "negative dropout": (dict(dropout_p=-0.1, dropout_seed=0), "dropout_p -0.1"),
    "seed out of range": (dict(dropout_p=0.1, dropout_seed=-1), "dropout_seed -1, must be in"),
    "seed as float": (dict(dropout_p=0.1, dropout_seed=0.5), "dropout_seed 0.5, must be an integer"),
    "rng_state of the wrong dtype": (dict(dropout_p=0.1, rng_state=torch.zeros(2)), "rng_state: dtype f32"),
    "rng_state of the wrong shape": (dict(dropout_p=0.1, rng_state=torch.zeros(3, dtype=torch.int64)), "rng_state: shape"),
    "mask output without dropout": (dict(return_dropout_mask=True), "dropout_mask: needs dropout_p"),
    "negative splits": (dict(num_splits=-1), "num_splits -1"),
    "huge splits": (dict(num_splits=2**40), "num_splits 1099511627776, must be in"),
    "splits as float": (dict(num_splits=1.5), "num_splits 1.5, must be an integer"),
    "bias that does not broadcast": (dict(bias=torch.randn(SQ, SK + 1)), "bias: shape"),
    "bias of int64": (dict(bias=torch.zeros(SQ, SK, dtype=torch.int64)), "bias: dtype i64"),
    "bias of 5 dimensions": (dict(bias=torch.zeros(1, 1, 1, SQ, SK)), "bias has shape"),
    "mask shorter than the keys": (dict(bias=torch.ones(SQ, SK - 1, dtype=torch.bool)), "bias: shape"),
    "slopes of the wrong size": (dict(alibi_slopes=torch.rand(H + 1)), "alibi_slopes: shape"),
    "slopes of 3 dimensions": (dict(alibi_slopes=torch.rand(1, 1, H)), "alibi_slopes: ndim 3"),
    "sinks of the wrong size": (dict(sinks=torch.rand(HK)), "sink: shape"),
    "lengths of int64": (dict(seqused_k=torch.tensor([1, 2])), "seqused_k: dtype i64: must be i32"),
    "lengths of the wrong shape": (dict(seqused_k=int32(1, 2, 3)), "seqused_k: shape"),
    "length beyond the keys": (dict(seqused_k=int32(1, SK + 1)), r"seqused_k\[1\] 8"),
    "negative length": (dict(seqused_q=int32(-1, 2)), r"seqused_q\[0\] -1"),
    "unknown backend": (dict(backend="tpu"), "backend 'tpu'"),
    "unknown kernel": (dict(kernel="forward_sm999"), "forward_sm999"),
    "kernel that is not text": (dict(kernel=3), "kernel 3, must be None or the name"),
    "negative threads": (dict(num_threads=-1), "num_threads -1"),
    "CUDA backend for CPU tensors": (dict(backend="cuda"), "no kernel takes"),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name):
    options, message = DENSE[name]
    with pytest.raises(tilewise.Error, match=message):
        tilewise.attention(*qkv(), **options)


def test_shapes_and_dtypes():
    q, k, v = qkv()
    for call, message in (
        (lambda: tilewise.attention(q[0], k, v), r"q has shape \(5, 4, 16\), must have 4 dimensions \[batch, seqlen_q"),
        (lambda: tilewise.attention(q, k[0], v), r"k has shape"),
        (lambda: tilewise.attention(q, k[..., :8], v), "k: shape"),
        (lambda: tilewise.attention(q, k, v[:, :3]), "v: shape"),
        (lambda: tilewise.attention(q, k[:1], v[:1]), r"k: shape\[0\] 1: must be batch, which is 2"),
        (lambda: tilewise.attention(q[:, :, :3], k, v), "num_heads_q 3: must be a multiple of num_heads_k, which is 2"),
        (lambda: tilewise.attention(q, k.bfloat16(), v), "k: dtype bf16: must be f32"),
        (lambda: tilewise.attention(q, k, v.double()), "v: dtype f64"),
        (lambda: tilewise.attention(q.long(), k, v), "q: dtype i64"),
        (lambda: tilewise.attention(q.to(torch.complex64), k, v), "q has dtype torch.complex64"),
        (lambda: tilewise.attention(q, k.numpy(), v), "ndarray|attribute|array"),
        (lambda: tilewise.attention(*[x.repeat(1, 1, 1, 17) for x in (q, k, v)]), "head_dim 272: must be in"),
    ):
        with pytest.raises((tilewise.Error, TypeError, AttributeError, NotImplementedError), match=message):
            call()


def test_a_refused_call_writes_nothing():
    q, k, v = qkv()
    out = torch.full_like(q, 7.0)
    with pytest.raises(tilewise.InvalidArgument):
        tilewise.attention(q, k, v, out=out, seqused_k=int32(1, 99))
    assert (out == 7).all()
    caches = [torch.zeros(B, SK, HK, D) for _ in range(2)]
    with pytest.raises(tilewise.InvalidArgument):
        tilewise.attention_with_kvcache(q[:, :1], *caches, k[:, :1], v[:, :1], cache_seqlens=int32(1, SK))
    assert all((c == 0).all() for c in caches)


def test_packed():
    (q, k, v), cu = packed()
    good = dict(cu_seqlens_q=cu, cu_seqlens_k=cu)
    tilewise.attention_varlen(q, k, v, **good)
    for change, message in (
        (dict(cu_seqlens_q=cu.long()), "cu_seqlens_q: dtype i64: must be i32"),
        (dict(cu_seqlens_k=int32(0, 3)), "cu_seqlens_k: shape"),
        (dict(cu_seqlens_q=int32(1, 3, 9)), r"cu_seqlens_q\[0\] 1: must be 0"),
        (dict(cu_seqlens_q=int32(0, 5, 3)), r"cu_seqlens_q\[2\] 3: must not be less"),
        (dict(cu_seqlens_q=int32(0, 3, 10)), r"cu_seqlens_q\[2\] 10: must be <= the rows"),
        (dict(cu_seqlens_q=cu[None]), "cu_seqlens_q: ndim 2"),
        (dict(max_seqlen_q=5), "cu_seqlens_q: sequence 1 has 6 rows: must be <= seqlen_q, which is 5"),
        (dict(max_seqlen_k=5), "cu_seqlens_k: sequence 1 has 6 rows"),
        (dict(max_seqlen_k="x"), "max_seqlen_k 'x', must be an integer"),
        (dict(cu_seqlens_q=None, cu_seqlens_k=None), "cu_seqlens_q and cu_seqlens_k None"),
        (dict(cu_seqlens_q=None), "q has shape"),
        (dict(page_table=int32(0)), "cu_seqlens_k given with page_table"),
        (dict(return_dropout_mask=True, dropout_p=0.5), "max_seqlen_q and max_seqlen_k must be given"),
    ):
        with pytest.raises(tilewise.InvalidArgument, match=message):
            tilewise.attention_varlen(q, k, v, **dict(good, **change))
    assert torch.equal(tilewise.attention_varlen(q, k, v, **good, max_seqlen_q=torch.tensor(6), max_seqlen_k=6),
                       tilewise.attention_varlen(q, k, v, **good))  # fmt: skip


def test_cache():
    q, (k_new, v_new) = torch.randn(2, 1, H, D), torch.randn(2, 2, 1, HK, D)
    k, v = torch.randn(2, 2, SK, HK, D)
    pages = torch.randn(2, 5, 4, HK, D)
    table = int32(0, 1, 2, 3).view(2, 2)
    for arguments, options, message in (
        ((q, k, v, k_new, v_new), {}, "cache_seqlens None, must be given"),
        ((q, k, v, k_new), dict(cache_seqlens=1), "k_new given without v_new"),
        ((q, k, v, k_new, v_new), dict(cache_seqlens=SK), r"seqused_k\[0\] 7"),
        ((q, k, v, k_new[..., :8], v_new), dict(cache_seqlens=1), "k_new: shape"),
        ((q, k, v), dict(cache_batch_idx=int32(0, 2)), r"cache_batch_idx\[1\] 2"),
        ((q, k, v), dict(cache_leftpad=int32(0, -1)), r"leftpad_k\[1\] -1"),
        ((q, k, v), dict(rotary_cos=torch.ones(9, 4)), "rotary_cos given without rotary_sin"),
        ((q, k, v), dict(rotary_cos=torch.ones(2, 4), rotary_sin=torch.ones(2, 4), cache_seqlens=5), "rotary_cos: 2 rows"),
        ((q, k, v), dict(rotary_cos=torch.ones(9, 12), rotary_sin=torch.ones(9, 12), cache_seqlens=5), "rotary_dim 24"),
        ((q, *pages), dict(page_table=table, cache_seqlens=9), r"seqused_k\[0\] 9"),
        ((q, *pages), dict(page_table=int32(0, 5, 1, 2).view(2, 2), cache_seqlens=8), r"page_table\[0, 1\] 5"),
        ((q, *pages), dict(page_table=int32(0, -1, 1, 2).view(2, 2), cache_seqlens=8), r"page_table\[0, 1\] -1"),
        ((q, *pages), dict(page_table=table.long(), cache_seqlens=8), "page_table: dtype i64"),
        ((q[:1], k, v), {}, "k: shape"),
    ):
        with pytest.raises(tilewise.InvalidArgument, match=message):
            tilewise.attention_with_kvcache(*arguments, **options)
    with pytest.raises(tilewise.Unsupported, match="no gradient"):
        tilewise.attention_with_kvcache(q.requires_grad_(), k, v)


@pytest.mark.parametrize("zero", ["b", "sq", "sk", "hq", "sq and sk"])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_sizes(zero, causal):
    size = dict(b=B, sq=SQ, sk=SK, h=H, hk=HK)
    for name in zero.split(" and "):
        size.update({name: 0} if name != "hq" else {"h": 0, "hk": 0})
    q, k, v = (torch.randn(size["b"], s, h, D, requires_grad=True)
               for s, h in ((size["sq"], size["h"]), (size["sk"], size["hk"]), (size["sk"], size["hk"])))  # fmt: skip
    o, lse = tilewise.attention(q, k, v, causal=causal, return_lse=True)
    assert o.shape == q.shape and lse.shape == (size["b"], size["h"], size["sq"])
    assert (o == 0).all() and (lse == -torch.inf).all()
    o.sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and (x.grad == 0).all()


def test_zero_sizes_packed_and_cached():
    cu = int32(0, 0, 0)
    q, k, v = (torch.randn(0, h, D, requires_grad=True) for h in (H, HK, HK))
    o, lse = tilewise.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
    assert o.shape == (0, H, D) and lse.shape == (H, 0)
    o.sum().backward()
    empty = int32(0)
    assert tilewise.attention_varlen(q.detach(), k, v, cu_seqlens_q=empty, cu_seqlens_k=empty).shape == (0, H, D)
    cache = torch.full((B, SK, HK, D), torch.nan)
    o, lse = tilewise.attention_with_kvcache(torch.randn(B, 1, H, D), cache, cache, cache_seqlens=0, return_lse=True)
    assert (o == 0).all() and (lse == -torch.inf).all()


def test_zero_length_sequences_among_others():
    for cu_q, cu_k in ((int32(0, 0, 6, 9), int32(0, 4, 7, 9)), (int32(0, 5, 9, 9), int32(0, 0, 9, 9)), (int32(0, 4, 4, 9), int32(0, 4, 9, 9))):
        q, k, v = (torch.randn(9, h, D, requires_grad=True) for h in (H, HK, HK))
        for causal in (False, True):
            o = tilewise.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal)
            grads = torch.autograd.grad(o.square().sum(), (q, k, v))
            assert torch.isfinite(o).all() and all(torch.isfinite(g).all() for g in grads)
            for n in range(3):
                rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
                if cu_q[n] == cu_q[n + 1]:
                    assert (grads[1][keys] == 0).all() and (grads[2][keys] == 0).all()
                if cu_k[n] == cu_k[n + 1]:
                    assert (o[rows] == 0).all() and (grads[0][rows] == 0).all()


def test_lse_keeps_every_dimension():
    q = torch.randn(1, 1, 1, 8)
    assert tilewise.attention(q, q, q, return_lse=True)[1].shape == (1, 1, 1)


def test_errors_are_what_they_say():
    with pytest.raises(ValueError) as caught:
        tilewise.attention(*qkv(), softcap=-1.0)
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, tilewise.InvalidArgument)
    assert re.match(r"softcap -1: must be finite and >= 0", str(caught.value))
    with pytest.raises(NotImplementedError):
        tilewise.attention(*qkv(), kernel="backward_scalar")


def test_cuda_is_refused_with_a_reason():
    """Built without CUDA, no GPU here, or the tensors are not on it: the text says which."""
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(tilewise.Unsupported, match="built without its kernels|no sm_80|the tensors are on the CPU"):
        tilewise.attention(q, q, q, backend="cuda")
