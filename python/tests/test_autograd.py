"""Autograd, autocast, checkpointing, hooks, torch.func."""

import oracle
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise
import tilewise.torch


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


QKV = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (2, 1)}, {"softcap": 1.5}, {"softmax_scale": -0.3},
    {"causal": True, "softcap": 2.0, "window": (3, -1)}, {"dropout_p": 0.3, "dropout_seed": 1},
])  # fmt: skip
def test_gradcheck(options):
    assert torch.autograd.gradcheck(lambda q, k, v: tilewise.attention(q, k, v, **options), leaves(*QKV, dtype=torch.float64))


def test_gradcheck_bias():
    tensors = leaves(*QKV, (4, 5, 7), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v, bias: tilewise.attention(q, k, v, bias=bias), tensors)


def test_gradcheck_varlen():
    cu_q, cu_k = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([0, 0, 3, 7], dtype=torch.int32)
    tensors = leaves((5, 2, 4), (7, 1, 4), (7, 1, 4), dtype=torch.float64)

    def run(q, k, v):
        return tilewise.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3, max_seqlen_k=4, causal=True)

    assert torch.autograd.gradcheck(run, tensors)


def test_gradcheck_float32():
    """In float32, where differences are coarse: a large step, a loose bound, and still far from a wrong formula."""
    tensors = leaves((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4))
    assert torch.autograd.gradcheck(lambda q, k, v: tilewise.attention(q, k, v, causal=True), tensors, eps=1e-2, atol=2e-3, rtol=2e-2)
    assert torch.autograd.gradcheck(
        lambda q, k: tilewise.attention(q, k, tensors[2].detach(), return_lse=True)[1], tensors[:2], eps=1e-2, atol=2e-3, rtol=2e-2
    )


def test_gradcheck_float32_slopes_and_sinks():
    q, k, v, slopes, sinks = leaves((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4), (2,), (2,))
    for result in (0, 1):  # o, lse
        assert torch.autograd.gradcheck(
            lambda slopes, sinks: tilewise.attention(  # noqa: B023
                q.detach(), k.detach(), v.detach(), alibi_slopes=slopes, sinks=sinks, return_lse=True
            )[result],  # noqa: B023
            (slopes, sinks), eps=1e-2, atol=2e-3, rtol=2e-2,
        )  # fmt: skip


def test_gradients_only_where_asked():
    q, k, v = leaves(*QKV)
    for wanted in ((q,), (k,), (v,), (q, v), (k, v)):
        given = [x if any(x is y for y in wanted) else x.detach() for x in (q, k, v)]
        o = tilewise.attention(*given)
        got = torch.autograd.grad(o.sum(), wanted)
        want = torch.autograd.grad(oracle.attention(q, k, v)[0].sum(), wanted)
        for x, y in zip(got, want):
            oracle.assert_close(x, y, torch.float32, factor=4)
    bias = torch.randn(4, 5, 7, requires_grad=True)
    o = tilewise.attention(q.detach(), k.detach(), v.detach(), bias=bias)
    assert o.requires_grad
    assert tilewise.attention(q.detach(), k.detach(), v.detach()).requires_grad is False


def test_gradient_through_lse_alone():
    q, k, v = leaves(*QKV)
    _, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    lse[torch.isfinite(lse)].sum().backward()
    assert (v.grad == 0).all()
    a, b, c = oracle.leaves(q, k, v)
    _, want = oracle.attention(a, b, c, causal=True)
    oracle.assert_grads((q.grad, k.grad), torch.autograd.grad(want.sum(), (a, b)), torch.float32, "qk")


def test_second_derivatives_are_refused():
    q, k, v = leaves(*QKV)
    (dq,) = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(tilewise.Unsupported, match="second derivatives"):
        dq.sum().backward()


