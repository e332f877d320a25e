"""tilewise.compat.flash_attn and flash_attn_3: names, argument order, defaults, results, errors."""

import inspect
import sys

import oracle
import pytest
import torch

import tilewise
import tilewise.compat
import tilewise.compat.flash_attn as fa2
import tilewise.compat.flash_attn_3 as fa3
from tilewise.compat.flash_attn import bert_padding, flash_attn_interface
from tilewise.compat.flash_attn.layers import rotary

DTYPES = [torch.float16, torch.bfloat16]
TAIL = ["dropout_p=0.0", "softmax_scale=None", "causal=False", "window_size=(-1, -1)", "softcap=0.0", "alibi_slopes=None",
        "deterministic=False", "return_attn_probs=False"]  # fmt: skip
VARLEN = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
DESCALE = ["q_descale=None", "k_descale=None", "v_descale=None"]
SIGNATURES = {
    fa2.flash_attn_func: ["q", "k", "v"] + TAIL,
    fa2.flash_attn_kvpacked_func: ["q", "kv"] + TAIL,
    fa2.flash_attn_qkvpacked_func: ["qkv"] + TAIL,
    fa2.flash_attn_varlen_func: ["q", "k", "v"] + VARLEN + TAIL + ["block_table=None"],
    fa2.flash_attn_varlen_kvpacked_func: ["q", "kv"] + VARLEN + TAIL,
    fa2.flash_attn_varlen_qkvpacked_func: ["qkv", "cu_seqlens", "max_seqlen"] + TAIL,
    fa2.flash_attn_with_kvcache: (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ).split(),
    fa3.flash_attn_func: (
        "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) "
        "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
    ).split(),
    fa3.flash_attn_varlen_func: ["q", "k", "v"] + VARLEN + (
        "seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None "
        "window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 "
        "return_attn_probs=False"
    ).split(),
    fa3.flash_attn_qkvpacked_func: ["qkv", "softmax_scale=None", "causal=False"] + DESCALE + (
        "window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False"
    ).split(),
    fa3.flash_attn_with_kvcache: (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
        "q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 "
        "softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
        "return_softmax_lse=False"
    ).split(),
    fa3.flash_attn_combine: ["out_partial", "lse_partial", "out=None", "out_dtype=None"],
    bert_padding.unpad_input: ["hidden_states", "attention_mask", "unused_mask=None"],
    bert_padding.pad_input: ["hidden_states", "indices", "batch", "seqlen"],
    rotary.apply_rotary_emb: "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None max_seqlen=None".split(),
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: "%s.%s" % (f.__module__.rsplit(".", 1)[-1], f.__name__))
def test_signature(function):
    got = [str(p).replace(" ", "") for p in inspect.signature(function).parameters.values()]
    assert got == [p.replace(" ", "") for p in SIGNATURES[function]]


def qkv(dtype=torch.bfloat16, b=2, sq=20, sk=33, h=4, hk=2, d=32):
    return [torch.randn(s).to(dtype) for s in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))]


