"""The package: what it imports, what it loads, its documentation's examples. The wheel is in test_wheel.py."""

import ctypes
import doctest
import glob
import os
import re
import shutil
import struct
import subprocess
import sys
import threading

import oracle
import pytest
import torch

import tilewise
import tilewise.numpy
import tilewise.torch
from tilewise import _abi, _library

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.abspath(tilewise.__file__))
HEADER = os.path.join(os.path.dirname(os.path.dirname(HERE)), "include", "tilewise", "tilewise.h")


def run(code, *flags, env=None, python=sys.executable):
    return subprocess.run([python, *flags, "-c", code], env=dict(os.environ, **(env or {})), capture_output=True, text=True)


def test_import_is_light():
    assert run("import sys, tilewise; assert not {'torch', 'numpy'} & set(sys.modules)").returncode == 0


def test_library_has_no_python_in_it():
    if not shutil.which("nm"):
        pytest.skip("nm is not here")
    symbols = subprocess.run(["nm", "-D", tilewise.library_path], capture_output=True, text=True).stdout
    assert not re.search(r" U _?Py|torch|c10", symbols)
    exported = re.findall(r" T (\S+)", symbols)
    assert exported and all(name.startswith("tw_") for name in exported)


def test_struct_sizes_are_checked():
    assert set(_abi.SIZES) >= {"tw_problem", "tw_tensors", "tw_tensor", "tw_target", "tw_plan_info", "tw_kernel_info"}
    for name, size in _abi.SIZES.items():
        assert _library.lib.tw_struct_size(name.encode()) == size
    with pytest.raises(ImportError, match="tw_target has .* of different versions"):
        _library.check_sizes(lambda name: _abi.SIZES[name.decode()] + 8 * (name == b"tw_target"), "x.so")


def test_fields_in_header_order():
    """Sizes cannot see two members that changed places; their names in the header can."""
    text = open(HEADER).read() if os.path.exists(HEADER) else pytest.skip("the header is not here")
    body = re.search(r"typedef struct tw_tensors \{(.*?)\} tw_tensors;", text, re.S).group(1)
    assert tuple(re.findall(r"tw_tensor\* (\w+);", body)) == _abi.TENSOR_FIELDS
    body = re.search(r"typedef struct tw_problem \{(.*?)\} tw_problem;", text, re.S).group(1)
    assert tuple(re.findall(r"^\s*(?:u?int\d+_t|double) (\w+);", body, re.M)) == _abi.PROBLEM_FIELDS
    sizes = {"uint32_t": "I", "int32_t": "i", "int64_t": "q", "uint64_t": "Q", "double": "d"}
    kinds = "".join(sizes[kind] for kind in re.findall(r"^\s*(u?int\d+_t|double) \w+;", body, re.M))
    assert struct.calcsize("@" + kinds) == _abi.PROBLEM.size
    expanded = re.sub(r"(\d+)(\w)", lambda m: int(m[1]) * m[2], _abi.PROBLEM.format[1:])
    assert expanded == kinds
    for enum, names in (("tw_dtype", "FLOAT32 FLOAT16 BFLOAT16 FLOAT64 INT32 INT64 BOOL"), ("tw_status", "OK INVALID_ARGUMENT UNSUPPORTED OUT_OF_MEMORY DEVICE_ERROR INTERNAL")):
        body = re.search(r"typedef enum %s \{(.*?)\}" % enum, text, re.S).group(1)
        values = {name: int(value) for name, value in re.findall(r"TW_(\w+) = (\d+)", body)}
        assert values == {name: getattr(_abi, name) for name in names.split()}


def test_problem_init_agrees_with_options():
    from tilewise import _call

    memory = ctypes.create_string_buffer(_abi.PROBLEM.size)
    _library.lib.tw_problem_init(ctypes.addressof(memory))
    theirs = dict(zip(_abi.PROBLEM_FIELDS, _abi.PROBLEM.unpack(memory.raw)))
    ours = dict(zip(_abi.PROBLEM_FIELDS, _call.options()))
    for name, value in ours.items():
        assert value == theirs[name] or value != value and theirs[name] != theirs[name], name


@pytest.mark.parametrize("env, message", [
    ({"TILEWISE_LIBRARY": "/nowhere/libtilewise.so"}, "TILEWISE_LIBRARY=/nowhere/libtilewise.so does not exist"),
    ({"TILEWISE_LIBRARY": __file__}, "cannot load"),
])  # fmt: skip
def test_missing_library(env, message):
    done = run("import tilewise", env=env)
    assert done.returncode and "ImportError" in done.stderr and message in done.stderr


def test_foreign_library():
    libc = next((p for p in glob.glob("/lib*/*/libm.so.6")), None)
    if libc is None:
        pytest.skip("no libm.so.6")
    done = run("import tilewise", env={"TILEWISE_LIBRARY": libc})
    assert "has no function tw_version" in done.stderr


