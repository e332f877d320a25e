"""tilewise.memory: the library's numbers, models and configurations, the solver."""

import json

import numpy as np
import pytest

import tilewise

LLAMA = dict(model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
MIB = 2**20


def test_the_table_of_savings():
    rows = {}
    for s in (512, 1024, 2048, 4096, 8192, 16384):
        m = tilewise.memory("bwd bf16 cuda b=1 hq=16 sq=%d d=64" % s)
        matrix, rows_ = 16 * s * s, 2 * 16 * s * 64
        assert m.standard.peak_backward == 16 * matrix + 5 * rows_
        if m.planned:  # there is a GPU: its kernels' own workspace
            assert m.tiled.workspace_backward == tilewise.plan(m.problem).workspace_bytes
        else:
            assert m.tiled.peak_backward == 7 * rows_ + 3 * 4 * 16 * s
        rows[s] = (m.standard.peak_backward / MIB, m.tiled.peak_backward / MIB)
    assert rows[16384][0] == 65696 and 220 < rows[16384][1] < 258


def test_workspaces_are_those_of_plans():
    m = tilewise.memory("bwd f32 b=1 hq=4 sq=300 d=64 causal", num_threads=3)
    assert m.planned
    assert m.tiled.workspace_forward == tilewise.plan("fwd f32 b=1 hq=4 sq=300 d=64 causal", num_threads=3).workspace_bytes
    assert m.tiled.workspace_backward == tilewise.plan("bwd f32 b=1 hq=4 sq=300 d=64 causal", num_threads=3).workspace_bytes
    assert m.tiled.peak_backward == m.tiled.outputs + m.tiled.gradients + m.tiled.workspace_backward
    assert m.tiled.total == m.inputs + m.tiled.peak_backward
    assert m.ratio == max(m.standard[5:7]) / max(m.tiled[5:7])


def test_arrays():
    q, k = np.zeros((2, 100, 8, 64), np.float32), np.zeros((2, 100, 2, 64), np.float32)
    m = tilewise.memory(q, k, k, causal=True)
    assert m.problem == "fwd f32 b=2 hq=8 hk=2 sq=100 d=64 causal no_lse" and m.inputs == q.nbytes + 2 * k.nbytes
    assert m.tiled.saved == 0 and tilewise.memory(q, k, k, causal=True).standard == m.standard


def test_largest():
    m = tilewise.memory(model="llama3-8b")
    for key in ("seqlen", "batch", "heads"):
        most = m.largest("24GiB", key)
        assert most > m.largest("24GiB", key, standard=True) > 0
        assert m.largest(24 * 2**30, key) == most > m.largest("24GB", key)
    most = m.largest("24GiB")
    assert tilewise.memory(model="llama3-8b", seqlen=most).tiled.total <= 24 * 2**30
    assert tilewise.memory(model="llama3-8b", seqlen=most + 1).tiled.total > 24 * 2**30


def test_configurations(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    preset = tilewise.memory(model="llama3-8b", layers="all", checkpointing=True)
    for config in (path, LLAMA, {"text_config": LLAMA, "model_type": "mllama"}):
        m = tilewise.memory(config=config, layers="all", checkpointing=True)
        assert m.problem == preset.problem and m.standard == preset.standard and m.tiled == preset.tiled
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    assert tilewise.memory(config=config).problem == preset.problem
    deepseek = dict(LLAMA, num_attention_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert "hq=128 sq=4096 d=192 dv=128" in tilewise.memory(config=deepseek).problem
    gemma = dict(LLAMA, head_dim=256, sliding_window=4096, attn_logit_softcapping=50.0, layer_types=["sliding_attention", "full_attention"] * 16)
    assert tilewise.memory(config=gemma).problem == "bwd bf16 cuda b=1 hq=32 hk=8 sq=4096 d=256 causal softcap=50"
    mistral = dict(LLAMA, sliding_window=4096)
    assert tilewise.memory(config=mistral).problem == tilewise.memory(model="mistral-7b").problem
    assert "window=4095,0" in tilewise.memory(model="mistral-7b").problem


def test_decoding():
    m = tilewise.memory(model="gpt-oss-20b", decode=True, seqlen=8192, layers="all", batch=2)
    assert m.problem == "fwd bf16 cuda b=2 hq=64 hk=8 sq=1 sk=8192 d=64 causal sink seqused_k"
    cache = 2 * 2 * 8192 * 8 * 64 * 2
    assert m.tiled.total == m.inputs + m.tiled.peak_forward + 11 * cache + 12 * cache * 128 // 8192
    all_windowed = tilewise.memory(model="mistral-7b", decode=True, seqlen=8192, layers="all")
    assert all_windowed.tiled.total == all_windowed.inputs + all_windowed.tiled.peak_forward + 31 * 2 * 4096 * 8 * 128 * 2


def test_windows_of_configurations():
    for more, full in (({"model_type": "gemma2"}, 16), ({"sliding_window_pattern": 4}, 8), ({"max_window_layers": 28}, 28), ({"use_sliding_window": False}, 32),
                       ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 29}, 3)):  # fmt: skip
        m = tilewise.memory(config=dict(LLAMA, sliding_window=1024, **more), decode=True, seqlen=4096, layers="all")
        cache = 2 * 4096 * 8 * 128 * 2
        assert m.tiled.total == m.inputs + m.tiled.peak_forward + (full - 1) * cache + (32 - full) * cache // 4, more


def test_explain():
    m = tilewise.memory("bwd bf16 cuda b=1 hq=16 sq=16384 d=64")
    assert "4 x 1 x 16 x 16384 x 16384" in m.explain() and "bound by" not in m.explain()
    assert "bound by arithmetic" in m.explain("H200")
    for name in ("A100", "H100", "H200", "L40S", "RTX-4090", "B200"):
        assert name in tilewise.gpus()
    assert "64.2 GiB" in str(m) and "standard" in repr(m)


def test_errors():
    for arguments, words in (
        (dict(), "one of problem, model and config"),
        (dict(model="nope"), "llama3-8b"),
        (dict(model="llama3-8b", layers=0), "layers 0"),
        (dict(model="llama3-8b", layers="some"), "layers 'some'"),
        (dict(model="llama3-8b", tensor_parallel=3), "tensor_parallel 3"),
        (dict(config={"hidden_size": 1}), "lacks num_hidden_layers"),
        (dict(problem="fwd f32 hq=1"), "lacks sq="),
    ):
        with pytest.raises(tilewise.InvalidArgument, match=words):
            tilewise.memory(**arguments)
    with pytest.raises(tilewise.Unsupported, match="f64"):
        tilewise.memory("fwd f64 cuda hq=1 sq=8 d=8")
    m = tilewise.memory(model="llama3-8b")
    with pytest.raises(tilewise.InvalidArgument, match="size 'much'"):
        m.largest("much")
    with pytest.raises(tilewise.InvalidArgument, match="key 'd'"):
        m.largest("1GiB", "d")
    with pytest.raises(tilewise.InvalidArgument, match="gpu 'none'"):
        m.explain("none")


def test_verify():
    """On a GPU every peak is as predicted; without one, and for what it does not measure, it says so."""
    torch = pytest.importorskip("torch")
    for text, words in (
        ("bwd f32 hq=2 sq=64 d=64", "is of the CPU; `tilewise memory --verify`"),
        ("fwd bf16 cuda hq=2 sq=64 d=64 sink", "is not dense with causal, window, softcap and dropout alone"),
        ("fwd bf16 cuda b=2 hq=2 sq=1 sk=64 d=64 seqused_k", "is not dense"),
    ):
        with pytest.raises(tilewise.Unsupported, match=words):
            tilewise.memory(text).verify()
    problems = ("bwd bf16 cuda hq=8 hk=2 sq=1024 d=64 causal", "fwd f16 cuda b=2 hq=4 sq=1000 d=128 softcap=30", "fwd bf16 cuda hq=4 sq=2048 d=64 no_lse",
                "bwd f32 cuda hq=4 sq=1024 d=64 window=100,20", "bwd bf16 cuda b=2 hq=4 sq=512 sk=1024 d=96 dropout=0.1 deterministic")  # fmt: skip
    if not torch.cuda.is_available():
        with pytest.raises(tilewise.Unsupported, match="is of a GPU: torch .* finds none here"):
            tilewise.memory(problems[0]).verify()
        return
    for text in problems:
        checks = tilewise.memory(text).verify()
        assert [(c.what, c.direction) for c in checks] == [(w, d) for w in ("standard", "tilewise") for d in ("forward", "backward")[: 2 if "bwd" in text else 1]]
        assert all(c.ok and c.measured > 0 for c in checks), checks


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 4)}, {"window": (-1, 20)}, {"softcap": 3.0, "causal": True}, {"window": (9, -1)}])
def test_what_verify_calls_standard_is_attention(options):
    torch = pytest.importorskip("torch")
    from tilewise.torch import _verify

    q, k, v = torch.randn(2, 70, 4, 16), torch.randn(2, 90, 2, 16), torch.randn(2, 90, 2, 24)
    torch.testing.assert_close(_verify.standard(q.clone(), k, v, **options), tilewise.attention(q, k, v, **options), atol=2e-5, rtol=2e-5)
