"""softmax, OnlineSoftmax, merge_states."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 17), (2, 3, 4, 130), (2, 1, 2, 1, 9), (0, 4), (4, 0), (1, 70000)])
def test_softmax(shape, dtype):
    x = (torch.randn(shape) * 4).to(dtype)
    y, lse = tilewise.softmax(x, return_lse=True)
    assert y.shape == x.shape and y.dtype == dtype and lse.shape == x.shape[:-1] and lse.dtype == torch.float32
    oracle.assert_close(y, x.double().softmax(-1), dtype)
    if shape[-1]:
        oracle.assert_close(lse, x.double().logsumexp(-1), torch.float32)
    else:
        assert (lse == -torch.inf).all()


def test_softmax_extremes():
    x = torch.tensor([[-torch.inf] * 3, [65504.0, -65504.0, 0.0], [-torch.inf, 5.0, -torch.inf]]).half()
    y, lse = tilewise.softmax(x, return_lse=True)
    assert torch.equal(y, torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]).half())
    assert torch.equal(lse, torch.tensor([-torch.inf, 65504.0, 5.0]))


def test_softmax_strided_and_numpy():
    x = torch.randn(6, 8, 5)
    for view in (x.transpose(0, 1), x[::2], x.transpose(1, 2), x[0].expand(4, 8, 5)):
        torch.testing.assert_close(tilewise.softmax(view), view.softmax(-1))
    a = x.cpu().numpy()
    np.testing.assert_allclose(tilewise.softmax(a.transpose(2, 0, 1)), x.permute(2, 0, 1).softmax(-1).cpu().numpy(), rtol=1e-5)


def test_softmax_gradient():
    x = torch.randn(4, 9, requires_grad=True)
    z = x.detach().double().requires_grad_()
    y, lse = tilewise.softmax(x, return_lse=True)
    w, u = torch.randn(4, 9), torch.randn(4)
    ((y * w).sum() + (lse * u).sum()).backward()
    ((z.softmax(-1) * w).sum() + (z.logsumexp(-1) * u).sum()).backward()
    oracle.assert_close(x.grad, z.grad, torch.float32)
    assert tilewise.softmax(x).requires_grad


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.booleans(), st.integers(0, 2**31))
def test_online_softmax(chunks, per_row, seed):
    if torch.get_default_device().type == "cuda":  # the streaming object is of the CPU, and says so
        with pytest.raises(tilewise.InvalidArgument, match="must be on the CPU"):
            tilewise.OnlineSoftmax(3).push(torch.zeros(3, 2))
        return
    torch.manual_seed(seed)
    rows, width, n = 3, 5, sum(chunks)
    scores = torch.randn(rows, n) * 5
    scores[0, : n // 2] = -torch.inf
    values = torch.randn((rows, n, width) if per_row else (n, width))
    streams = [tilewise.OnlineSoftmax(rows, width) for _ in range(2)]
    begin = 0
    for index, size in enumerate(chunks):
        part = slice(begin, begin + size)
        begin += size
        streams[index % 2].push(scores[:, part], values[:, part] if per_row else values[part])
    streams[0].merge(streams[1])
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    p = torch.where(dead, 0.0, torch.where(dead, 0.0, scores).double().softmax(-1))
    want = torch.einsum("rn,rnw->rw", p, values.double().expand(rows, n, width))
    oracle.assert_close(streams[0].result(), want, torch.float32)
    lse = torch.where(dead, 0.0, scores).double().logsumexp(-1) if n else torch.full((rows,), -torch.inf)
    oracle.assert_close(streams[0].lse(), lse.masked_fill(dead[:, 0], -torch.inf), torch.float32)
    oracle.assert_close(streams[0].probabilities(scores), p, torch.float32)


def test_online_softmax_late_maximum_and_errors():
    stream = tilewise.OnlineSoftmax(1, 1)
    for score in (-1e30, 0.0, 1e30):
        stream.push(np.float32([[score]]), np.float32([[score / 1e30]]))
    assert stream.result()[0, 0] == 1 and stream.lse()[0] == np.float32(1e30)
    with pytest.raises(tilewise.InvalidArgument, match="values"):
        stream.push(np.float32([[1]]))
    with pytest.raises(tilewise.InvalidArgument, match="value_dim"):
        tilewise.OnlineSoftmax(2).result()
    with pytest.raises(tilewise.InvalidArgument):
        stream.push(np.float32([[1], [2]]), np.float32([[1]]))
    with pytest.raises(tilewise.InvalidArgument, match="num_rows"):
        tilewise.OnlineSoftmax("three")
    assert tilewise.OnlineSoftmax(2, 3).result().tolist() == [[0] * 3] * 2


def test_merge_states():
    o1, o2 = torch.randn(2, 2, 6, 3, 4).unbind(0)
    lse1, lse2 = torch.randn(2, 2, 3, 6).unbind(0)
    lse1[0, 0, 0] = lse2[0, 0, 0] = lse1[0, 0, 1] = lse2[1, 2, 5] = -torch.inf
    o1[0, 0, 0] = o2[0, 0, 0] = o1[0, 1, 0] = o2[1, 5, 2] = 0
    kept = o1.clone()
    o, lse = tilewise.merge_states(o1, lse1, o2, lse2)
    assert torch.equal(o1, kept)
    want_lse = torch.logaddexp(lse1.double(), lse2.double())
    oracle.assert_close(lse, want_lse, torch.float32)
    w = [torch.where(x == -torch.inf, 0.0, (x - want_lse).exp()).transpose(1, 2).unsqueeze(-1) for x in (lse1, lse2)]
    oracle.assert_close(o, w[0] * o1 + w[1] * o2, torch.float32)
    assert (o[0, 0, 0] == 0).all() and torch.equal(o[0, 1, 0], o2[0, 1, 0])
    if o.is_cpu:
        n = tilewise.merge_states(*[x.numpy() for x in (o1, lse1, o2, lse2)])
        assert np.array_equal(n[0], o.numpy()) and np.array_equal(n[1], lse.numpy())


def test_merge_states_gradient():
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    whole, lse = tilewise.attention(q, k, v, return_lse=True)
    w, u = torch.randn_like(whole), torch.randn_like(lse)
    want = torch.autograd.grad((whole, lse), (q, k, v), (w, u))
    parts = [tilewise.attention(q, k[:, a], v[:, a], return_lse=True) for a in (slice(0, 2), slice(2, 6))]
    got = torch.autograd.grad(tilewise.merge_states(*parts[0], *parts[1]), (q, k, v), (w, u))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