def check(function, tensors, reference, dtype):
    ours = [x.clone().requires_grad_() for x in tensors]
    theirs = oracle.leaves(*tensors)
    got, want = function(*ours), reference(*theirs)
    assert got.dtype == dtype
    oracle.assert_close(got, want, dtype, factor=2)
    w = torch.randn(got.shape)
    grads = torch.autograd.grad((got.float() * w).sum(), ours)
    oracle.assert_grads(grads, torch.autograd.grad((want * w).sum(), theirs), dtype, "qkv", 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (5, 3)}, {"causal": True, "window_size": (4, 9)}, {"softcap": 5.0},
    {"window_size": torch.tensor([3, 2])}, {"softmax_scale": 0.5, "deterministic": True},
])  # fmt: skip
def test_dense_functions(dtype, options):
    q, k, v = qkv(dtype)
    reading = {"causal": options.get("causal", False), "softcap": options.get("softcap", 0.0), "softmax_scale": options.get("softmax_scale")}
    if "window_size" in options:
        left, right = (int(x) for x in options["window_size"])
        reading["window"] = (left, 0 if reading["causal"] else right)

    def exact(q, k, v):
        return oracle.attention(q, k, v, **reading)[0]

    for module in (fa2, fa3):
        check(lambda *x: module.flash_attn_func(*x, **options), (q, k, v), exact, dtype)  # noqa: B023
    kv = torch.stack((k, v), 2)
    check(lambda q, kv: fa2.flash_attn_kvpacked_func(q, kv, **options), (q, kv), lambda q, kv: exact(q, *kv.unbind(2)), dtype)
    packed = torch.randn(2, 20, 3, 4, 32).to(dtype)
    for module in (fa2, fa3):
        check(lambda x: module.flash_attn_qkvpacked_func(x, **options), (packed,), lambda x: exact(*x.unbind(2)), dtype)  # noqa: B023
    grouped = torch.randn(2, 20, 8, 32).to(dtype)
    check(lambda x: fa3.flash_attn_qkvpacked_func(x, num_heads_q=4, **options), (grouped,), lambda x: exact(*x.split((4, 2, 2), 2)), dtype)


def test_alibi():
    q, k, v = qkv()
    for slopes in (torch.rand(4), torch.rand(2, 4)):
        check(lambda *x: fa2.flash_attn_func(*x, causal=True, alibi_slopes=slopes), (q, k, v),  # noqa: B023
              lambda *x: oracle.attention(*x, causal=True, alibi_slopes=slopes)[0], torch.bfloat16)  # fmt: skip  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES)
def test_varlen_functions(dtype):
    cu_q, cu_k = torch.tensor([0, 5, 5, 20], dtype=torch.int32), torch.tensor([0, 9, 12, 33], dtype=torch.int32)
    q, k, v = (torch.randn(n, h, 32).to(dtype) for n, h in ((20, 4), (33, 2), (33, 2)))

    def exact(q, k, v, cu_k=cu_k):
        parts = [oracle.attention(q[None, cu_q[n] : cu_q[n + 1]], k[None, cu_k[n] : cu_k[n + 1]], v[None, cu_k[n] : cu_k[n + 1]], causal=True)[0][0]
                 for n in range(3)]  # fmt: skip
        return torch.cat(parts)

    lengths = (cu_q, cu_k, 15, 21)
    for module in (fa2, fa3):
        check(lambda *x: module.flash_attn_varlen_func(*x, *lengths, causal=True), (q, k, v), exact, dtype)  # noqa: B023
    kv = torch.stack((k, v), 1)
    check(lambda q, kv: fa2.flash_attn_varlen_kvpacked_func(q, kv, *lengths, causal=True), (q, kv), lambda q, kv: exact(q, *kv.unbind(1)), dtype)
    packed = torch.randn(20, 3, 4, 32).to(dtype)
    check(lambda x: fa2.flash_attn_varlen_qkvpacked_func(x, cu_q, 15, causal=True), (packed,),
          lambda x: exact(*x.unbind(1), cu_k=cu_q), dtype)  # fmt: skip
    out, lse, mask = fa2.flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 20) and mask.numel() == 0
    out3, lse3 = fa3.flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_attn_probs=True)
    assert torch.equal(out, out3) and torch.equal(lse, lse3)


def test_varlen_paged():
    q = torch.randn(7, 4, 32).bfloat16()
    k, v = torch.randn(2, 6, 16, 2, 32).bfloat16()
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    cu_q, cu_k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 20, 51], dtype=torch.int32)
    got = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 31, causal=True, block_table=table)
    for b, n in enumerate((20, 31)):
        keys, values = (x[table[b]].flatten(0, 1)[None, :n] for x in (k, v))
        rows = slice(cu_q[b], cu_q[b + 1])
        oracle.assert_close(got[None, rows], oracle.attention(q[None, rows], keys, values, causal=True)[0], torch.bfloat16)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported for varlen paged KV"):
        flash_attn_interface._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 4, 31, 0.0, None, True, block_table=table, num_splits=2)