def test_backward_through_every_function():
    """With every argument given, backward() runs and leaves gradients of the right shapes."""
    q, k, v = leaves((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    bias, slopes, sinks = leaves((2, 4, 5, 7), (2, 4), (4,))
    used = torch.tensor([5, 3], dtype=torch.int32)
    options = dict(causal=True, window=(4, 0), softmax_scale=0.3, softcap=3.0, dropout_p=0.2, deterministic=True,
                   batch_invariant=True, num_splits=1, sm_margin=0)  # fmt: skip
    got = tilewise.attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, seqused_q=used, seqused_k=used,
                             return_lse=True, return_max_logit=True, return_dropout_mask=True, **options)  # fmt: skip
    assert len(got) == 4
    got[0].sum().backward()
    for x in (q, k, v, bias, slopes, sinks):
        assert x.grad.shape == x.shape and torch.isfinite(x.grad).all()
    q, k, v = leaves((10, 4, 8), (14, 2, 8), (14, 2, 6))
    cu_q, cu_k = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32)
    got = tilewise.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=7, bias=bias,
                                    alibi_slopes=slopes, sinks=sinks, seqused_q=used, seqused_k=used, return_lse=True,
                                    return_max_logit=True, return_dropout_mask=True, **options)  # fmt: skip
    got[0].sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and torch.isfinite(x.grad).all()


def test_by_hand_equals_autograd():
    q, k, v = leaves(*QKV)
    bias, slopes, sinks = leaves((5, 7), (4,), (4,))
    options = dict(bias=bias, alibi_slopes=slopes, sinks=sinks, causal=True)
    o, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    w, w_lse = torch.randn_like(o), torch.randn_like(lse)
    want = torch.autograd.grad((o, lse), (q, k, v, bias, slopes, sinks), (w, w_lse))
    got = tilewise.attention_backward(w, q, k, v, o, lse, dlse=w_lse, grads=("dq", "dk", "dv", "dbias", "dalibi", "dsink"), **options)
    for x, y in zip(got, want):
        assert torch.equal(x, y)


def test_autocast():
    q, k, v = leaves(*QKV)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        o = tilewise.attention(q, k, v)
        mixed = tilewise.attention(q, k.bfloat16(), v.bfloat16())
    assert o.dtype == mixed.dtype == torch.bfloat16
    oracle.assert_close(o, oracle.attention(q, k, v)[0], torch.bfloat16, factor=2)
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32 and torch.isfinite(q.grad).all()
    double = [x.detach().double() for x in (q, k, v)]
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        assert tilewise.attention(*double).dtype == torch.float64


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_checkpoint(reentrant, p):
    q, k, v = leaves(*QKV)

    def block(q, k, v):
        return tilewise.attention(q, k, v, causal=True, dropout_p=p).sin()

    torch.manual_seed(3)
    want = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    torch.manual_seed(3)
    checkpoint(block, q, k, v, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip((q, k, v), want))


