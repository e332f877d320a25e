#!/usr/bin/env python3
"""Runs the tilewise command on files made here. Needs the standard library alone.

cli_test.py PATH/TO/tilewise [unittest options]
"""

import collections
import html.parser
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

TILEWISE = None
REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FORMATS = {"<f4": "f", "<f2": "e", "<f8": "d", "<i4": "i", "<i8": "q", "|b1": "B", "|u1": "B"}


SANITIZED = os.environ.get("TILEWISE_SANITIZE", "") != ""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class WellFormed(html.parser.HTMLParser):
    """Every element closed in its turn, and nothing loaded from elsewhere."""

    VOID = {"meta", "link", "img", "br", "hr", "input"}

    def __init__(self):
        super().__init__()
        self.open, self.foreign, self.count = [], [], collections.Counter()

    def handle_starttag(self, tag, attributes):
        self.count[tag] += 1
        self.foreign += [value for name, value in attributes if name in ("src", "href") or "url(" in (value or "")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.count[tag] += 1

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open, self.getpos())
        self.open.pop()


class Array:
    """Values in C order."""

    def __init__(self, shape, values):
        self.shape, self.values = tuple(shape), list(values)

    def at(self, *index):
        flat = 0
        for size, i in zip(self.shape, index):
            flat = flat * size + i
        return self.values[flat]


def gaussian(shape, seed, rounding="<f4"):
    generator = random.Random(seed)
    count = math.prod(shape)
    packed = struct.pack(f"<{count}{FORMATS[rounding]}", *(generator.gauss(0, 1) for _ in range(count)))
    return Array(shape, struct.unpack(f"<{count}{FORMATS[rounding]}", packed))


def npy_bytes(array, descr="<f4", fortran=False):
    shape, values = array.shape, array.values
    if fortran:
        strides = [math.prod(shape[:n]) for n in range(len(shape))]
        reordered = [0] * len(values)
        for flat in range(len(values)):
            rest, at = flat, 0
            for size, stride in zip(reversed(shape), reversed(strides)):
                at += rest % size * stride
                rest //= size
            reordered[at] = values[flat]
        values = reordered
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    data = struct.pack(f"<{len(values)}{FORMATS[descr]}", *values)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def read_npy(path):
    with open(path, "rb") as file:
        data = file.read()
    assert data[:8] == b"\x93NUMPY\x01\x00", path
    length = struct.unpack("<H", data[8:10])[0]
    header = eval(data[10 : 10 + length].decode())  # our own output
    assert (10 + length) % 64 == 0 and not header["fortran_order"] and header["descr"] == "<f4", header
    count = math.prod(header["shape"])
    assert len(data) == 10 + length + 4 * count
    return Array(header["shape"], struct.unpack(f"<{count}f", data[10 + length :]))


def safetensors_bytes(tensors):
    """{name: (dtype, shape, bytes)}"""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def attention(
    q, k, v, dout=None, causal=False, window=(-1, -1), scale=None, softcap=0, bias=None, slopes=None, sink=None
):
    """o, lse and the gradients of dense q, k, v, as the contract says, in Python's floats."""
    batch, sq, hq, d = q.shape
    sk, hk, dv = k.shape[1], k.shape[2], v.shape[3]
    scale = 1 / math.sqrt(d) if scale is None else scale
    out = {
        "o": Array((batch, sq, hq, dv), [0.0] * (batch * sq * hq * dv)),
        "lse": Array((batch, hq, sq), [-math.inf] * (batch * hq * sq)),
    }
    gradients = {
        "dq": Array(q.shape, [0.0] * len(q.values)),
        "dk": Array(k.shape, [0.0] * len(k.values)),
        "dv": Array(v.shape, [0.0] * len(v.values)),
    }
    if bias:
        gradients["dbias"] = Array(bias.shape, [0.0] * len(bias.values))
    if slopes:
        gradients["dalibi"] = Array(slopes.shape, [0.0] * len(slopes.values))
    if sink:
        gradients["dsink"] = Array(sink.shape, [0.0] * len(sink.values))

    def add(name, index, value):
        array, flat = gradients[name], 0
        for size, i in zip(array.shape, index):
            flat = flat * size + (0 if size == 1 else i)
        array.values[flat] += value

    for b in range(batch):
        for h in range(hq):
            g = h * hk // hq
            for i in range(sq):
                seen, logits, caps = [], [], []
                for j in range(sk):
                    at = i + sk - sq
                    if (
                        causal
                        and j > at
                        or window[0] >= 0
                        and j < at - window[0]
                        or window[1] >= 0
                        and j > at + window[1]
                    ):
                        continue
                    s = scale * sum(q.at(b, i, h, c) * k.at(b, j, g, c) for c in range(d))
                    cap = 1.0
                    if softcap:
                        s, cap = softcap * math.tanh(s / softcap), 1 - math.tanh(s / softcap) ** 2
                    if slopes:
                        s -= slopes.at(h) * abs(at - j)
                    if bias:
                        s += bias.at(*(0 if size == 1 else x for size, x in zip(bias.shape, (b, h, i, j))))
                    seen.append(j), logits.append(s), caps.append(cap)
                everything = logits + ([sink.at(h)] if sink else [])
                if not everything:
                    continue
                top = max(everything)
                lse = top + math.log(sum(math.exp(s - top) for s in everything))
                out["lse"].values[(b * hq + h) * sq + i] = lse
                p = [math.exp(s - lse) for s in logits]
                o = [sum(pj * v.at(b, j, g, c) for pj, j in zip(p, seen)) for c in range(dv)]
                first = ((b * sq + i) * hq + h) * dv
                out["o"].values[first : first + dv] = o
                if not dout:
                    continue
                do = [dout.at(b, i, h, c) for c in range(dv)]
                delta = sum(x * y for x, y in zip(do, o))
                if sink:
                    add("dsink", (h,), -math.exp(sink.at(h) - lse) * delta)
                for pj, j, cap in zip(p, seen, caps):
                    ds = pj * (sum(do[c] * v.at(b, j, g, c) for c in range(dv)) - delta)
                    if bias:
                        add("dbias", (b, h, i, j), ds)
                    if slopes:
                        add("dalibi", (h,), -abs(i + sk - sq - j) * ds)
                    for c in range(d):
                        add("dq", (b, i, h, c), scale * cap * ds * k.at(b, j, g, c))
                        add("dk", (b, j, g, c), scale * cap * ds * q.at(b, i, h, c))
                    for c in range(dv):
                        add("dv", (b, j, g, c), pj * do[c])
    return {**out, **gradients} if dout else out


