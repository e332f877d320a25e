#!/usr/bin/env python3
"""The tilewise commands beside run, and the documented lines. Needs the standard library alone.

commands_test.py PATH/TO/tilewise [unittest options]
"""

import collections
import html.parser
import json
import os
import shutil
import subprocess
import unittest
import xml.etree.ElementTree

import support
from support import Case

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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


class Commands(Case):
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
        self.assertIn("24 layers, 12 of them with a window of 128", self.good("memory", "--model", "gpt-oss-20b", "--decode", "--layers", "all"))
        self.assertIn("24 layers, forward (12 keep 128 tokens)", self.good("memory", "--model", "gpt-oss-20b", "--budget", "24GiB"))
        for more, full in (({"model_type": "gemma2"}, 16), ({"sliding_window_pattern": 4}, 8), ({"max_window_layers": 28}, 28), ({"use_sliding_window": False}, 32)):
            config = self.write("windows.json", json.dumps(dict(llama, sliding_window=1024, **more)).encode())
            text = self.good("memory", "--config", config, "--decode", "--layers", "all")
            self.assertEqual(f"{32 - full} of them with a window of 1024" in text, full < 32, text)
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
        ask = lambda *words: subprocess.run([support.TILEWISE, *words], check=True, capture_output=True, text=True, env=environment, cwd=self.folder.name).stdout
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
        self.bad("tune", "fwd f32 hq=1 sq=4 d=8", "fwd bf16 cuda hq=1 sq=4 d=8", words=["cuda hq=1 sq=4", "is of a GPU: no GPU to run on: "])
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
        self.bad("memory", "fwd bf16 cuda hq=1 sq=8 d=8", "--verify", words=["--verify", "cuda b=1 hq=1", "is of a GPU: no GPU to run on: "])
        self.bad("memory", "fwd f64 cuda hq=1 sq=8 d=8", words=["f64", "f16, bf16 and f32"])
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
            done = subprocess.run([support.TILEWISE, "list"], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("standard output", done.stderr)


class Documentation(Case):
    def test_the_lines_of_the_readme(self):
        os.symlink(os.path.join(REPOSITORY, "examples"), self.path("examples"))
        os.symlink(support.TILEWISE, self.path("tilewise"))
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
    support.main()
