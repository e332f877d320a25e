"""What the tests of the tilewise command share: arrays, files, attention in plain Python, and a case that runs the command."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

TILEWISE = None  # path of the command, set by main()
FORMATS = {"<f4": "f", "<f2": "e", "<f8": "d", "<i4": "i", "<i8": "q", "|b1": "B", "|u1": "B"}


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


def main():
    """Of a test program: PROGRAM PATH/TO/tilewise [unittest options]"""
    global TILEWISE
    TILEWISE = os.path.abspath(sys.argv.pop(1))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # memory of a GPU is then by formula, the same on every machine
    unittest.main()
