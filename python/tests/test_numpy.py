"""NumPy arrays and, through DLPack, everything else."""

import subprocess
import sys

import numpy as np
import oracle
import pytest
import torch

import tilewise
import tilewise.numpy

rng = np.random.default_rng(0)


def arrays(dtype=np.float32, sq=5, sk=7):
    return [rng.standard_normal(s).astype(dtype) for s in ((2, sq, 4, 16), (2, sk, 2, 16), (2, sk, 2, 8))]


def want(q, k, v, **options):
    options = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    o, lse = oracle.attention(*[torch.from_numpy(np.array(x)) for x in (q, k, v)], **options)
    return o, lse


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_attention(dtype):
    q, k, v = arrays(dtype)
    options = dict(causal=True, bias=rng.standard_normal((5, 7)).astype(np.float32), alibi_slopes=np.float32([0.1, 0.2, 0.3, 0.4]),
                   sinks=np.float32([0, 1, 2, 3]), window=(5, -1), softcap=3.0)  # fmt: skip
    o, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    assert isinstance(o, np.ndarray) and o.dtype == dtype and lse.dtype == np.float32 and o.flags.c_contiguous
    kind = {np.float32: torch.float32, np.float16: torch.float16, np.float64: torch.float32}[dtype]
    oracle.assert_close(torch.from_numpy(o), want(q, k, v, **options)[0], kind, factor=2)
    oracle.assert_close(torch.from_numpy(lse), want(q, k, v, **options)[1], kind, factor=2)
    assert np.array_equal(tilewise.numpy.attention(q, k, v, **options), o)


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in arrays())
    o = tilewise.attention(q, k, v)
    assert o.dtype == ml_dtypes.bfloat16
    exact = want(*[x.astype(np.float32) for x in (q, k, v)])[0]
    oracle.assert_close(torch.from_numpy(o.astype(np.float32)), exact, torch.bfloat16)


def test_strides():
    q, k, v = arrays()
    expected = tilewise.attention(q, k, v)
    for change in (
        lambda x: np.asfortranarray(x),
        lambda x: x[::-1][::-1],
        lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        lambda x: np.repeat(x, 2, 1)[:, ::2],
        lambda x: np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),  # read-only
    ):
        assert np.array_equal(tilewise.attention(change(q), change(k), change(v)), expected)
    wide = np.broadcast_to(k[:, :, :1], (2, 7, 4, 16))
    assert np.array_equal(tilewise.attention(q, wide, wide), tilewise.attention(q, wide.copy(), wide.copy()))


def test_backward():
    q, k, v = arrays()
    bias, slopes, sinks = (rng.standard_normal(s).astype(np.float32) for s in ((5, 7), (4,), (4,)))
    options = dict(bias=bias, alibi_slopes=slopes, sinks=sinks, causal=True)
    o, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    dout, dlse = rng.standard_normal(o.shape).astype(np.float32), rng.standard_normal(lse.shape).astype(np.float32)
    names = ("dq", "dk", "dv", "dbias", "dalibi", "dsink")
    got = tilewise.attention_backward(dout, q, k, v, o, lse, dlse=dlse, grads=names, **options)
    x = [torch.from_numpy(a).double().requires_grad_() for a in (q, k, v, bias, slopes, sinks)]
    wo, wl = oracle.attention(*x[:3], bias=x[3], alibi_slopes=x[4], sinks=x[5], causal=True)
    exact = torch.autograd.grad((wo, wl), x, (torch.from_numpy(dout).double(), torch.from_numpy(dlse).double()))
    for name, a, b in zip(names, got, exact):
        oracle.assert_close(torch.from_numpy(a), b, torch.float32, name, 4)
    (dv,) = tilewise.attention_backward(dout, q, k, v, o, lse, dlse=dlse, grads=("dv",), **options)
    assert np.array_equal(dv, got[2])


def test_varlen_with_lists():
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((6, 4, 16), (9, 2, 16), (9, 2, 16)))
    o, lse = tilewise.attention_varlen(q, k, v, cu_seqlens_q=[0, 2, 6], cu_seqlens_k=[0, 4, 9], causal=True, return_lse=True)
    for rows, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 6), slice(4, 9))):
        oracle.assert_close(torch.from_numpy(o[None, rows]), want(q[None, rows], k[None, keys], v[None, keys], causal=True)[0], torch.float32)
    assert lse.shape == (4, 6)
    got = tilewise.attention_backward(o, q, k, v, o, lse, cu_seqlens_q=[0, 2, 6], cu_seqlens_k=[0, 4, 9], causal=True)
    assert [g.shape for g in got] == [q.shape, k.shape, v.shape]


