#!/usr/bin/env python3
"""tilewise run, on files made here. Needs the standard library alone.

run_test.py PATH/TO/tilewise [unittest options]
"""

import json
import math
import os
import resource
import signal
import struct

import support
from support import Array, Case, attention, gaussian, npy_bytes, read_npy, safetensors_bytes


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


if __name__ == "__main__":
    support.main()