def test_returns():
    q, k, v = qkv(sq=33, sk=20)
    out, lse, mask = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 4, 33) and lse.dtype == torch.float32 and mask.numel() == 0
    assert (lse[:, :, :13] == torch.inf).all()  # flash-attn's mark of a row without keys
    assert torch.isfinite(lse[:, :, 13:]).all() and (out[:, :13] == 0).all()
    out3, lse3 = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out3, out) and (lse3[:, :, :13] == -torch.inf).all()
    leaf = q.clone().requires_grad_()
    out, lse, _ = fa2.flash_attn_func(leaf, k, v, return_attn_probs=True)
    assert out.requires_grad and not lse.requires_grad


def test_dropout_mask():
    q, k, v = qkv()
    out, lse, mask = fa2.flash_attn_func(q, k, v, dropout_p=0.3, causal=True, return_attn_probs=True)
    assert mask.shape == (2, 4, 128, 128) and mask.dtype == q.dtype
    signed = mask[:, :, :20, :33].float()
    p = signed.abs()
    seen = oracle.visible(20, 33, True)
    assert (p[:, :, ~seen] == 0).all() and (mask[:, :, 20:] == 0).all()
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float().repeat_interleave(2, 2)) * 32**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(p, (scores - scores.amax(-1, keepdim=True)).exp(), atol=1e-2, rtol=1e-2)
    kept = ~torch.signbit(signed)
    assert abs(kept[:, :, seen].float().mean() - 0.7) < 0.05
    want, _ = oracle.attention(q, k, v, causal=True, kept=kept, dropout_p=0.3)
    oracle.assert_close(out, want, torch.bfloat16, factor=2)
    cu_q, cu_k = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([0, 33, 66], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out, _, mask = fa2.flash_attn_varlen_func(*flat, cu_q, cu_k, 20, 33, dropout_p=0.3, causal=True, return_attn_probs=True)
    want, _ = oracle.attention(q, k, v, causal=True, kept=~torch.signbit(mask[:, :, :20, :33].float()), dropout_p=0.3)
    oracle.assert_close(out.view_as(want), want, torch.bfloat16, factor=2)


def rotate(x, cos, sin, interleaved):
    """float64 rotation by hand, position = index."""
    n = 2 * cos.shape[1]
    y = x.double().clone()
    cos, sin = cos.double()[: x.shape[0], None], sin.double()[: x.shape[0], None]
    a, b = (slice(0, n, 2), slice(1, n, 2)) if interleaved else (slice(0, n // 2), slice(n // 2, n))
    y[..., a], y[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
    return y


@pytest.mark.parametrize("module", [fa2, fa3])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kvcache_append_and_rotary(module, paged, interleaved):
    q, k_new, v_new = (torch.randn(2, 3, h, 32).half() for h in (4, 2, 2))
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    angles = torch.randn(40, 8)
    cos, sin = angles.cos().half(), angles.sin().half()
    if paged:
        k, v = torch.randn(2, 5, 8, 2, 32).half()
        table = torch.tensor([[4, 2], [0, 3]], dtype=torch.int32)
        options = {"block_table" if module is fa2 else "page_table": table}
        gather = lambda x, b: x[table[b]].flatten(0, 1)  # noqa: E731
    else:
        k, v = torch.randn(2, 3, 16, 2, 32).half()
        rows = torch.tensor([2, 0], dtype=torch.int32)
        options = {"cache_batch_idx": rows}
        gather = lambda x, b: x[rows[b]]  # noqa: E731
    before_k, before_v = k.clone(), v.clone()
    got = module.flash_attn_with_kvcache(q, k, v, k_new, v_new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, causal=True,
                                         rotary_interleaved=interleaved, return_softmax_lse=True, **options)  # fmt: skip
    assert len(got) == (2 if module is fa2 else 4) and got[1].shape == (2, 4, 3)
    for b in range(2):
        n = int(lengths[b])
        part = slice(n, n + 3)
        kr = rotate(k_new[b], cos[part], sin[part], interleaved).half()
        torch.testing.assert_close(gather(k, b)[part], kr, atol=2e-3, rtol=2e-3)
        assert torch.equal(gather(v, b)[part], v_new[b]) and torch.equal(gather(k, b)[:n], gather(before_k, b)[:n])
        qr = rotate(q[b], cos[part], sin[part], interleaved)
        keys = torch.cat((gather(before_k, b)[:n].double(), kr.double()))
        values = torch.cat((gather(before_v, b)[:n], v_new[b])).double()
        want, want_lse = oracle.attention(qr[None], keys[None], values[None], causal=True)
        oracle.assert_close(got[0][b : b + 1], want, torch.float16, factor=2)
        oracle.assert_close(got[1][b : b + 1], want_lse, torch.float16)


def test_kvcache_leftpad_splits_scalar_length():
    q = torch.randn(2, 1, 4, 32).half()
    k, v = torch.randn(2, 2, 50, 2, 32).half()
    pad = torch.tensor([3, 10], dtype=torch.int32)
    for splits in (0, 1, 3):
        got = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=40, cache_leftpad=pad, causal=True, num_splits=splits)
        for b in range(2):
            want, _ = oracle.attention(q[b : b + 1], k[b : b + 1, pad[b] : 40], v[b : b + 1, pad[b] : 40], causal=True)
            oracle.assert_close(got[b : b + 1], want, torch.float16)
    _, lse = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=0, return_softmax_lse=True)
    assert (lse == torch.inf).all()
    cu = torch.tensor([0, 1, 3], dtype=torch.int32)
    got = fa3.flash_attn_with_kvcache(torch.randn(3, 4, 32).half(), k, v, cache_seqlens=40, cu_seqlens_q=cu, max_seqlen_q=2,
                                      scheduler_metadata=fa3.get_scheduler_metadata(2, 2, 50, 4, 2, 32, torch.tensor([40, 40])))  # fmt: skip
    assert got.shape == (3, 4, 32)


def test_combine():
    q, k, v = (x.float() for x in qkv())
    parts = [tilewise.attention(q, k[:, a], v[:, a], return_lse=True) for a in (slice(0, 9), slice(9, 9), slice(9, 33))]
    out, lse = fa3.flash_attn_combine(torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts]))
    want, want_lse = oracle.attention(q, k, v)
    oracle.assert_close(out, want, torch.float32)
    oracle.assert_close(lse.transpose(1, 2), want_lse, torch.float32)
    empty = fa3.flash_attn_combine(torch.zeros(2, 1, 1, 1, 8), torch.full((2, 1, 1, 1), -torch.inf), out_dtype=torch.bfloat16)
    assert (empty[0] == 0).all() and empty[0].dtype == torch.bfloat16 and (empty[1] == -torch.inf).all()


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_private_functions(p):
    q, k, v = qkv()
    out, lse, _, rng_state = flash_attn_interface._flash_attn_forward(q, k, v, p, 0.2, True, -1, -1, 0.0, None, False)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    softmax_d = flash_attn_interface._wrapped_flash_attn_backward(
        dout, q, k, v, out, lse, *grads, p, 0.2, True, -1, -1, 0.0, None, False, rng_state=rng_state
    )
    assert softmax_d.shape == (2, 4, 128)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    again = tilewise.attention(*leaves, softmax_scale=0.2, causal=True, dropout_p=p, rng_state=rng_state if p else None)
    assert torch.equal(again, out)
    for x, y in zip(grads, torch.autograd.grad(again, leaves, dout)):
        assert torch.equal(x, y)
    cu_q, cu_k = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([0, 33, 66], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    lengths = (cu_q, cu_k, 20, 33)
    out, lse, _, state = flash_attn_interface._flash_attn_varlen_forward(*flat, *lengths, p, 0.2, True)
    grads = [torch.empty_like(x) for x in flat]
    flash_attn_interface._flash_attn_varlen_backward(
        dout.flatten(0, 1), *flat, out, lse, *grads, *lengths, p, 0.2, True, -1, -1, 0.0, None, False, rng_state=state
    )
    assert all(torch.isfinite(g).all() for g in grads)
    if not p:
        grads3 = [torch.empty_like(x) for x in flat]
        fa3._flash_attn_backward(dout.flatten(0, 1), *flat, out, lse, cu_q, cu_k, None, None, 20, 33, *grads3, 0.2, True)
        assert all(torch.equal(x, y) for x, y in zip(grads, grads3))


@pytest.mark.parametrize("d", [59, 111])
@pytest.mark.parametrize("grad", [False, True])
def test_odd_head_dims(d, grad):
    x = torch.randn(1, 9, 3, 2, d).half().requires_grad_(grad)
    q, k, v = x.unbind(2)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    with torch.enable_grad() if grad else torch.no_grad():
        outs = [
            fa2.flash_attn_qkvpacked_func(x), fa2.flash_attn_func(q, k, v), fa2.flash_attn_kvpacked_func(q, x[:, :, 1:]),
            fa2.flash_attn_varlen_qkvpacked_func(x[0], cu, 9), fa2.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 9, 9),
            fa2.flash_attn_varlen_kvpacked_func(q[0], x[0, :, 1:], cu, cu, 9, 9), fa3.flash_attn_func(q, k, v),
            fa2.flash_attn_with_kvcache(q.detach(), k.detach(), v.detach()),
        ]  # fmt: skip
    assert all(o.shape[-1] == d for o in outs)
    if grad:
        sum(o.float().sum() for o in outs[:-1]).backward()
        assert x.grad.shape == x.shape and torch.isfinite(x.grad).all()


