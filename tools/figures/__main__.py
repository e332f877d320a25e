"""Draws docs/figures/*.svg: masks from the library itself, curves from bench/results.

    TILEWISE_LIBRARY=build/src/libtilewise.so PYTHONPATH=python python tools/figures --write
    ... --check [--out FOLDER]      draws into a folder, and fails if a figure in docs/figures shows other data or is missing

Each SVG carries a digest of what it shows, so that --check compares data and not drawings, which differ by matplotlib.
Exit status 77 (skipped) without matplotlib or without a library to ask.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMMITTED = ROOT / "docs" / "figures"
LARGEST = 125_000  # bytes of a committed figure
SKIPPED = 77
DIGEST = re.compile(r"data ([0-9a-f]{16})")


def plain(data):
  """Data as JSON can write it; numbers to six digits, so that a last bit does not make another figure."""
  if isinstance(data, dict):
    return {str(key): plain(value) for key, value in data.items()}
  if isinstance(data, (list, tuple)):
    return [plain(value) for value in data]
  if hasattr(data, "tolist"):
    return plain(data.tolist())
  return float(f"{data:.6g}") if isinstance(data, float) else data


def digest(data) -> str:
  return hashlib.sha256(json.dumps(plain(data), sort_keys=True).encode()).hexdigest()[:16]


def lacking() -> str:
  names = [name for name in ("matplotlib", "numpy") if importlib.util.find_spec(name) is None]
  if names:
    return f"no {' and '.join(names)} in {sys.executable}; ./dev docs installs what tools/requirements-plot.txt lists"
  sys.path.insert(0, str(ROOT / "python"))
  try:
    import tilewise  # noqa: F401
  except (ImportError, OSError) as error:
    return f"no library: {error}"
  return ""


def main() -> int:
  parser = argparse.ArgumentParser(prog="tools/figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  mode = parser.add_mutually_exclusive_group(required=True)
  mode.add_argument("--write", action="store_true")
  mode.add_argument("--check", action="store_true")
  parser.add_argument("--out", type=pathlib.Path, help="where to draw: default docs/figures, with --check a temporary folder")
  parser.add_argument("--only", default="", help="figures whose name matches this expression")
  arguments = parser.parse_args()
  os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan for the GPU at hand would differ by a few bytes
  if reason := lacking():
    print(f"SKIPPED: {reason}")
    return SKIPPED
  import masks
  import measured
  import story
  import style

  temporary = tempfile.TemporaryDirectory()
  out = arguments.out or (COMMITTED if arguments.write else pathlib.Path(temporary.name))
  out.mkdir(parents=True, exist_ok=True)
  wrong = []
  figures = {**masks.FIGURES, **story.FIGURES, **measured.FIGURES}
  for name, (data_of, draw) in figures.items():
    if not re.search(arguments.only, name):
      continue
    data = data_of()
    path = out / f"{name}.svg"
    style.save(draw(data), path, f"data {digest(data)}")
    if path.stat().st_size > LARGEST:
      wrong.append(f"{name}.svg: {path.stat().st_size} bytes, at most {LARGEST}")
    committed = COMMITTED / path.name
    if not committed.exists():
      wrong.append(f"docs/figures/{path.name} is missing")
    elif DIGEST.search(committed.read_text(encoding="utf-8")).group(1) != digest(data):
      wrong.append(f"docs/figures/{path.name} shows other data than there are now")
  if not arguments.only:
    wrong += [f"docs/figures/{path.name}: no script draws it" for path in COMMITTED.glob("*.svg") if path.stem not in figures]
  done = f"{len(figures)} figures, {'all current' if arguments.check else f'in {out}'}"
  print("\n".join(wrong) + "\nrun: ./dev docs --figures" if wrong else done)
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
