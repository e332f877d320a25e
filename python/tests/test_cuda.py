"""What only CUDA tensors have: streams, graphs, the allocator, several devices, memory beyond 2^31 elements, the CPU's masks.

Runs with TILEWISE_TEST_DEVICE=cuda (conftest.py), as `./dev gpu-test` does.
"""

import gc
import os
import re
import subprocess
import sys
import threading

import oracle
import pytest
import torch

import tilewise
import tilewise.torch

SIZE = (2, 300, 4, 64)


def inputs(shape=SIZE, sk=333, hk=2, dtype=torch.bfloat16):
    b, sq, hq, d = shape
    return [torch.randn(s).to(dtype) for s in ((b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d))]


def gradients(q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = tilewise.attention(*leaves, return_lse=True, **options)
    return (o.detach(), lse.detach()) + torch.autograd.grad((o.float().square().sum(), lse.sum()), leaves)


def same(got, want):
    return all(torch.equal(x, y) for x, y in zip(got, want))


def test_runs_on_a_cuda_row():
    q, k, v = inputs()
    assert tilewise.plan(q, k, v).backend == "cuda"
    assert tilewise.plan(q, k, v, backward=True).backend == "cuda"
    for name in (r.name for r in tilewise.kernels() if r.backend == "cpu" and r.direction != "backward"):  # by name, too: never on the wrong memory
        with pytest.raises(tilewise.Unsupported, match="the tensors are on a GPU"):
            tilewise.attention(q, k, v, kernel=name)
    with pytest.raises(tilewise.Unsupported, match="the tensors are on the CPU"):
        tilewise.attention(*[x.cpu() for x in (q, k, v)], backend="cuda")


def test_mixed_devices_are_refused_by_name():
    q, k, v = inputs()
    with pytest.raises(tilewise.InvalidArgument, match="k: device"):
        tilewise.attention(q, k.cpu(), v)
    with pytest.raises(tilewise.InvalidArgument, match="seqused_k: device"):
        tilewise.attention(q, k, v, seqused_k=torch.tensor([1, 2], dtype=torch.int32, device="cpu"))
    cu = torch.tensor([0, 300], dtype=torch.int32)
    with pytest.raises(tilewise.InvalidArgument, match="seqlen_q 0: must be given for packed tensors on CUDA"):
        tilewise.attention_varlen(q[0], k[0, :300], v[0, :300], cu_seqlens_q=cu, cu_seqlens_k=cu)


@pytest.mark.parametrize("kind", ["left padding", "right padding", "causal", "both", "rows", "documents", "half", "far below"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_by_a_bias(dtype, kind):
    """Whole tiles, rows and matrices hidden by -inf, by the most negative number of the bias's type, or by a mask."""
    b, s, j = 3, 448, torch.arange(448)
    hide = torch.zeros(b, 1, s, s, dtype=torch.bool)
    if kind in ("left padding", "both"):
        hide |= (j < torch.tensor([0, 100, 447])[:, None])[:, None, None]
    if kind == "right padding":
        hide |= (j >= torch.tensor([1, 100, 448])[:, None])[:, None, None]
    if kind in ("causal", "both"):
        hide |= j > j[:, None]
    if kind == "rows":
        hide[:, :, ::3] = True
    if kind == "documents":
        hide |= j // 96 != j[:, None] // 96
    if kind == "half":
        hide[:, :, 1::2, 200:] = True
    for d in (64, 128, 256):
        q, k, v = [x.to(dtype) for x in (torch.randn(b, s, 2, d), torch.randn(b, s, 1, d), torch.randn(b, s, 1, d))]
        for added in (torch.bool, torch.float32, dtype):
            for low in (None,) if added == torch.bool else (-torch.inf, torch.finfo(added).min):
                for causal in (False, True) if kind == "documents" else (False,):
                    shift = torch.tensor([300.0, 20000.0, 60000.0] if kind == "far below" else [0.0] * 3)[:, None, None, None]
                    bias = ~hide if low is None else (torch.randn(b, 1, s, s) - shift).to(added).masked_fill(hide, low)
                    bias = bias[:, :, :1].contiguous() if kind == "right padding" else bias
                    o, lse = tilewise.attention(q, k, v, bias=bias, causal=causal, return_lse=True)
                    want_o, want_lse = oracle.attention(q, k, v, bias=bias, causal=causal)
                    # Logits near -65504 are rounded to 2^-8 in float32.
                    near = 0.02 if dtype == torch.bfloat16 or (low == -65504 and not causal) else 0.004
                    near *= 4 if kind == "far below" else 1
                    where = "d %d, %s, %s, causal %d" % (d, added, low, causal)
                    torch.testing.assert_close(o.double(), want_o, atol=near, rtol=0, msg=where)
                    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-5, msg=where)


def test_lists_of_lengths_go_to_the_device():
    q, k, v = inputs()
    want = tilewise.attention(q, k, v, seqused_k=torch.tensor([5, 333], dtype=torch.int32))
    assert torch.equal(tilewise.attention(q, k, v, seqused_k=[5, 333]), want)


def test_outside_the_default_device():
    """The tests' default device must hide nothing."""
    q, k, v = inputs()
    with torch.device("cpu"):
        o, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, dropout_p=0.1)
        assert o.is_cuda and lse.is_cuda
        o = tilewise.attention(q, k, v, seqused_k=[5, 333])
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        tilewise.attention(*leaves, dropout_p=0.2, deterministic=True).sum().backward()
        cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        tilewise.attention_varlen(q[0], k[0, :300], v[0, :300], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=200, max_seqlen_k=200)
        tilewise.attention_with_kvcache(q[:, :1], k, v, k[:, :1], v[:, :1], cache_seqlens=7)
    assert all(x.grad.is_cuda for x in leaves) and o.is_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_same_dropout_mask_as_the_cpu(dtype):
    q, k, v = inputs(dtype=dtype)
    options = dict(dropout_p=0.3, dropout_seed=2**63 + 5, dropout_offset=2**40 + 9, causal=True, return_dropout_mask=True)
    o, kept = tilewise.attention(q, k, v, **options)
    want, want_kept = tilewise.attention(*[x.cpu() for x in (q, k, v)], **options)
    assert torch.equal(kept.cpu(), want_kept)
    oracle.assert_close(o.cpu(), want, dtype, factor=3)


def test_current_stream():
    """Work goes to torch's current stream, workspace included: a slow producer on that stream is waited for."""
    q, k, v = inputs((1, 64, 4, 64), sk=4096)
    want = tilewise.attention(q, k, v, num_splits=5)
    stream = torch.cuda.Stream()
    big = torch.randn(6144, 6144)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        for _ in range(8):
            big = big @ big.t() * 1e-4  # some milliseconds
        late.copy_(q)
        got = tilewise.attention(late, k, v, num_splits=5)
    stream.synchronize()
    assert torch.equal(got, want)


def test_two_streams_and_threads():
    cases = [(inputs(), {"causal": True}), (inputs((3, 200, 4, 128), 500), {"softcap": 5.0}), (inputs((2, 1, 8, 64), 3000), {"num_splits": 7})]
    wants = [gradients(*x, deterministic=True, **o) for x, o in cases]
    torch.cuda.synchronize()
    failures = []

    def work(n):
        try:
            torch.set_default_device("cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    for (x, o), want in zip(cases[n:] + cases[:n], wants[n:] + wants[:n]):
                        if not same(gradients(*x, deterministic=True, **o), want):
                            failures.append(n)
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_graph_replay():
    """A captured forward and backward pass computes anew from new inputs, and dropout draws anew from device memory."""
    q, k, v = inputs()
    state = torch.tensor([5, 0])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    w = torch.randn_like(q)

    def step():
        o = tilewise.attention(*leaves, causal=True, dropout_p=0.2, rng_state=state, deterministic=True)
        return (o.detach(),) + torch.autograd.grad(o, leaves, w)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    seen = []
    for round_ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        state[1] = round_
        graph.replay()
        got = [x.clone() for x in captured]
        assert same(got, step())
        seen.append(got[0])
    state[1] = 7
    graph.replay()
    assert not torch.equal(captured[0], seen[-1])  # the same inputs, other draws


def test_graph_of_decoding():
    q, k, v = inputs((4, 1, 8, 128), sk=2000)
    k_new, v_new = torch.randn(2, 4, 1, 2, 128).to(q.dtype)
    lengths = torch.tensor([5, 600, 1999, 0], dtype=torch.int32)
    caches = [k.clone(), v.clone()]

    def step(k_cache, v_cache):
        return tilewise.attention_with_kvcache(q, k_cache, v_cache, k_new, v_new, cache_seqlens=lengths, causal=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*[x.clone() for x in caches])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        o = step(*caches)
    for lengths_now in ([5, 600, 1999, 0], [6, 601, 7, 1]):
        lengths.copy_(torch.tensor(lengths_now, dtype=torch.int32))
        twin = [x.clone() for x in caches]
        graph.replay()
        assert torch.equal(o, step(*twin)) and same(caches, twin)


def test_workspace_comes_from_torch_and_goes_back():
    q, k, v = inputs((1, 2048, 8, 128), sk=2048, hk=8)
    gradients(q, k, v)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def taken_from_the_device():
        free = torch.cuda.mem_get_info()[0]
        gradients(q, k, v)
        torch.cuda.synchronize()
        return free - torch.cuda.mem_get_info()[0]

    # Nothing beside torch's allocator. Other programs on the GPU take memory too, but not in every turn.
    assert min(taken_from_the_device() for _ in range(5)) < 64 << 20
    plan = tilewise.plan(q, k, v, backward=True)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before >= plan.workspace_bytes > 0
    linear = 40 * q.numel() * 4
    assert torch.cuda.max_memory_allocated() - before < linear  # standard attention: 8 * 2048^2 * 4 = 128 MiB for one matrix


def test_memory_is_linear_in_the_length():
    used = []
    for s in (4096, 8192):
        q, k, v = inputs((1, s, 2, 64), sk=s, hk=2)
        for deterministic in (False, True):
            plan = tilewise.plan(q, k, v, backward=True, deterministic=deterministic)
            used.append(plan.workspace_bytes)
    assert used[2] <= 2.2 * used[0] and used[3] <= 2.2 * used[1]


def test_plans_do_not_pile_up():
    from tilewise.torch import _kind

    q, k, v = inputs((1, 3, 1, 8), sk=5, hk=1)
    for seed in range(_kind._MAX_PLANS + 50):
        tilewise.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
    assert len(_kind._plans) <= _kind._MAX_PLANS


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_second_device():
    q, k, v = inputs()
    want = gradients(q, k, v, deterministic=True)
    there = [x.to("cuda:1") for x in (q, k, v)]
    assert torch.cuda.current_device() == 0
    got = gradients(*there, deterministic=True)
    assert all(x.device.index == 1 for x in got) and same([x.to("cuda:0") for x in got], want)
    assert torch.cuda.current_device() == 0


def test_more_than_65535_heads_and_batches():
    q, k, v = inputs((70000, 17, 1, 8), sk=19, hk=1, dtype=torch.float16)
    o, lse, dq, dk, dv = gradients(q, k, v, causal=True, batch_invariant=True)
    for part in (slice(0, 3), slice(65534, 65538), slice(69997, 70000)):
        want = gradients(q[part], k[part], v[part], causal=True, batch_invariant=True)
        assert same((o[part], lse[part], dq[part], dk[part], dv[part]), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_2_to_31_elements(dtype):
    """Windows keep the work small; rows on both sides of element 2^31 against the oracle on their own keys."""
    free = torch.cuda.mem_get_info()[0]
    s, h, d, left = 2**31 // (16 * 128) + 3000, 16, 128, 64
    if free < 14 * s * h * d * dtype.itemsize:
        pytest.skip("%.0f GiB free" % (free / 2**30))
    q, k, v = (torch.randn(1, s, h, d, dtype=dtype) for _ in range(3))
    assert q.numel() > 2**31
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = tilewise.attention(*leaves, window=(left, 0), return_lse=True)
    w = torch.zeros_like(o)
    parts = [slice(0, 200), slice(2**31 // (h * d) - 100, 2**31 // (h * d) + 100), slice(s - 200, s)]
    for part in parts:
        w[:, part] = torch.randn(1, 200, h, d)
    grads = torch.autograd.grad(o, leaves, w)
    for part in parts:
        begin = max(part.start - left, 0)
        rows = slice(part.start - begin, part.stop - begin)
        one = oracle.leaves(q[:, begin : part.stop], k[:, begin : part.stop], v[:, begin : part.stop])
        want, want_lse = oracle.attention(*one, window=(left, 0))
        oracle.assert_close(o[:, part], want[:, rows], dtype, "o", 2)
        oracle.assert_close(lse[:, :, part], want_lse[:, :, rows], dtype, "lse", 2)
        want_grads = torch.autograd.grad((want * w[:, begin : part.stop].double()).sum(), one)
        oracle.assert_grads([g[:, begin : part.stop] for g in grads], want_grads, dtype, "qkv", 4)


# problem, and the row and cut that a tuning file asks for; rows that this GPU lacks are left out.
CUTS = [
    ("fwd bf16 cuda b=2 hq=4 sq=4096 d=64", "forward_sm90 block_m=256 block_n=64"),
    ("fwd f16 cuda b=2 hq=4 sq=1000 d=64", "forward_sm90 block_m=192 block_n=128"),
    ("fwd bf16 cuda b=2 hq=4 sq=1000 d=64 causal", "forward_sm90 block_m=192"),
    ("fwd bf16 cuda b=2 hq=4 hk=2 sq=777 sk=1500 d=64 window=200,30", "forward_sm90 block_n=128"),
    ("fwd f16 cuda b=2 hq=4 sq=1000 d=128 causal", "forward_sm90 block_n=128"),
    ("fwd bf16 cuda b=2 hq=4 sq=3000 d=128", "forward_sm90 block_n=64"),
    ("fwd bf16 cuda b=2 hq=4 sq=500 d=64 causal", "forward_sm80"),
    ("fwd bf16 cuda b=1 hq=4 sq=200 sk=3002 d=128", "forward_sm80 splits=3"),
    ("fwd bf16 cuda b=2 hq=8 hk=2 sq=1 sk=3001 d=128", "decode_sm80 splits=5"),
    ("fwd f16 cuda b=2 hq=8 hk=2 sq=1 sk=3001 d=64", "decode_sm80 splits=1"),
    ("fwd f32 cuda b=2 hq=4 sq=3 sk=2000 d=64", "forward_sm80 splits=7"),
]

COMPARE = """
import sys, oracle, torch, tilewise
torch.set_default_device("cuda")
for problem in sys.argv[1:]:
    words = dict(w.split("=") for w in problem.split() if "=" in w)
    b, hq, sq, d = (int(words[n]) for n in ("b", "hq", "sq", "d"))
    hk, sk = int(words.get("hk", hq)), int(words.get("sk", sq))
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[problem.split()[1]]
    options = dict(causal="causal" in problem, window=tuple(map(int, words["window"].split(","))) if "window" in words else None)
    torch.manual_seed(1)
    q, k, v = torch.randn(b, sq, hq, d).to(dtype), torch.randn(b, sk, hk, d).to(dtype), torch.randn(b, sk, hk, d).to(dtype)
    plan = tilewise.plan(problem)
    assert plan.config.endswith(", tuned"), (problem, plan.kernel, plan.config)
    o, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    want, want_lse = oracle.attention(q, k, v, **options)
    oracle.assert_close(o, want, dtype, problem)
    oracle.assert_close(lse, want_lse, dtype, problem)
    print(problem, plan.kernel, plan.config)
"""


def test_other_cuts_are_the_same_function(tmp_path):
    """What `tilewise tune` chooses between, forced by a tuning file: each cut against float64."""
    machine, available = tilewise.machine(), {r.name for r in tilewise.kernels() if r.available}
    cases = [(problem, cut) for problem, cut in CUTS if cut.split()[0] in available]
    head = "; ".join(line for line in machine.splitlines() if line.startswith(("cpu ", "caches ")))
    text = "tilewise %s\nmachine %s\ngpu %s\n" % (tilewise.__version__, head, re.search("^cuda 0 (.*)$", machine, re.M).group(1))
    path = tmp_path / "cuts.tuning"
    path.write_text(text + "".join("%s: %s\n" % case for case in cases))
    environment = dict(os.environ, TILEWISE_TUNING=str(path), PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", COMPARE, *(problem for problem, _ in cases)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(cases)


def test_the_command_on_a_gpu(tmp_path):
    """memory --verify is to the byte what was predicted, or close; tune writes a file that this GPU's plans read."""
    tool = os.path.join(os.path.dirname(os.environ.get("TILEWISE_LIBRARY", "")), "cli", "tilewise")
    if not os.path.exists(tool):
        pytest.skip("no command beside the library")

    def run(*words, **environment):
        done = subprocess.run([tool, *words], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ, **environment))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    problems = ("bwd bf16 cuda b=2 hq=8 sq=512 d=64 causal", "bwd f32 cuda hq=4 sq=300 d=40 deterministic", "fwd f16 cuda b=2 hq=8 hk=2 sq=1 sk=2000 d=128 seqused_k causal")
    # Other programs on the GPU take memory too, and would be measured with it, but not in every turn.
    for turn in range(6):
        measured = subprocess.run([tool, "memory", *problems, "--verify"], capture_output=True, text=True, cwd=tmp_path)
        if "5 within 1 % and 2 MiB, 0 beyond" in measured.stdout:
            break
    assert measured.returncode == 0 and "5 within 1 % and 2 MiB, 0 beyond" in measured.stdout, measured.stdout + measured.stderr
    problem = "fwd bf16 cuda b=2 hq=8 sq=512 d=64"
    run("tune", problem, "bwd bf16 cuda hq=8 sq=256 d=64", "--time", "0", "--out", "gpu.tuning")
    text = (tmp_path / "gpu.tuning").read_text()
    assert re.search(r"^gpu .+, sm_\d+, \d+ multiprocessors$", text, re.M) and problem in text
    forced = re.sub("(?m)^#? ?%s:.*$" % re.escape(problem), problem + ": forward_sm80", text)
    (tmp_path / "gpu.tuning").write_text(forced)
    assert ", tuned" in run("plan", problem, TILEWISE_TUNING="gpu.tuning")