class Case(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.out = self.path("out")

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def npy(self, name, array, descr="<f4", fortran=False):
        return self.write(name + ".npy", npy_bytes(array, descr, fortran))

    def tilewise(self, *arguments, **options):
        return subprocess.run(
            [TILEWISE, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=self.folder.name,
            **options,
        )

    def good(self, *arguments):
        done = self.tilewise(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def bad(self, *arguments, words, status=2):
        """One line on stderr that holds the words, nothing on stdout, no file."""
        before = sorted(os.listdir(self.folder.name))
        done = self.tilewise(*arguments)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("tilewise"), done.stderr)
        self.assertEqual(done.stdout, "")
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertEqual(sorted(os.listdir(self.folder.name)), before)

    def qkv(self, batch=2, sq=5, sk=7, hq=4, hk=2, d=8, dv=16, rounding="<f4"):
        return (
            gaussian((batch, sq, hq, d), 1, rounding),
            gaussian((batch, sk, hk, d), 2, rounding),
            gaussian((batch, sk, hk, dv), 3, rounding),
        )

    def files(self, q, k, v, descr="<f4", fortran=False):
        return [
            "--q",
            self.npy("q", q, descr, fortran),
            "--k",
            self.npy("k", k, descr, fortran),
            "--v",
            self.npy("v", v, descr, fortran),
            "--out",
            self.out,
        ]

    def compare(self, expected, tolerance=2e-5):
        self.assertEqual(sorted(os.listdir(self.out)), sorted(name + ".npy" for name in expected))
        for name, array in expected.items():
            got = read_npy(os.path.join(self.out, name + ".npy"))
            self.assertEqual(got.shape, array.shape, name)
            for n, (x, y) in enumerate(zip(got.values, array.values)):
                if x != y:  # equal infinities
                    self.assertLessEqual(abs(x - y), tolerance * (1 + abs(y)), f"{name}[{n}]: {x}, must be {y}")


class Run(Case):
    def test_forward(self):
        q, k, v = self.qkv()
        text = self.good("run", *self.files(q, k, v))
        self.compare(attention(q, k, v))
        for word in (
            "fwd f32 b=2 hq=4 hk=2 sq=5 sk=7 d=8 dv=16",
            "kernel",
            "GFLOP/s",
            "workspace",
            "measured",
            "standard attention",
            "o.npy",
        ):
            self.assertIn(word, text)

    def test_every_option(self):
        q, k, v = self.qkv()
        do = gaussian((2, 5, 4, 16), 4)
        bias, slopes, sink = gaussian((1, 4, 1, 7), 5), Array((4,), [0.5, 0.25, 0.125, 0.0625]), gaussian((4,), 6)
        self.good(
            "run",
            *self.files(q, k, v),
            "--do",
            self.npy("do", do),
            "--window",
            "3,1",
            "--scale",
            "-0.3",
            "--softcap",
            "2.5",
            "--bias",
            self.npy("bias", bias),
            "--alibi",
            self.npy("alibi", slopes),
            "--sink",
            self.npy("sink", sink),
        )
        self.compare(
            attention(q, k, v, do, window=(3, 1), scale=-0.3, softcap=2.5, bias=bias, slopes=slopes, sink=sink), 1e-4
        )

    def test_causal_with_more_queries_than_keys(self):  # rows that see nothing: o = 0, lse = -inf
        q, k, v = self.qkv(sq=9)
        do = gaussian((2, 9, 4, 16), 4)
        self.good(
            "run", *self.files(q, k, v), "--do", self.npy("do", do), "--causal", "--deterministic", "--threads", "1"
        )
        expected = attention(q, k, v, do, causal=True)
        self.assertIn(-math.inf, expected["lse"].values)
        self.compare(expected)

    def test_fortran_order_and_dtypes(self):
        for descr, tolerance in (("<f4", 2e-5), ("<f2", 2e-3), ("<f8", 1e-6)):
            q, k, v = self.qkv(rounding=descr)
            text = self.good("run", *self.files(q, k, v, descr, fortran=True))
            self.compare(attention(q, k, v), tolerance)
            self.assertIn({"<f4": "fwd f32", "<f2": "fwd f16", "<f8": "kernel   reference"}[descr], text)

    def test_dtype_rounds_first(self):
        q, k, v = self.qkv()
        exact = self.qkv(rounding="<f2")
        self.good("run", *self.files(q, k, v), "--dtype", "f16", "--backend", "reference")
        self.compare(attention(*exact), 1e-6)  # of the rounded inputs; the difference to the others is some 1e-3
        text = self.good("run", *self.files(q, k, v, "<f8"), "--dtype", "bf16", "--json")
        self.assertTrue(json.loads(text)["passes"][0]["problem"].startswith("fwd bf16 "))
        self.compare(attention(q, k, v), 5e-2)

    def test_float64_backward(self):
        q, k, v = self.qkv(rounding="<f8")
        do = gaussian((2, 5, 4, 16), 4, "<f8")
        self.good("run", *self.files(q, k, v, "<f8"), "--do", self.npy("do", do, "<f8"))
        self.compare(attention(q, k, v, do), 1e-6)

    def test_mask_of_uint8(self):
        q, k, v = self.qkv()
        mask = Array((1, 1, 1, 7), [1, 0, 1, 1, 0, 1, 1])
        minus = Array((1, 1, 1, 7), [0.0 if x else -1e9 for x in mask.values])
        for descr in ("|u1", "|b1"):
            self.good("run", *self.files(q, k, v), "--bias", self.npy("mask", mask, descr))
            self.compare(attention(q, k, v, bias=minus))

    def test_packed_and_seqused(self):
        lengths = [3, 0, 4]
        starts = Array((4,), [0, 3, 3, 7])
        q, k, v = gaussian((8, 2, 8), 1), gaussian((7, 2, 8), 2), gaussian((7, 2, 8), 3)  # one row of q in no sequence
        for descr in ("<i4", "<i8"):
            cu = self.npy("cu", starts, descr)
            self.good("run", *self.files(q, k, v), "--cu-seqlens-q", cu, "--cu-seqlens-k", cu, "--causal")
            o, lse = Array((8, 2, 8), [0.0] * 128), Array((2, 8), [-math.inf] * 16)
            for n, length in enumerate(lengths):
                begin = starts.values[n]
                if length == 0:
                    continue
                part = [Array((1, length, 2, 8), x.values[begin * 16 : (begin + length) * 16]) for x in (q, k, v)]
                result = attention(*part, causal=True)
                o.values[begin * 16 : (begin + length) * 16] = result["o"].values
                for h in range(2):
                    lse.values[h * 8 + begin : h * 8 + begin + length] = result["lse"].values[
                        h * length : (h + 1) * length
                    ]
            self.compare({"o": o, "lse": lse})

    def test_paged(self):
        q = gaussian((1, 2, 2, 8), 1)
        k, v = gaussian((4, 3, 1, 8), 2), gaussian((4, 3, 1, 8), 3)  # 4 pages of 3 keys; pages 2, 0 in use, 5 keys
        used = [Array((1, 5, 1, 8), (x.values[48:72] + x.values[0:24])[:40]) for x in (k, v)]
        table, lengths = Array((1, 2), [2, 0]), Array((1,), [5])
        self.good(
            "run",
            *self.files(q, k, v),
            "--page-table",
            self.npy("table", table, "<i8"),
            "--seqused-k",
            self.npy("used", lengths, "<i4"),
        )
        self.compare(attention(q, *used))

    def test_safetensors(self):
        q, k, v = self.qkv()
        do = gaussian((2, 5, 4, 16), 4)
        raw = lambda array: ("F32", array.shape, struct.pack(f"<{len(array.values)}f", *array.values))
        path = self.write(
            "x.safetensors",
            safetensors_bytes({"q": raw(q), "k": raw(k), "v": raw(v), "do": raw(do), "other": ("I8", (1,), b"x")}),
        )
        self.good("run", "--tensors", path, "--out", self.out)
        self.compare(attention(q, k, v, do))

    def test_safetensors_of_bfloat16(self):
        truncated = lambda y: struct.unpack("<f", b"\0\0" + struct.pack("<f", y)[2:])[0]
        arrays = [Array(x.shape, [truncated(y) for y in x.values]) for x in self.qkv()]
        raw = lambda array: ("BF16", array.shape, b"".join(struct.pack("<f", y)[2:] for y in array.values))
        path = self.write("x.safetensors", safetensors_bytes({name: raw(x) for name, x in zip("qkv", arrays)}))
        self.assertIn("fwd bf16", self.good("run", "--tensors", path, "--out", self.out))
        self.compare(attention(*arrays), 2e-2)

    def test_dropout_is_a_function_of_seed_and_offset(self):
        q, k, v = self.qkv()

        def values(*options):
            self.good("run", *self.files(q, k, v), *options)
            return read_npy(os.path.join(self.out, "o.npy")).values

        first = values("--dropout", "0.5", "--seed", "3")
        self.assertEqual(first, values("--dropout", "0.5", "--seed", "3", "--offset", "0"))
        self.assertNotEqual(first, values("--dropout", "0.5", "--seed", "4"))
        self.assertNotEqual(first, values("--dropout", "0.5", "--seed", "3", "--offset", "1"))
        self.assertEqual(values(), values("--dropout", "0"))

    def test_kernel_by_name(self):
        q, k, v = self.qkv()
        do = self.npy("do", gaussian((2, 5, 4, 16), 4))
        for kernel in json.loads(self.good("list", "--json")):
            if not kernel["available"] or kernel["backend"] == "cuda" or "avx512bf16" in kernel["name"]:
                continue
            passes = json.loads(
                self.good("run", *self.files(q, k, v), "--do", do, "--kernel", kernel["name"], "--json")
            )["passes"]
            ran = {"forward": passes[0]["kernel"], "backward": passes[1]["kernel"]}
            for name in ran if kernel["pass"] == "both" else [kernel["pass"]]:
                self.assertEqual(ran[name], kernel["name"])

    def test_json(self):
        report = json.loads(self.good("run", *self.files(*self.qkv()), "--json"))
        self.assertEqual([os.path.basename(path) for path in report["outputs"]], ["o.npy", "lse.npy"])
        record = report["passes"][0]
        self.assertGreater(record["seconds"], 0)
        self.assertGreater(record["standard_bytes"], 0)
        self.assertGreaterEqual(record["workspace_bytes"], 0)

    def test_overwrites_whole_files_and_leaves_no_others(self):
        files = self.files(*self.qkv())
        self.good("run", *files)
        first = read_npy(os.path.join(self.out, "o.npy")).values
        self.good("run", *files, "--scale", "2")
        self.assertNotEqual(first, read_npy(os.path.join(self.out, "o.npy")).values)
        self.assertEqual(sorted(os.listdir(self.out)), ["lse.npy", "o.npy"])

    def test_full_disk(self):  # a limit on the size of files stands for it
        q, k, v = self.qkv(sq=300, dv=64)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        done = self.tilewise("run", *self.files(q, k, v), preexec_fn=limit)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn("o.npy", done.stderr)
        self.assertFalse(os.path.exists(self.out))

    def test_errors(self):
        q, k, v = self.qkv()
        good = self.files(q, k, v)
        without = lambda flag: [x for n, x in enumerate(good) if flag not in (x, good[n - 1])]
        other = lambda flag, value: without(flag) + [flag, value]
        self.bad("run", *without("--q"), words=["--q", "required"])
        self.bad("run", *without("--out"), words=["--out", "required"])
        self.bad("run", *other("--k", "missing.npy"), words=["--k", "missing.npy", "No such file"])
        self.bad("run", *other("--k", self.folder.name), words=["--k", "regular file"])
        self.bad("run", *other("--k", self.write("text.npy", b"hello")), words=["--k", "text.npy", ".npy"])
        truncated = npy_bytes(k)[:-3]
        self.bad("run", *other("--k", self.write("short.npy", truncated)), words=["--k", "short.npy", "bytes"])
        self.bad("run", *other("--k", self.write("long.npy", npy_bytes(k) + b"x")), words=["--k", "long.npy", "bytes"])
        big = npy_bytes(k).replace(b"<f4", b">f4")
        self.bad("run", *other("--k", self.write("big.npy", big)), words=["--k", "big-endian"])
        self.bad(
            "run", *other("--q", self.npy("int", Array((1, 1, 1, 8), [0] * 8), "<i4")), words=["--q", "i32", "f32"]
        )
        self.bad("run", *other("--k", self.npy("k16", k, "<f2")), words=["k:", "f16", "f32"])
        self.bad(
            "run", *other("--k", self.npy("heads", gaussian((2, 7, 3, 8), 2))), words=["num_heads_q 4", "multiple", "3"]
        )
        self.bad("run", *other("--v", self.npy("v3", gaussian((2, 6, 2, 16), 2))), words=["v:", "[2, 6, 2, 16]"])
        self.bad("run", *other("--q", self.npy("q3", gaussian((5, 4, 8), 2))), words=["q:", "cu_seqlens_q"])
        self.bad("run", *other("--q", self.npy("d0", Array((2, 5, 4, 0), []))), words=["--q", "head dimension"])
        self.bad("run", *other("--out", good[1]), words=["--out", "q.npy"])
        self.bad("run", *other("--out", os.path.join(good[1], "under")), words=["--out"])
        self.bad("run", *good, "--window", "1", words=["--window", "LEFT,RIGHT"])
        self.bad("run", *good, "--window", "1,2,3", words=["--window", "LEFT,RIGHT"])
        self.bad("run", *good, "--window", "-2,0", words=["--window", "-2", ">= -1"])
        self.bad("run", *good, "--causal", "--window", "3,3", words=["window_right 3", "causal"])
        self.bad("run", *good, "--scale", "abc", words=["--scale", "abc", "number"])
        self.bad("run", *good, "--scale", "inf", words=["--scale", "inf"])
        self.bad("run", *good, "--scale", "nan", words=["--scale", "nan"])
        self.bad("run", *good, "--softcap", "-1", words=["--softcap", "-1", ">= 0"])
        self.bad("run", *good, "--dropout", "1", words=["--dropout", "[0, 1)"])
        self.bad("run", *good, "--seed", "1", words=["--seed", "--dropout"])
        self.bad("run", *good, "--dropout", "0.5", "--seed", "-1", words=["--seed", "-1"])
        self.bad("run", *good, "--dtype", "f8", words=["--dtype", "f8", "bf16"])
        self.bad("run", *good, "--backend", "tpu", words=["--backend", "tpu", "reference"])
        self.bad("run", *good, "--kernel", "nope", words=["--kernel", "nope", "reference"])
        self.bad("run", *good, "--kernel", "backward_scalar", words=["--kernel", "backward_scalar", "--do"])
        self.bad("run", *good, "--threads", "0", words=["--threads", "0"])
        self.bad("run", *good, "--bias", self.npy("bias3", gaussian((4, 5, 7), 2)), words=["bias", "3"])
        self.bad(
            "run",
            *good,
            "--bias",
            self.npy("mask2", Array((1, 1, 1, 7), [0, 1, 2, 1, 1, 1, 1]), "|u1"),
            words=["--bias", "0 or 1"],
        )
        self.bad("run", *good, "--alibi", self.npy("slopes", gaussian((3,), 2)), words=["alibi_slopes", "[3]", "[4]"])
        self.bad("run", *good, "--seqused-k", self.npy("used", Array((2,), [7, 8]), "<i4"), words=["seqused_k", "8"])
        self.bad(
            "run",
            *good,
            "--seqused-k",
            self.npy("wide", Array((2,), [7, 1 << 31]), "<i8"),
            words=["--seqused-k", "2147483648"],
        )
        self.bad("run", *good, "--seqused-k", self.npy("float", gaussian((2,), 1)), words=["--seqused-k", "f32"])
        self.bad("run", *good, "--do", self.npy("do64", gaussian((2, 5, 4, 16), 1), "<f8"), words=["--do", "f64"])
        self.bad("run", *good, "--do", self.npy("do3", gaussian((2, 5, 4, 8), 1)), words=["dout", "[2, 5, 4, 8]"])
        self.bad(
            "run", "--tensors", "missing.safetensors", "--out", self.out, words=["--tensors", "missing.safetensors"]
        )
        empty = self.write("empty.safetensors", struct.pack("<Q", 2) + b"{}")
        self.bad("run", "--tensors", empty, "--out", self.out, words=["--tensors", '"q"'])


class Others(Case):
    def test_help(self):
        for arguments in (
            ["--help"],
            ["run", "--help"],
            ["check", "--help"],
            ["bench", "--help"],
            ["explain", "--help"],
            ["plan", "--help"],
            ["list", "--help"],
        ):
            text = self.good(*arguments)
            self.assertIn("Usage: tilewise", text)
            self.assertIn("Examples:", text)
        for word in ("Exit status", "run", "check", "bench", "explain", "plan", "list", "info"):
            self.assertIn(word, self.good("--help"))
        self.assertRegex(self.good("--version"), r"^tilewise \d+\.\d+\.\d+\n$")

    def test_list(self):
        table = json.loads(self.good("list", "--json"))
        self.assertEqual(table[-1]["name"], "reference")
        self.assertTrue(table[-1]["available"])
        text, markdown = self.good("list").splitlines(), self.good("list", "--markdown").splitlines()
        self.assertEqual(len(text), len(table) + 1)
        self.assertEqual(markdown[:2], ["| kernel | backend | pass | needs | takes |", "|---|---|---|---|---|"])
        self.assertEqual(len(markdown), len(table) + 2)
        for kernel, line, row in zip(table, text[1:], markdown[2:]):
            self.assertTrue(line.startswith(kernel["name"] + " "))
            self.assertIn(f"`{kernel['name']}`", row)

    def test_info(self):
        self.assertIn("threads", self.good("info"))

    def test_explain_and_plan(self):
        problem = "fwd f64 b=1 hq=2 sq=64 d=32 causal"
        text = self.good("explain", problem)
        self.assertTrue(text.startswith("problem " + problem + "\n"))
        for kernel in json.loads(self.good("list", "--json")):  # every refusal, and the one that takes float64
            if kernel["pass"] != "backward" and kernel["backend"] == "cpu":
                self.assertIn(kernel["name"] + ": ", text)
        self.assertIn("kernel reference\n", text)
        plan = json.loads(self.good("plan", problem, "--json"))
        self.assertEqual((plan["problem"], plan["kernel"]), (problem, "reference"))
        self.assertEqual(plan["flops"], 4 * 2 * 64 * 64 * 32 / 2)
        self.assertIn("workspace", self.good("plan", problem))

    def test_check(self):
        text = self.good(
            "check",
            "fwd f32 b=1 hq=2 sq=33 d=16 causal",
            "bwd f32 b=1 hq=2 hk=1 sq=9 d=8",
            "--input",
            "peaked",
            "--seed",
            "3",
        )
        for word in ("ok  fwd f32", "lse", "ok  bwd f32", "dq", "dk", "dv", "2 passed, 0 failed"):
            self.assertIn(word, text)

    def test_check_a_file_of_cases_with_every_kernel(self):
        cases = self.write(
            "cases.txt",
            b"# two of them\nfwd f32 b=1 hq=1 sq=3 d=8  # small\n\nfwd f32 b=1 hq=2 hk=1 sq=2 sk=5 d=8 causal\n",
        )
        text = self.good("check", "--all", "--cases", cases, "--kernel", "all")
        self.assertRegex(text, r"\d+ passed, 0 failed")
        self.assertIn("kernel reference", text)
        self.assertIn("fwd f32 b=1 hq=1 sq=3 d=8\n", text)

    def test_bench(self):
        done = self.tilewise(
            "bench",
            "fwd f32 hq=2 sq=64 d=32",
            "bwd f32 hq=2 sq=32 d=16 causal",
            "fwd f32 hq=1 sq=20 d=8 packed_q=30 packed_k=30 b=2",
            "--time",
            "0",
            "--threads",
            "1",
            "--standard",
            "--json",
            "record.json",
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for word in ("median", "GFLOP/s", "peak", "standard", "fwd f32 b=1 hq=2 sq=64 d=32"):
            self.assertIn(word, done.stdout)
        with open(self.path("record.json")) as file:
            record = json.load(file)
        self.assertEqual(len(record["results"]), 3)
        for result in record["results"]:
            samples = result["samples"]
            self.assertGreaterEqual(samples["count"], 3)
            self.assertTrue(
                0
                < samples["min"]
                <= samples["quarter"]
                <= samples["median"]
                <= samples["three_quarters"]
                <= samples["max"]
            )
            self.assertGreater(result["gflops"], 0)
            peak = next(peak for peak in record["peaks"] if peak["isa"] == result["peak_isa"])
            share = 100 * result["gflops"] / ((peak["before"] + peak["after"]) / 2)
            self.assertAlmostEqual(result["percent_of_peak"], share, delta=1e-6 * share)
        self.assertIn("standard_samples", record["results"][0])
        self.assertNotIn("standard_samples", record["results"][1])
        for key in ("version", "date", "machine", "threads", "peaks"):
            self.assertIn(key, record)

    def test_memory(self):
        text = self.good("memory", "bwd bf16 cuda b=1 hq=16 sq=16384 d=64")
        for word in ("standard", "Tilewise", "ratio", "64.2 GiB", "227.0 MiB", "saved", "peak bwd"):
            self.assertIn(word, text)
        record = json.loads(self.good("memory", "bwd bf16 cuda b=1 hq=16 sq=16384 d=64", "--format", "json"))
        self.assertEqual(record["standard"]["peak_backward"], 65696 << 20)
        self.assertEqual(record["tilewise"]["peak_backward"], 227 << 20)
        self.assertEqual(record["inputs"], 96 << 20)
        plan = json.loads(self.good("plan", "bwd f32 hq=2 sq=300 d=64", "--json", "--threads", "2"))
        record = json.loads(self.good("memory", "bwd f32 hq=2 sq=300 d=64", "--format", "json", "--threads", "2"))
        self.assertEqual(record["tilewise"]["workspace_backward"], plan["workspace_bytes"])
        self.assertEqual(record["workspace_from"], "plan")

    def test_memory_sweep(self):
        sweep = ("memory", "bwd bf16 cuda hq=16 d=64", "--sweep", "sq=512..16384", "--svg", "chart.svg")
        rows = json.loads(self.good(*sweep, "--format", "json"))
        self.assertEqual([row["standard"]["peak_backward"] >> 20 for row in rows], [69, 266, 1044, 4136, 16464, 65696])
        lines = self.good(*sweep, "--format", "csv").splitlines()
        self.assertEqual(len(lines), 7)
        self.assertEqual(len(lines[0].split(",")), len(lines[1].split(",")))
        self.assertEqual(int(lines[6].split(",")[lines[0].split(",").index("tilewise_peak_bwd")]), 227 << 20)
        self.assertEqual(self.good(*sweep, "--format", "markdown").count("\n| `bwd"), 6)
        self.assertIn("sq=16384", self.good(*sweep))
        chart = xml.etree.ElementTree.parse(self.path("chart.svg")).getroot()
        words = "".join(chart.itertext())
        for word in ("standard", "Tilewise", "64.2 GiB", "227 MiB", "16k", "sequence length"):
            self.assertIn(word, words)
        lines = chart.findall("{http://www.w3.org/2000/svg}polyline")
        self.assertEqual([len(line.get("points").split()) for line in lines], [6, 6])
        both = json.loads(self.good("memory", "bwd f32 cuda hq=16 sq=64 d=64", "--sweep", "dtype=f16,bf16", "--sweep", "d=64,128", "--format", "json"))
        self.assertEqual([row["problem"].split()[1] + row["problem"].split()[-1] for row in both], ["f16d=64", "f16d=128", "bf16d=64", "bf16d=128"])

    def test_memory_budget(self):
        fits = json.loads(self.good("memory", "--model", "llama3-8b", "--budget", "24GiB", "--format", "json"))["largest"]
        self.assertEqual(len(fits), 5)
        for fit in fits:
            self.assertGreater(fit["tilewise"], 5 * fit["standard"])
        training = fits[1]
        self.assertEqual(training["what"], "one layer, forward and backward")
        for seqlen, inside in ((training["tilewise"], True), (training["tilewise"] + 1, False)):
            record = json.loads(self.good("memory", "--model", "llama3-8b", "--seqlen", str(seqlen), "--format", "json"))
            self.assertEqual(record["tilewise"]["total"] <= 24 << 30, inside)
        self.assertIn("largest batch within 80.0 GiB", self.good("memory", "--model", "qwen3-8b", "--budget", "80GiB", "--solve", "b"))
        self.assertIn("query heads", self.good("memory", "fwd bf16 cuda hq=8 hk=2 sq=4096 d=64", "--budget", "1GB", "--solve", "hq"))

    def test_memory_of_a_configuration(self):
        llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        config = self.write("config.json", json.dumps(llama).encode())
        for more in ((), ("--layers", "all", "--checkpointing"), ("--decode", "--seqlen", "8192"), ("--tensor-parallel", "8", "--context-parallel", "2")):
            self.assertEqual(self.good("memory", "--config", config, *more), self.good("memory", "--model", "llama3-8b", *more))
        gemma = dict(llama, head_dim=256, sliding_window=4096, attn_logit_softcapping=50.0, layer_types=["sliding_attention", "full_attention"])
        config = self.write("gemma.json", json.dumps({"model_type": "gemma", "text_config": gemma}).encode())
        self.assertIn("d=256 causal softcap=50\n", self.good("memory", "--config", config))
        self.assertIn("window=4095,0", self.good("memory", "--model", "mistral-7b"))
        self.assertIn("dropout=0.1", self.good("memory", "--model", "mistral-7b", "--extra", "dropout=0.1"))
        for name in ("llama3-70b", "gpt-oss-120b", "deepseek-v3", "H200", "B200"):
            self.assertIn(name, self.good("memory", "--models"))

    def test_memory_explained(self):
        text = self.good("memory", "--model", "llama3-8b", "--seqlen", "8192", "--gpu", "RTX-4090", "--explain")
        for word in ("2 x 1 x 32 x 8192 x 8192", "P * dP", "FLOPs 1.924e+12", "traffic", "RTX-4090", "bound by bytes", "bound by arithmetic", "does not fit"):
            self.assertIn(word, text)
        self.assertIn("block", self.good("memory", "fwd f32 hq=4 sq=512 d=64", "--explain"))

    @unittest.skipIf(SANITIZED, "a sanitizer's own memory is measured too")
    def test_memory_verified(self):
        problems = ("bwd f32 hq=2 sq=1024 d=64 causal", "bwd bf16 hq=4 hk=2 sq=768 d=64 dropout=0.1", "fwd f16 b=2 hq=2 sq=1024 d=128 softcap=20", "bwd f16 hq=2 sq=512 sk=1024 d=64 window=100,50", "fwd bf16 b=2 hq=8 hk=2 sq=1 sk=1024 d=64 pages=128x16 seqused_k causal")
        record = json.loads(self.good("memory", *problems, "--verify", "--format", "json", "--threads", "2"))
        self.assertEqual((record["failed"], len(record["checks"])), (0, 4 + 4 + 2 + 4 + 1))
        for check in record["checks"]:
            self.assertLessEqual(abs(check["measured"] - check["predicted"]), 0.01 * check["predicted"] + (2 << 20), check)
            self.assertGreater(check["measured"], 0)
        large = [check for check in record["checks"] if check["predicted"] > 16 << 20]
        self.assertGreater(len(large), 5)  # where 2 MiB would not hide a wrong matrix
        self.assertIn("15 within 1 % and 2 MiB, 0 beyond", self.good("memory", *problems, "--verify"))

    def test_tune(self):
        fwd, bwd = "fwd f32 b=1 hq=2 sq=96 d=32", "bwd f32 b=1 hq=2 sq=96 d=32"
        text = self.good("tune", fwd, bwd, "--out", "my.tuning", "--json", "tune.json", "--time", "0", "--threads", "2")
        self.assertIn("my.tuning written", text)
        with open(self.path("tune.json")) as file:
            results = json.load(file)["results"]
        self.assertEqual([result["problem"] for result in results], [fwd, bwd])
        for result in results:
            self.assertGreaterEqual(result["faster"], 1)
            self.assertEqual(result["faster"] == 1, result["config"] == "")
            self.assertGreater(result["candidates"], 5)
        with open(self.path("my.tuning")) as file:
            lines = file.read().splitlines()
        self.assertEqual(lines[1], "tilewise " + self.good("--version").split()[-1])
        # A winner of our own, in the file's own head, is what the plan then does; in a file of another machine it is not.
        row = json.loads(self.good("plan", fwd, "--json"))["kernel"]
        head = "\n".join(lines[:4]) + "\n"
        entry = f"{fwd}: {row} block_m=24 block_n=64\n"
        environment = {**os.environ, "TILEWISE_TUNING": self.write("own.tuning", (head + entry).encode())}
        plan = ("plan", fwd, "--threads", "2")
        ask = lambda *words: subprocess.run([TILEWISE, *words], check=True, capture_output=True, text=True, env=environment, cwd=self.folder.name).stdout
        self.assertIn("block 24x64", ask(*plan))
        self.assertIn(", tuned", ask(*plan))
        self.assertIn(f"for this one {row} block_m=24 block_n=64", ask("explain", fwd, "--threads", "2"))
        self.assertNotIn("tuned", ask("plan", fwd, "--threads", "3"))
        self.assertIn("ok  fwd f32", ask("check", fwd, "--threads", "2"))
        self.write("own.tuning", (head.replace("machine ", "machine other ") + entry).encode())
        self.assertEqual(ask(*plan), self.good(*plan))
        self.assertIn("not used: made on", ask("explain", fwd, "--threads", "2"))
        environment["TILEWISE_TUNING"] = self.path("missing.tuning")
        self.assertEqual(ask(*plan), self.good(*plan))

    def test_tune_errors(self):
        self.bad("tune", words=["problem", "--cases"])
        self.bad("tune", "fwd f32 cuda hq=1 sq=4 d=8", words=["cuda"])
        self.bad("tune", "fwd f32 hq=1", words=["sq="])
        self.bad("tune", "fwd f32 hq=1 sq=4 d=8", "--time", "-1", words=["--time", "-1"])
        self.bad("tune", "fwd f32 hq=1 sq=4 d=8", "--out", "no/such/file", words=["--out", "no/such/file"])

    def test_report(self):
        done = self.tilewise("report", "--out", "page.html", "--time", "0", "--threads", "2")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        with open(self.path("page.html"), encoding="utf-8") as file:
            page = file.read()
        checker = WellFormed()
        checker.feed(page)
        checker.close()
        self.assertEqual(checker.open, [])
        self.assertEqual(checker.foreign, [], "the page must need nothing from elsewhere")
        self.assertEqual(checker.count["svg"], 3)
        self.assertEqual(checker.count["section"], 6)
        for word in ("forward_scalar", "reference", "float64", "GFLOP/s", "standard", "not in {f32, f16, bf16}", "Llama 3 8B"):
            self.assertIn(word, page)
        self.good("report", "--out", "page.html", "--bench", os.path.join(REPOSITORY, "bench/results/cpu.json"), "--bench", os.path.join(REPOSITORY, "bench/results/python_sdpa.json"))
        with open(self.path("page.html"), encoding="utf-8") as file:
            page = file.read()
        for word in ("python_sdpa.json", "torch SDPA over Tilewise", "of peak"):
            self.assertIn(word, page)
        self.bad("report", "--bench", "missing.json", words=["--bench", "missing.json"])
        self.bad("report", "--bench", self.write("odd.json", b"{}"), words=["--bench", "odd.json", "tilewise bench --json"])
        self.bad("report", "--out", "no/such/page.html", words=["--out", "no/such/page.html"])

    @unittest.skipUnless(BROWSER, "no Chromium here (Debian package chromium)")
    def test_report_in_a_browser(self):
        self.good("report", "--out", "page.html", "--bench", os.path.join(REPOSITORY, "bench/results/cpu.json"), "--threads", "2")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={self.path('profile')}"]
        done = subprocess.run([BROWSER, *flags, "--virtual-time-budget=2000", "--dump-dom", "file://" + self.path("page.html")],
                              capture_output=True, text=True, timeout=180)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("<svg"), 3)
        self.assertIn("</section>", done.stdout)
        done = subprocess.run([BROWSER, *flags, f"--screenshot={self.path('page.png')}", "--window-size=1100,1400", "file://" + self.path("page.html")],
                              capture_output=True, text=True, timeout=180)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(os.path.getsize(self.path("page.png")), 30000)  # a blank page has a tenth of that

    def test_memory_errors(self):
        self.bad("memory", words=["problem", "--model"])
        self.bad("memory", "fwd f32 hq=1", words=["sq="])
        self.bad("memory", "--model", "llama9", words=["--model", "llama9", "llama3-8b"])
        self.bad("memory", "--config", "missing.json", words=["--config", "missing.json"])
        self.bad("memory", "--config", self.write("list.json", b"[1]"), words=["--config", "list.json", "no JSON object"])
        self.bad("memory", "--config", self.write("no.json", b"{"), words=["--config", "no.json"])
        self.bad("memory", "--config", self.write("less.json", b'{"hidden_size": 64}'), words=["less.json", "num_hidden_layers"])
        self.bad("memory", "--config", self.write("odd.json", b'{"hidden_size": "x"}'), words=["odd.json", "hidden_size", "integer"])
        self.bad("memory", "--model", "llama3-8b", "--config", "x", words=["--model", "--config"])
        self.bad("memory", "--model", "llama3-8b", "--seqlen", "0", words=["--seqlen", "0"])
        self.bad("memory", "--model", "llama3-8b", "--budget", "lots", words=["--budget", "lots", "24GiB"])
        self.bad("memory", "--model", "llama3-8b", "--gpu", "H999", words=["--gpu", "H999", "H200"])
        self.bad("memory", "--model", "llama3-8b", "--tensor-parallel", "3", words=["tensor_parallel 3", "32"])
        self.bad("memory", "fwd f32 hq=1 sq=8 d=8", "--layers", "all", words=["--layers", "all"])
        self.bad("memory", "fwd f32 hq=1 sq=8 d=8", "--sweep", "sq", words=["--sweep", "sq", "FIRST..LAST"])
        self.bad("memory", "fwd f32 hq=1 sq=8 d=8", "--sweep", "sq=8..4", words=["--sweep", "sq=8..4"])
        self.bad("memory", "fwd bf16 cuda hq=1 sq=8 d=8", "--verify", words=["--verify", "cuda"])
        self.bad("memory", "fwd f32 cuda hq=1 sq=8 d=8", words=["f32", "f16 and bf16"])
        self.bad("memory", "fwd f32 hq=1 sq=8 d=8", "--svg", "no/such/folder.svg", words=["--svg", "no/such/folder.svg"])

    def test_errors(self):
        self.bad(words=["subcommand"])
        self.bad("frob", words=["frob", "run", "check"])
        self.bad("list", "--frob", words=["--frob"])
        self.bad("list", "--json", "--markdown", words=["--json", "--markdown"])
        self.bad("explain", words=["problem", "required"])
        self.bad("explain", "fwd", words=["fwd"])
        self.bad("plan", "fwd f32 hq=3 hk=2 sq=4 d=8", words=["num_heads_q 3", "2"])
        self.bad("plan", "fwd f32 hq=1 sq=4 d=8 frob=1", words=["frob"])
        self.bad("plan", "fwd f32 hq=1 sq=4 d=999", words=["head_dim 999", "256"])
        self.bad(
            "plan",
            "fwd f32 hq=1 sq=4 d=8",
            "--kernel",
            "backward_scalar",
            words=["backward_scalar", "a backward kernel"],
        )
        self.bad("plan", "fwd f32 hq=1 sq=4 d=8", "--kernel", "nope", words=["--kernel", "nope"])
        self.bad("check", words=["problem"])
        self.bad("check", "--all", "fwd f32 hq=1 sq=4 d=8", words=["--all"])
        self.bad("check", "fwd f32 hq=1 sq=4 d=8", "--cases", "x", words=["--cases", "--all"])
        self.bad("check", "--all", "--cases", "missing.txt", words=["--cases", "missing.txt"])
        self.bad("check", "--all", "--cases", self.write("none.txt", b"# nothing\n"), words=["--cases", "none.txt"])
        self.bad("check", "--all", "--cases", self.write("wrong.txt", b"fwd f32 hq=1\n"), words=["sq="])
        self.bad("check", "fwd f32 hq=1 sq=4 d=8", "--input", "loud", words=["--input", "loud", "gaussian"])
        self.bad("check", "fwd f32 hq=1 sq=4 d=8", "--layout", "round", words=["--layout", "round", "contiguous"])
        self.bad("check", "fwd f32 hq=1 sq=4 d=8", "--seed", "x", words=["--seed", "x"])
        self.bad("check", "fwd f32 hq=1 sq=4 d=8", "--kernel", "backward_scalar", words=["backward_scalar"])
        self.bad("check", "fwd f32 hq=3 hk=2 sq=4 d=8", words=["num_heads_q 3"])
        self.bad("bench", words=["problem", "required"])
        self.bad("bench", "fwd f32 hq=1 sq=4 d=8", "--time", "-1", words=["--time", "-1"])
        self.bad("bench", "fwd f32 cuda hq=1 sq=4 d=8", words=["cuda"])
        self.bad(
            "bench", "fwd f32 hq=1 sq=4 d=8", "--json", "no/such/folder.json", words=["--json", "no/such/folder.json"]
        )

    @unittest.skipUnless(os.path.exists("/dev/full"), "/dev/full stands for a full disk")
    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([TILEWISE, "list"], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("standard output", done.stderr)


class Documentation(Case):
    def test_the_lines_of_the_readme(self):
        os.symlink(os.path.join(REPOSITORY, "examples"), self.path("examples"))
        os.symlink(TILEWISE, self.path("tilewise"))
        with open(os.path.join(REPOSITORY, "examples", "cli", "README.md")) as file:
            blocks = file.read().split("```sh\n")[1:]
        lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
        self.assertGreater(len(lines), 5)
        environment = {**os.environ, "PATH": self.folder.name + os.pathsep + os.environ["PATH"]}
        for line in lines:
            if SANITIZED and "--verify" in line:
                continue
            done = subprocess.run(
                line, shell=True, check=False, capture_output=True, text=True, cwd=self.folder.name, env=environment
            )
            self.assertEqual(done.returncode, 0, f"{line}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    TILEWISE = os.path.abspath(sys.argv.pop(1))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # memory of a GPU is then by formula, the same on every machine
    unittest.main()
