"""Every Python example runs as it stands; the documentation's Python blocks too."""

import glob
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