def test_errors():
    q, k, v = qkv(torch.float32)
    for module in (fa2, fa3):
        with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
            module.flash_attn_func(q, k, v)
        with pytest.raises(RuntimeError, match="same dtype"):
            module.flash_attn_func(q.half(), k.bfloat16(), v.half())
        with pytest.raises(RuntimeError, match="multiple of num_heads_k"):
            module.flash_attn_func(q[:, :, :3].half(), k.half(), v.half())
    with pytest.raises(RuntimeError, match="dropout_p 1.0"):
        fa2.flash_attn_func(q.half(), k.half(), v.half(), dropout_p=1.0)
    q, k, v = q.half(), k.half(), v.half()
    for options in ({"qv": q}, {"attention_chunk": 4}, {"q_descale": torch.ones(2, 2)}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            fa3.flash_attn_func(q, k, v, **options)
    with pytest.raises(NotImplementedError, match="cu_seqlens_k_new"):
        fa3.flash_attn_with_kvcache(q, k, v, cu_seqlens_k_new=torch.zeros(1))


def test_bert_padding_round_trip():
    """Left, right and holes: packed attention equals attention under the mask, gradients too."""
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, 5:], mask[1, :3], mask[2, 2:4] = 0, 0, 0
    x = torch.randn(4, 9, 3, 2, 16, dtype=torch.float16, requires_grad=True)
    hidden, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert hidden.shape[0] == int(mask.sum()) and cu.dtype == torch.int32 and longest == 9 and used.tolist() == mask.sum(1).tolist()
    out = bert_padding.pad_input(fa2.flash_attn_varlen_qkvpacked_func(hidden, cu, longest), indices, 4, 9)
    want = tilewise.attention(*x.unbind(2), bias=mask.bool()[:, None, None, :]) * mask[:, :, None, None]
    torch.testing.assert_close(out, want.half(), atol=2e-3, rtol=2e-3)
    w = torch.randn(out.shape).half()
    for a, b in zip(torch.autograd.grad((out * w).sum(), x), torch.autograd.grad((want * w).sum(), x)):
        torch.testing.assert_close(a, b, atol=4e-3, rtol=4e-3)
    both = bert_padding.unpad_input(x, mask, 1 - mask)
    assert both[0].shape[0] == 36 and both[2].tolist() == [0, 9, 18, 27, 36] and both[4].tolist() == mask.sum(1).tolist()
    lengths = torch.tensor([[2, 3, 0, 0, 0], [4, 0, 0, 0, 0]])
    hidden, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(torch.randn(2, 5, 8), lengths)
    assert cu.tolist() == [0, 2, 5, 9] and longest == 4 and indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    rows, same = bert_padding.index_first_axis_residual(x, torch.tensor([1]))
    assert torch.equal(rows, x[1:2]) and same is x


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    x = torch.randn(2, 5, 3, 16, requires_grad=True)
    angles = torch.randn(12, 4)
    cos, sin = angles.cos(), angles.sin()
    offsets = torch.tensor([3, 7])
    got = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    for b in range(2):
        part = slice(int(offsets[b]), int(offsets[b]) + 5)
        torch.testing.assert_close(got[b].double(), rotate(x.detach()[b].double(), cos[part], sin[part], interleaved), atol=1e-6, rtol=1e-6)
    assert torch.autograd.grad(got.sum(), x)[0].shape == x.shape
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    flat = rotary.apply_rotary_emb(x.flatten(0, 1), cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=5)
    assert torch.equal(flat.view_as(got), got)
    y = x.detach().clone()
    assert rotary.apply_rotary_emb(y, cos, sin, interleaved, inplace=True) is y
    torch.testing.assert_close(y, rotary.apply_rotary_emb_torch(x.detach(), cos[:5], sin[:5], interleaved))
    qkv_ = torch.randn(2, 5, 3, 3, 16)
    turned = rotary.apply_rotary_emb_qkv_(qkv_.clone(), cos, sin, interleaved=interleaved)
    assert torch.equal(turned[:, :, 2], qkv_[:, :, 2])
    assert torch.equal(turned[:, :, 0], rotary.apply_rotary_emb(qkv_[:, :, 0], cos, sin, interleaved))
    module = rotary.RotaryEmbedding(8, interleaved=interleaved)
    torch.testing.assert_close(module(qkv_.clone(), seqlen_offset=2)[:, 3:, 0], module(torch.nn.functional.pad(qkv_, (0,) * 6 + (2, 0)))[:, 5:, 0])
    scaled = rotary.RotaryEmbedding(8, interleaved=interleaved, scale_base=512.0)(qkv_.clone())
    product = torch.einsum("bshd,bshd->bsh", scaled[:, :, 0, :, :8], scaled[:, :, 1, :, :8])
    torch.testing.assert_close(product, torch.einsum("bshd,bshd->bsh", qkv_[:, :, 0, :, :8], qkv_[:, :, 1, :, :8]), atol=1e-4, rtol=1e-4)


def test_install():
    names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.layers.rotary", "flash_attn_interface", "flash_attn_3")
    assert not any(name in sys.modules for name in names)
    tilewise.compat.install()
    try:
        import flash_attn_interface as theirs3
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb

        assert flash_attn_func is fa2.flash_attn_func and unpad_input is bert_padding.unpad_input
        assert apply_rotary_emb is rotary.apply_rotary_emb and theirs3.flash_attn_combine is fa3.flash_attn_combine
    finally:
        tilewise.compat.uninstall()
    assert not any(name in sys.modules for name in names)
    import types

    sys.modules["flash_attn"] = types.ModuleType("flash_attn")
    try:
        with pytest.raises(tilewise.Error, match="force=True"):
            tilewise.compat.install()
        assert "flash_attn_interface" not in sys.modules
        tilewise.compat.install(force=True)
        assert sys.modules["flash_attn"] is fa2
    finally:
        tilewise.compat.uninstall()
        sys.modules.pop("flash_attn", None)
