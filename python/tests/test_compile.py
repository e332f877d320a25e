"""torch.compile, torch.export, fake tensors, opcheck."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise
import tilewise.torch

def tensors(sq, sk, grad=True):
    return [torch.randn(s, requires_grad=grad) for s in ((2, sq, 4, 16), (2, sk, 2, 16), (2, sk, 2, 8))]


def compare(function, compiled, inputs):
    want = function(*inputs)
    want_grads = torch.autograd.grad(want.sum(), inputs)
    got = compiled(*inputs)
    grads = torch.autograd.grad(got.sum(), inputs)
    torch.testing.assert_close(got, want)
    for x, y in zip(grads, want_grads):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend, dynamic", [("aot_eager", False), ("aot_eager", True), ("inductor", True)])
def test_compile_dense(backend, dynamic):
    torch._dynamo.reset()
    sinks = torch.randn(4)

    def function(q, k, v):
        o, lse = tilewise.attention(q.sin(), k, v, causal=True, window=(5, 0), softcap=3.0, sinks=sinks, return_lse=True)
        return o.cos() + lse.transpose(1, 2).unsqueeze(-1).clamp(min=-9)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for sq, sk in ((5, 7), (6, 6), (9, 4)):
        compare(function, compiled, tensors(sq, sk))


def test_dynamic_shapes_compile_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: tilewise.attention(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=counter)
    compiled(*tensors(5, 7))
    graphs = counter.frame_count
    for sq, sk in ((6, 9), (11, 13), (20, 30)):
        compiled(*tensors(sq, sk))
    assert counter.frame_count == graphs


def test_compile_varlen():
    torch._dynamo.reset()

    def function(q, k, v, cu_q, cu_k, longest_q, longest_k):
        return tilewise.torch.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q,
                                               max_seqlen_k=longest_k, causal=True)  # fmt: skip

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((3, 5), (1, 9), (4, 4)):
        cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        q, k, v = (torch.randn(sum(lengths), 2, 8, requires_grad=True) for _ in range(3))
        compare(lambda *x: function(*x, cu, cu, max(lengths), max(lengths)),  # noqa: B023
                lambda *x: compiled(*x, cu, cu, max(lengths), max(lengths)), (q, k, v))  # fmt: skip  # noqa: B023


def test_compile_kvcache():
    torch._dynamo.reset()

    def function(q, k_cache, v_cache, k_new, v_new, lengths):
        return tilewise.torch.attention_with_kvcache(q, k_cache, v_cache, k_new, v_new, cache_seqlens=lengths, causal=True)

    caches = torch.randn(4, 2, 9, 2, 16)
    q, k_new, v_new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    a, b, c, d = (x.clone() for x in (caches[0], caches[1], caches[0], caches[1]))
    want = function(q, a, b, k_new, v_new, lengths)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(q, c, d, k_new, v_new, lengths)
    torch.testing.assert_close(got, want)
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, caches[0])


def test_compiled_dropout_draws_anew():
    torch._dynamo.reset()
    q, k, v = tensors(16, 16, grad=False)
    compiled = torch.compile(lambda q, k, v: tilewise.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)


def test_compile_under_autocast():
    torch._dynamo.reset()
    q, k, v = tensors(5, 7)
    device = q.device.type

    def function(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            return tilewise.attention(q, k, v)

    got = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, function(q, k, v))


def test_export():
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return tilewise.torch.attention(q, k, v, causal=True)

    q, k, v = tensors(5, 7, grad=False)
    sq, sk = torch.export.Dim("sq", min=2), torch.export.Dim("sk", min=2)
    program = torch.export.export(Block(), (q, k, v), dynamic_shapes=({1: sq}, {1: sk}, {1: sk}))
    for shape in ((5, 7), (12, 9)):
        x = tensors(*shape, grad=False)
        torch.testing.assert_close(program.module()(*x), Block()(*x))


def test_meta_tensors():
    q, k, v = (x.to("meta") for x in tensors(5, 7, False))
    o, lse = tilewise.attention(q, k, v, return_lse=True)
    assert o.is_meta and o.shape == (2, 5, 4, 8) and lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_fake_layout_is_the_real_layout():
    for make in (lambda: tensors(5, 7, False), lambda: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(5, 7, False)]):
        real = make()
        o, lse = tilewise.attention(*real, return_lse=True)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in real]
            fo, flse = tilewise.attention(*fake, return_lse=True)
        for x, y in ((o, fo), (lse, flse)):
            assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


OPTIONS = (0, 0, True, 3, 0, None, 2.0, 0.0, 0, 0, False, False, 0, 0)


def test_opcheck_forward():
    q, k, v = tensors(5, 7)
    bias, slopes, sinks = torch.randn(1, 4, 5, 7, requires_grad=True), torch.rand(4), torch.randn(4, requires_grad=True)
    torch.library.opcheck(torch.ops.tilewise.forward, (q, k, v, bias, slopes, sinks) + (None,) * 6 + OPTIONS)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = [torch.randn(5, 2, 8, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(torch.ops.tilewise.forward, (*packed, None, None, None, cu, cu, None, None, None, None, 3, 3) + OPTIONS[2:])


def test_opcheck_backward():
    q, k, v = tensors(5, 7, grad=False)
    o, lse = torch.ops.tilewise.forward(q, k, v, *(None,) * 9, *OPTIONS)
    wanted = [True, True, False, False, False, False]
    torch.library.opcheck(torch.ops.tilewise.backward, (torch.randn_like(o), None, q, k, v, o, lse, *(None,) * 9, wanted, *OPTIONS))


def test_opcheck_kvcache():
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    new = torch.randn(2, 1, 2, 16)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.tilewise.kvcache,
        (q, k, v, new, new.clone(), lengths, *(None,) * 10, 0, True, -1, -1, None, 0.0, False, False, 0, 0),
    )


def test_what_tracing_cannot_do_is_refused():
    q, k, v = tensors(5, 7, grad=False)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        for options in ({"return_max_logit": True}, {"kernel": "reference"}, {"num_threads": 1}):
            with pytest.raises(tilewise.Unsupported, match="not available under torch.compile"):
                tilewise.attention(*fake, **options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_softmax_and_merge(dynamic):
    def run(x, o, lse):
        y, z = tilewise.softmax(x.sin(), return_lse=True)
        merged, merged_lse = tilewise.merge_states(o, lse, o.cos(), lse + 1)
        return y.square().sum() + z.sum() + merged.square().sum() + merged_lse.sum()

    tensors = [torch.randn(shape, requires_grad=True) for shape in ((3, 5), (1, 4, 2, 8), (1, 2, 4))]
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), run(*tensors))
    got, want = (torch.autograd.grad(f(*tensors), tensors) for f in (compiled, run))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)


def test_opcheck_softmax_and_merge():
    torch.library.opcheck(torch.ops.tilewise.softmax, (torch.randn(3, 5, requires_grad=True), 0))
    state = [torch.randn(shape, requires_grad=True) for shape in ((1, 4, 2, 8), (1, 2, 4)) * 2]
    torch.library.opcheck(torch.ops.tilewise.merge_states, tuple(state))