def test_saved_tensor_hooks_may_change_strides():
    q, k, v = [x.transpose(1, 2) for x in leaves((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    bias = torch.randn(1, 4, 5, 7).expand(2, 4, 5, 7).detach().requires_grad_()
    want = torch.autograd.grad(tilewise.attention(q, k, v, bias=bias).sum(), (q, k, v, bias))
    with torch.autograd.graph.save_on_cpu():
        o = tilewise.attention(q, k, v, bias=bias)
    got = torch.autograd.grad(o.sum(), (q, k, v, bias))
    assert all(torch.equal(x, y) for x, y in zip(got, want))
    pack = lambda x: x.permute(*reversed(range(x.dim()))).contiguous()  # noqa: E731
    unpack = lambda x: x.permute(*reversed(range(x.dim())))  # noqa: E731  the last dimension is not contiguous now
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        o = tilewise.attention(q, k, v, bias=bias)
    got = torch.autograd.grad(o.sum(), (q, k, v, bias))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)


def test_deterministic_to_the_bit():
    q, k, v = leaves((2, 130, 4, 16), (2, 150, 2, 16), (2, 150, 2, 16))
    first = None
    for _ in range(20):
        got = torch.autograd.grad(tilewise.attention(q, k, v, causal=True, deterministic=True).square().sum(), (q, k, v))
        first = first or got
        assert all(torch.equal(x, y) for x, y in zip(first, got))


def test_number_of_threads_changes_nothing():
    q, k, v = leaves((2, 130, 4, 16), (2, 150, 2, 16), (2, 150, 2, 16))
    results = []
    for n in (1, 2, 5):
        o = tilewise.attention(q, k, v, causal=True, num_threads=n, deterministic=True)
        results.append((o,) + torch.autograd.grad(o.square().sum(), (q, k, v)))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


# ---- torch.func ----


def standard(q, k, v):
    return oracle.attention(q, k, v, causal=True, arithmetic=q.dtype)[0]


def ours(q, k, v):
    return tilewise.attention(q, k, v, causal=True)


def test_func_grad_vjp_jacrev():
    q, k, v = (x.detach() for x in leaves((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4)))
    for argnum in range(3):
        got = torch.func.grad(lambda *x: ours(*x).square().sum(), argnum)(q, k, v)
        torch.testing.assert_close(got, torch.func.grad(lambda *x: standard(*x).square().sum(), argnum)(q, k, v), atol=1e-5, rtol=1e-4)
    o, pull = torch.func.vjp(ours, q, k, v)
    _, want_pull = torch.func.vjp(standard, q, k, v)
    w = torch.randn_like(o)
    for x, y in zip(pull(w), want_pull(w)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        torch.func.jacrev(lambda q: ours(q, k, v))(q), torch.func.jacrev(lambda q: standard(q, k, v))(q), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("in_dims", [(0, None, None), (2, 0, 1), (None, None, 0)])
def test_func_vmap(in_dims):
    shapes = [[1, 3, 2, 4], [1, 4, 1, 4], [1, 4, 1, 4]]
    for shape, dim in zip(shapes, in_dims):
        if dim is not None:
            shape.insert(dim, 3)
    x = [torch.randn(s) for s in shapes]
    got = torch.vmap(ours, in_dims)(*x)
    for n in range(3):
        torch.testing.assert_close(got[n], ours(*[a if d is None else a.select(d, n) for a, d in zip(x, in_dims)]))
    per_sample = torch.vmap(torch.func.grad(lambda *x: ours(*x).square().sum(), (0, 1, 2)), in_dims)(*x)
    for n in range(3):
        one = [a if d is None else a.select(d, n) for a, d in zip(x, in_dims)]
        for g, w in zip(per_sample, torch.func.grad(lambda *x: standard(*x).square().sum(), (0, 1, 2))(*one)):
            torch.testing.assert_close(g[n], w, atol=1e-5, rtol=1e-4)


def test_func_vmap_options():
    q, k, v = torch.randn(3, 2, 3, 2, 4), torch.randn(2, 4, 1, 4), torch.randn(2, 4, 1, 4)
    bias, slopes = torch.randn(3, 2, 2, 3, 4), torch.rand(3, 2)
    sinks = torch.randn(2)

    def run(q, bias, slopes):
        return tilewise.attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True)

    o, lse = torch.vmap(run)(q, bias, slopes)
    for n in range(3):
        want, want_lse = run(q[n], bias[n], slopes[n])
        torch.testing.assert_close(o[n], want)
        torch.testing.assert_close(lse[n], want_lse)


def test_func_refuses_by_name():
    q, k, v = (x.detach() for x in leaves((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4)))
    with pytest.raises(tilewise.Unsupported, match="jvp"):
        torch.func.jvp(lambda q: ours(q, k, v), (q,), (q,))
    with pytest.raises(tilewise.Unsupported, match="jvp"):
        torch.func.hessian(lambda q: ours(q, k, v).sum())(q)
    with pytest.raises(tilewise.Unsupported, match="second derivatives"):
        torch.func.grad(lambda x: torch.func.grad(lambda q: ours(q, k, v).square().sum())(x).sum())(q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(tilewise.Unsupported, match="jvp"):
        ours(torch.autograd.forward_ad.make_dual(q, q), k, v)
    with pytest.raises(tilewise.Unsupported, match="dropout"):
        torch.vmap(lambda q: tilewise.attention(q, k, v, dropout_p=0.1), randomness="different")(q[None])


def test_func_refuses_other_functions_by_name():
    x, o, lse = torch.randn(2, 3, 5), torch.randn(2, 1, 4, 2, 8), torch.randn(2, 1, 2, 4)
    cache = torch.randn(2, 1, 8, 2, 8)
    calls = {
        "softmax": lambda: torch.vmap(tilewise.softmax)(x),
        "merge_states": lambda: torch.vmap(tilewise.merge_states)(o, lse, o, lse),
        "attention_with_kvcache": lambda: torch.vmap(lambda q, k: tilewise.attention_with_kvcache(q, k, k, cache_seqlens=4))(o, cache),
        "attention_backward": lambda: torch.vmap(lambda q, lse: tilewise.attention_backward(q, q, q, q, q, lse))(o, lse),
    }
    for name, call in calls.items():
        with pytest.raises(tilewise.Unsupported, match="tilewise.%s is not available under torch.func" % name):
            call()


def test_outputs_are_where_the_inputs_are():
    """torch's default device is no business of tensors that are there already."""
    q, k, v = torch.randn(3, 2, 9, 4, 8, device="cpu", requires_grad=True).unbind(0)
    want = tilewise.attention(q, k, v[..., :6], causal=True, return_lse=True)
    with torch.device("meta"):
        o, lse = tilewise.attention(q, k, v[..., :6], causal=True, return_lse=True)
        grads = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
        with tilewise.torch.sdpa():
            whole = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1]) and whole.is_cpu
    for got, expected in zip(grads, torch.autograd.grad(want[0].sum() + want[1].sum(), (q, k, v))):
        assert torch.equal(got, expected)


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="of the CPU, where there is something to compare with")
def test_dense_calls_of_a_gpu(monkeypatch):
    """`_call.run_dense`, which CUDA tensors take, with plans for the CPU: the same results bit for bit, one plan for each problem."""
    from tilewise import _call
    from tilewise.torch import _kind

    def results(shape, **options):
        leaves = [torch.randn(s).requires_grad_() for s in (shape, (shape[0], 29, 2, shape[3]), (shape[0], 29, 2, shape[3] + 8))]
        o = tilewise.attention(*leaves, **options)
        return (o.detach(),) + torch.autograd.grad(o.square().sum(), leaves) + (tilewise.attention(*[x.detach() for x in leaves], **options),)

    cases = [((2, 37, 4, 16), {"causal": True}), ((1, 5, 2, 8), {"window": (3, 2)}), ((2, 37, 4, 16), {"softmax_scale": 0.3}), ((2, 37, 4, 16), {"causal": True})]

    def all_results():
        torch.manual_seed(3)
        return [results(shape, **options) for shape, options in cases]

    want = all_results()
    plans = {}

    def run(options, views, target, dout=None, grads=None):
        def plan_of(key, describe):
            if key not in plans:
                plans[key] = _kind._Plan(describe(), target)
            return plans[key]

        _call.run_dense(plan_of, options, views, lambda plan: _kind._workspace(plan, torch.device("cpu")), None, dout, grads)

    monkeypatch.setattr(_call, "forward_dense", lambda options, views, want_lse, target: run(options, views, target))
    monkeypatch.setattr(_call, "backward_dense", lambda options, views, dout, grads, target: run(options, views, target, dout, grads))
    got = all_results()
    assert all(torch.equal(x, y) for a, b in zip(got, want) for x, y in zip(a, b))
    assert len(plans) == 9  # forward with and without lse, and backward, of three problems
    key = next(iter(plans))
    wrong = plans[key]
    monkeypatch.setattr(_call, "forward_dense", lambda options, views, want_lse, target: _call.run_dense(
        lambda key, describe: wrong, options, views, lambda plan: _kind._workspace(plan, torch.device("cpu")), None))  # fmt: skip
    with pytest.raises(tilewise.InvalidArgument, match="must agree"):
        tilewise.attention(*[torch.randn(1, 3, 1, 8)] * 3)