def test_asserts_count():
    """Also under python -O, which drops plain asserts: pytest has made those of the tests and of the oracle its own."""
    with pytest.raises(AssertionError, match="1 == 2"):
        assert 1 == 2  # noqa: PLR0133
    with pytest.raises(AssertionError, match="error 1"):
        oracle.assert_close(torch.ones(1), torch.zeros(1), torch.float32)


def test_errors_do_not_depend_on_asserts():
    code = (
        "import torch, tilewise\n"
        "q = torch.randn(1, 4, 3, 16); k = torch.randn(1, 4, 2, 16)\n"
        "for call in (lambda: tilewise.attention(q, k, k), lambda: tilewise.attention(k, k, k, softcap=-1.0),\n"
        "             lambda: tilewise.attention(k, k, k, window=(-5, 0)), lambda: tilewise.attention(k[0], k, k)):\n"
        "    try: call()\n"
        "    except tilewise.InvalidArgument: continue\n"
        "    raise SystemExit(1)\n"
    )
    done = run(code, "-O")
    assert done.returncode == 0, done.stderr
    for path in glob.glob(os.path.join(PACKAGE, "**", "*.py"), recursive=True):
        assert not re.search(r"^\s*assert ", open(path).read(), re.M), path


def test_doctests():
    tried = 0
    for module in (tilewise, tilewise._api, tilewise.online_softmax):
        result = doctest.testmod(module)
        assert result.failed == 0, module
        tried += result.attempted
    assert tried > 25
    for name in tilewise.__all__:
        assert getattr(tilewise, name) is not None


def test_public_functions_are_documented():
    for name in ("attention", "attention_varlen", "attention_with_kvcache", "attention_backward", "softmax", "merge_states", "plan", "explain"):
        doc = getattr(tilewise, name).__doc__
        assert "Args:" in doc or name == "explain"
        assert ">>>" in doc
    frontend = type(tilewise.numpy._frontend)
    for name in ("attention", "attention_varlen"):
        assert set(getattr(tilewise.torch, name).__kwdefaults__) == set(getattr(frontend, name).__kwdefaults__)
    for name in ("attention", "attention_with_kvcache"):
        doc = getattr(tilewise, name).__doc__
        for option in getattr(frontend, name).__kwdefaults__:
            assert option in doc, (name, option)
    for option in frontend.attention_varlen.__kwdefaults__:
        assert option in tilewise.attention_varlen.__doc__ + tilewise.attention.__doc__, option


def test_threads():
    """Eight threads, mixed problems, first call included: each result is what one thread computes."""
    generator = torch.Generator().manual_seed(1)
    problems = []
    for n in range(8):
        d = 8 * (n + 1)
        problems.append([torch.randn(1 + n % 2, 20 + n, 2, d, generator=generator) for _ in range(3)])
    want = [tilewise.attention(*p, causal=True) for p in problems]
    failures = []

    def work(n):
        for _ in range(30):
            for m in range(8):
                p = problems[(n + m) % 8]
                if not torch.equal(tilewise.attention(*p, causal=True), want[(n + m) % 8]):
                    failures.append(n)
                try:
                    tilewise.attention(*p, softcap=-float(n + 1))
                except tilewise.InvalidArgument as error:
                    if "softcap -%d:" % (n + 1) not in str(error):
                        failures.append(str(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_plan_and_explain():
    text = "fwd bf16 b=2 hq=32 hk=8 sq=1024 sk=1024 d=128 causal"
    plan = tilewise.plan(text, backend="reference")
    assert plan.kernel == "reference" and plan.backend == "reference"
    assert plan.flops == pytest.approx(4 * 2 * 32 * 1024 * 1024 * 128 / 2, rel=1e-2)
    assert plan.standard_bytes > 2 * 32 * 1024 * 1024 * 2 and "reference" in str(plan) and "reference" in repr(plan)
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    plan = tilewise.plan(q, k, v, causal=True, return_lse=True)
    assert "b=2 hq=4 hk=2 sq=5 sk=7 d=16 causal" in plan.problem
    backward = tilewise.plan(q, k, v, causal=True, backward=True)
    assert backward.problem.startswith("bwd") and backward.flops == pytest.approx(2.5 * plan.flops)
    same = tilewise.plan(q.numpy(), k.numpy(), v.numpy(), causal=True, return_lse=True)
    assert same.problem == plan.problem
    refusals = tilewise.explain(q.double(), k.double(), v.double())
    assert "reference" in refusals and "f64" in refusals
    with pytest.raises(tilewise.InvalidArgument):
        tilewise.plan("fwd nonsense")
    with pytest.raises(tilewise.InvalidArgument, match="q, k and v"):
        tilewise.plan(q, k)
    with pytest.raises(TypeError, match="colour"):
        tilewise.plan(q, k, v, colour=q)
    kernels = tilewise.kernels()
    assert kernels[-1].name == "reference" and kernels[-1].available and kernels[-1].direction == "both"
    assert "tilewise" in tilewise.machine()
