"""tilewise.torch.sdpa behind F.scaled_dot_product_attention."""

import threading

import pytest
import torch
import torch.nn.functional as F

import tilewise.torch

sdpa = tilewise.torch.sdpa
Q, K = (2, 4, 7, 16), (2, 4, 9, 16)


def compare(q, k, v, taken=True, tolerance=2e-5, grad=True, **options):
    mask = options.pop("attn_mask", None)
    mask_grad = mask is not None and mask.requires_grad

    def run():
        x = [t.clone().requires_grad_(grad) for t in (q, k, v)]
        m = mask.detach().clone().requires_grad_() if mask_grad else mask
        o = F.scaled_dot_product_attention(*x, attn_mask=m, **options)
        if not grad:
            return [o]
        o.backward(weight.expand_as(o))
        return [o] + [t.grad for t in x] + ([m.grad] if mask_grad else [])

    weight = torch.randn(q.shape[:-1] + v.shape[-1:])
    want = run()
    before = sdpa.calls
    with sdpa():
        got = run()
    assert sdpa.calls - before == (1 if taken else 0)
    for x, y in zip(got, want):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)
    assert not q.is_cpu or got[0].stride() == want[0].stride() or v.shape[-1] != q.shape[-1] or mask_grad


def tensors(dtype=torch.float32):
    return torch.randn(Q).to(dtype), torch.randn(K).to(dtype), torch.randn(K).to(dtype)


def test_plain():
    compare(*tensors())
    compare(*tensors(), grad=False)
    compare(*[x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(dtype):
    compare(*tensors(dtype), tolerance=3e-2)
    compare(*tensors(dtype), attn_mask=torch.rand(7, 9) > 0.3, tolerance=3e-2)


def test_causal_is_top_left_aligned():
    q, k, v = tensors()
    for a, b in ((q, k), (k, q), (k, k)):
        compare(a, b, b.sin(), is_causal=True)


def test_scale():
    compare(*tensors(), scale=0.7)
    compare(*tensors(), scale=0.2, is_causal=True)
    compare(*tensors(), scale=-0.2)  # with is_causal torch itself gives NaN: its masked scores are -inf * scale


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_gqa(heads):
    q, k, v = tensors()
    compare(q, k[:, :heads], v[:, :heads], enable_gqa=True)
    compare(q, k[:, :heads], v[:, :heads], enable_gqa=True, is_causal=True, scale=0.3)


@pytest.mark.parametrize("shape", [(7, 9), (2, 1, 7, 9), (1, 4, 7, 9), (2, 4, 7, 9), (2, 1, 1, 9), (1, 1, 7, 1)])
def test_masks(shape):
    if torch.get_default_device().type == "cuda" and shape[-1] == 1:
        pytest.skip("torch's own CUDA backends refuse a mask that is broadcast over the keys")
    compare(*tensors(), attn_mask=torch.randn(shape))
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    compare(*tensors(), attn_mask=mask)


def test_rows_without_keys():
    mask = torch.rand(7, 9) > 0.4
    mask[2] = False
    q, k, v = tensors()
    with sdpa():
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (o[:, :, 2] == 0).all() and torch.isfinite(o).all()


def test_mask_with_a_gradient():
    compare(*tensors(), attn_mask=torch.randn(4, 7, 9, requires_grad=True))


def test_value_dim():
    q, k, _ = tensors()
    compare(q, k, torch.randn(2, 4, 9, 24))


def test_dropout():
    q, k, _ = tensors()
    v = torch.eye(9).expand(2, 4, 9, 9)
    before = sdpa.calls
    with sdpa():
        torch.manual_seed(1)
        p = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(1)
        assert torch.equal(p, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert sdpa.calls == before + 2
    whole = F.scaled_dot_product_attention(q, k, v)
    kept = p != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(p[kept], 2 * whole[kept], atol=1e-5, rtol=1e-5)


def test_what_is_left_to_torch():
    compare(*[x.double() for x in tensors()], taken=False)
    compare(*[x[0] for x in tensors()], taken=False)
    q, k, v = tensors()
    compare(q, k[:1], v[:1], taken=False)  # broadcast over the batch
    big = torch.randn(1, 1, 3, 300)
    compare(big, big, big, taken=False)
    with sdpa(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[..., :8], v)


def test_strided():
    q, k, v = torch.randn(2, 9, 3, 4, 16).unbind(2)
    compare(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    compare(torch.randn(Q), *[torch.randn(1, 1, 9, 16).expand(K) for _ in range(2)])


def test_switch():
    q, k, v = tensors()
    before = sdpa.calls
    assert not sdpa.enabled
    sdpa.enable()
    try:
        with sdpa():
            F.scaled_dot_product_attention(q, k, v)
        assert sdpa.enabled
        F.scaled_dot_product_attention(q, k, v)
        other = threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, v))
        other.start()
        other.join()
    finally:
        sdpa.disable()
    sdpa.disable()  # once too often: no harm
    assert not sdpa.enabled and sdpa.calls == before + 3
    F.scaled_dot_product_attention(q, k, v)
    assert sdpa.calls == before + 3


def test_module_and_compiled_code():
    torch._dynamo.reset()
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    want = layer(x)
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q.sin(), q, q, is_causal=True), fullgraph=True)
    q = torch.randn(K, requires_grad=True)
    want_compiled = compiled(q)
    (want_grad,) = torch.autograd.grad(want_compiled.sum(), q)
    before = sdpa.calls
    with sdpa():
        got = layer(x)
        got.sum().backward()
        assert sdpa.calls == before + 1
        got_compiled = compiled(q)
        (grad,) = torch.autograd.grad(got_compiled.sum(), q)
    # On CUDA torch.compile traces through to the backend that torch chose, and that code does not look at the switch.
    assert sdpa.calls == before + (2 if q.is_cpu else 1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_compiled, want_compiled, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, want_grad, atol=1e-5, rtol=1e-5)
