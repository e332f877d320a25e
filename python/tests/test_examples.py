"""Every Python example runs as it stands; the documentation's Python blocks too, and the training benchmark in its tiny form."""

import glob
import json
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXAMPLES = os.path.join(ROOT, "examples", "python")


def run(*arguments, **kwargs):
    package = os.path.dirname(os.path.dirname(os.path.abspath(__import__("tilewise").__file__)))
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, **kwargs)


def test_quickstart():
    done = run(os.path.join(EXAMPLES, "quickstart.py"))
    assert done.returncode == 0, done.stderr
    assert "kernel" in done.stdout and "o (2, 1024, 8, 64) lse (2, 8, 1024)" in done.stdout


def test_train_and_generate(tmp_path):
    model = str(tmp_path / "model.pt")
    done = run(os.path.join(EXAMPLES, "train_char_model.py"), "--steps", "25", "--save", model)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = re.search(r"tilewise: loss ([\d.]+) -> ([\d.]+)", done.stdout).groups()
    assert float(last) < float(first) - 0.5
    done = run(os.path.join(EXAMPLES, "generate.py"), "--model", model, "--characters", "40")
    assert done.returncode == 0 and done.stdout.startswith("Call me"), done.stdout + done.stderr


TRAINING = os.path.join(ROOT, "bench", "python", "train_gpt2.py")


def test_training_end_to_end(tmp_path):
    """The loss of Tilewise is eager's within rounding, falls, and a deterministic rerun ends in the same weights."""
    path = str(tmp_path / "report.json")
    done = run(TRAINING, "--tiny", "--output", path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.load(open(path, encoding="utf-8"))
    curves, repeat = report["curves"], report["repeat"]["Tilewise, deterministic"]
    assert {"eager", "Tilewise", "SDPA flash"} <= set(curves) and all(len(c) == 60 for c in curves.values())
    assert curves["Tilewise"][-1] < 0.75 * curves["Tilewise"][0]
    assert max(abs(a - b) for a, b in zip(curves["Tilewise"], curves["eager"])) < 1e-5 and report["equal"]
    assert repeat["identical"] and len(set(repeat["sha256"])) == 1
    assert {(row["attention"], row["checkpointing"]) for row in report["steps"]} >= {("Tilewise", False), ("Tilewise", True)}


def test_training_tells_another_attention(tmp_path):
    """A scale one percent off is no rounding; and weights that were not trained alike have another hash."""
    wrong = """
import sys; sys.path.insert(0, %r)
import train_gpt2 as t, tilewise.torch
t.ATTENTION["Tilewise"] = (lambda q, k, v: tilewise.torch.attention(q, k, v, causal=True, softmax_scale=0.2525), None)
sys.argv = ["train_gpt2.py", "--tiny", "--parts", "curves", "--output", %r]
a, b = (t.curve("Tilewise, deterministic", t.TINY, "cpu", t.batches(t.prose(), t.TINY, n, "cpu"))[1] for n in (2, 3))
assert a.weights_hash() != b.weights_hash()
sys.exit(t.main())
"""
    done = run("-c", wrong % (os.path.dirname(TRAINING), str(tmp_path / "report.json")))
    assert done.returncode == 1 and "the loss of Tilewise is not that of eager attention" in done.stdout, done.stdout + done.stderr


PAGES = sorted(glob.glob(os.path.join(ROOT, "docs", "integrations", "*.md")))
PAGES.remove(os.path.join(ROOT, "docs", "integrations", "c.md"))  # its programs are examples/c and examples/cpp
PAGES.append(os.path.join(ROOT, "docs", "numerics.md"))


@pytest.mark.parametrize("page", PAGES, ids=[os.path.basename(p) for p in PAGES])
def test_documentation(page):
    """The ```python blocks of a page, in order, as one program."""
    text = open(page, encoding="utf-8").read()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert blocks, page
    done = run("-c", "\n".join(blocks))
    assert done.returncode == 0, done.stderr