def test_kvcache():
    q, k_new, v_new = (rng.standard_normal((2, 1, 2, 16)).astype(np.float32) for _ in range(3))
    k, v = rng.standard_normal((2, 3, 9, 2, 16)).astype(np.float32)
    before = k.copy()
    lengths, rows = np.int32([4, 8]), np.int32([2, 0])
    o = tilewise.attention_with_kvcache(q, k, v, k_new, v_new, cache_seqlens=lengths, cache_batch_idx=rows, causal=True)
    for b in range(2):
        keys = np.concatenate((before[rows[b], : lengths[b]], k_new[b]))[None]
        values = v[rows[b], : lengths[b] + 1][None]
        oracle.assert_close(torch.from_numpy(o[b : b + 1]), want(q[b : b + 1], keys, values)[0], torch.float32)
        before[rows[b], lengths[b]] = k_new[b, 0]
    assert np.array_equal(k, before)  # nothing else was written
    k.flags.writeable = False
    with pytest.raises(tilewise.InvalidArgument, match="read-only"):
        tilewise.attention_with_kvcache(q, k, v, k_new, v_new, cache_seqlens=lengths, cache_batch_idx=rows)


@pytest.mark.parametrize("scalar", [4, np.int64(4), np.array(4)])
def test_scalar_cache_seqlens_with_pages(scalar):
    q = rng.standard_normal((3, 1, 2, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 7, 4, 2, 16)).astype(np.float32)
    table = np.int32([[5, 1], [0, 2], [6, 3]])
    o = tilewise.attention_with_kvcache(q, k, v, cache_seqlens=scalar, page_table=table)
    same = tilewise.attention_with_kvcache(q, k, v, cache_seqlens=np.int32([4, 4, 4]), page_table=table)
    assert np.array_equal(o, same)


def test_errors():
    q, k, v = arrays()
    with pytest.raises(tilewise.InvalidArgument, match="k is a Tensor"):
        tilewise.attention(q, torch.from_numpy(k), v)
    with pytest.raises(tilewise.InvalidArgument, match="q has dtype >f4"):
        tilewise.attention(q.astype(">f4"), k, v)
    with pytest.raises(tilewise.InvalidArgument, match="complex64|<c8"):
        tilewise.attention(q.astype(np.complex64), k, v)
    with pytest.raises(tilewise.InvalidArgument, match="dropout_seed"):
        tilewise.attention(q, k, v, dropout_p=0.5)
    with pytest.raises(tilewise.InvalidArgument, match="list"):
        tilewise.attention([1.0], k, v)
    with pytest.raises(TypeError, match="casual"):
        tilewise.attention(q, k, v, casual=True)


class Foreign:
    """An array that has nothing but DLPack and a namespace."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return Foreign

    @staticmethod
    def from_dlpack(x):
        return Foreign(np.from_dlpack(x))


def test_dlpack():
    q, k, v = arrays()
    bias = rng.standard_normal(7).astype(np.float32)
    o, lse = tilewise.attention(*map(Foreign, (q, k, v)), bias=Foreign(bias), causal=True, return_lse=True)
    expected, expected_lse = tilewise.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    assert np.array_equal(o.array, expected) and np.array_equal(lse.array, expected_lse)
    grads = tilewise.attention_backward(*map(Foreign, (expected, q, k, v, expected, expected_lse)), bias=Foreign(bias), causal=True)
    exact = tilewise.attention_backward(expected, q, k, v, expected, expected_lse, bias=bias, causal=True)
    assert all(np.array_equal(x.array, y) for x, y in zip(grads, exact))
    assert np.array_equal(tilewise.softmax(Foreign(q)).array, tilewise.softmax(q))
    with pytest.raises(tilewise.Unsupported, match="in place"):
        tilewise.attention_with_kvcache(*map(Foreign, (q, k, k, k[:, :1], k[:, :1])), cache_seqlens=Foreign(np.int32([1, 1])))


def test_jax():
    jax = pytest.importorskip("jax")
    q, k, v = arrays()
    o = tilewise.attention(*[jax.numpy.asarray(x) for x in (q, k, v)], causal=True)
    assert isinstance(o, jax.Array) and np.array_equal(np.asarray(o), tilewise.attention(q, k, v, causal=True))


def test_numpy_alone_does_not_import_torch():
    code = (
        "import sys, numpy as np, tilewise; x = np.ones((1, 2, 1, 8), np.float32); tilewise.attention(x, x, x); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
