#!/usr/bin/env python3
"""Draws the figures of docs/: masks out of the library itself, memory and speed out of bench/results.

    tools/draw_docs.py --library build/src/libtilewise.so --tilewise build/src/cli/tilewise          writes docs/figures/*.svg
    tools/draw_docs.py ... --check      exit status 1 if one is not current, 77 without NumPy

A mask is drawn from what attention does: with q = 0 each row weighs the keys that it sees alike, so with V = I the output's
positive columns are those keys. Needs NumPy for that.
"""

import argparse
import html
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
INK, GREY, LINE, RED, BLUE, PALE = "#222222", "#6b6b6b", "#d9d9d9", "#c2410c", "#0b6e99", "#f4f4f1"
FONT = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def document(width: float, height: float, title: str, body: str) -> str:
  return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
          f'font-family="{FONT}">\n<title>{html.escape(title)}</title>\n<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{body}</svg>\n')


def words(x: float, y: float, text: str, size: float = 14, colour: str = INK, anchor: str = "start",
    weight: str = "400") -> str:
  return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{html.escape(text)}</text>\n'


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = "none") -> str:
  return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{stroke}"/>\n'


# ---- masks --------------------------------------------------------------------------------------------------


def seen(tilewise, numpy, sq: int, sk: int, **options) -> list[list[bool]]:
  """Who sees whom, [sq][sk], of one sequence and head."""
  q = numpy.zeros((1, sq, 1, 8), numpy.float32)
  k = numpy.zeros((1, sk, 1, 8), numpy.float32)
  v = numpy.eye(sk, dtype=numpy.float32).reshape(1, sk, 1, sk)
  return (tilewise.attention(q, k, v, **options)[0, :, 0] > 0).tolist()


def seen_packed(tilewise, numpy, lengths: list[int], **options) -> list[list[bool]]:
  total = sum(lengths)
  starts = numpy.cumsum([0, *lengths]).astype(numpy.int32)
  zeros = numpy.zeros((total, 1, 8), numpy.float32)
  v = numpy.eye(total, dtype=numpy.float32).reshape(total, 1, total)
  o = tilewise.attention_varlen(zeros, zeros, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **options)
  return (o[:, 0] > 0).tolist()


def mask_picture(title: str, note: str, rows: list[list[bool]], lines: list[int] = ()) -> str:
  cell, left, top = 17, 46, 66
  sq, sk = len(rows), len(rows[0])
  body = words(12, 26, title, 16, weight="700") + words(12, 46, note, 13, GREY)
  for i, row in enumerate(rows):
    for j, visible in enumerate(row):
      body += box(left + j * cell, top + i * cell, cell - 1.5, cell - 1.5, BLUE if visible else PALE)
  for at in lines:
    x, y = left + at * cell - 0.75, top + at * cell - 0.75
    path = f"M{x:g} {top - 4}V{top + sq * cell + 2}M{left - 4} {y:g}H{left + sk * cell + 2}"
    body += f'<path d="{path}" stroke="{RED}" fill="none"/>\n'
  body += words(left + sk * cell / 2, top + sq * cell + 20, "keys j", 13, GREY, "middle")
  body += f'<text transform="translate(26 {top + sq * cell / 2:g}) rotate(-90)" font-size="13" fill="{GREY}" text-anchor="middle">queries i</text>\n'
  width = max(left + sk * cell + 14, 12 + 7.2 * max(len(note), len(title) * 1.42))
  return document(width, top + sq * cell + 32, title, body)


def masks(library: str) -> dict[str, str]:
  os.environ["TILEWISE_LIBRARY"] = library
  sys.path.insert(0, str(ROOT / "python"))
  import numpy
  import tilewise

  one = lambda *shape, **options: seen(tilewise, numpy, *shape, **options)  # noqa: E731
  allowed = numpy.zeros((1, 1, 10, 10), bool)
  for i in range(10):
    allowed[0, 0, i, [0, 1, i]] = True
  allowed[0, 0, :2] = True
  # (title, note, rows, lines)
  pictures = {
    "full": ("full", "every query sees every key", one(10, 10)),
    "causal": ("causal", "j <= i", one(10, 10, causal=True)),
    "causal_longer_keys": ("causal, 6 queries, 10 keys", "bottom-right: j <= i + sk - sq", one(6, 10, causal=True)),
    "causal_fewer_keys": ("causal, 10 queries, 6 keys", "the first 4 rows see none: o = 0, lse = -inf", one(10, 6,
        causal=True)),
    "window": ("window (2, 1)", "2 keys back, 1 ahead", one(10, 10, window=(2, 1))),
    "window_causal": ("causal, window (3, 0)", "a token and the 3 before it", one(10, 10, causal=True, window=(3, 0))),
    "window_longer_keys": ("window (2, 0), 6 queries, 10 keys", "aligned at the bottom right", one(6, 10, window=(2, 0))),
    "packed": ("packed: lengths 3, 5, 4, causal", "each sequence by itself", seen_packed(tilewise, numpy, [3, 5, 4],
        causal=True), [3, 8]),
    "boolean": ("boolean mask", "any pattern: here global tokens", one(10, 10, bias=allowed)),
  }
  return {f"mask_{name}": mask_picture(*picture) for name, picture in pictures.items()}


# ---- figures of the story -----------------------------------------------------------------------------------


def passes() -> str:
  """Numbers read and written per logit of a row that does not fit the fast memory, by the programs of examples/ladder."""
  rows = [("naive", "sum of exp(x), then divide: overflows", 2, 1), ("safe", "maximum, sum, divide", 3, 1), ("online",
      "maximum and sum together, divide", 2, 1),
          ("inside attention", "nothing is written at all: O is rescaled", 0, 0)]
  body = words(24, 36, "Softmax and its traffic", 20, weight="700") + words(24, 60,
      "passes over a row that does not fit the fast memory", 14, GREY)
  unit, left = 92, 300
  for n, (name, what, reads, writes) in enumerate(rows):
    y = 92 + 58 * n
    body += words(24, y + 16, name, 15, weight="700") + words(24, y + 34, what, 12.5, GREY)
    for part in range(reads + writes):
      colour = BLUE if part < reads else RED
      body += box(left + part * unit, y, unit - 4, 30, colour) + words(left + part * unit + unit / 2 - 2, y + 20,
          "read" if part < reads else "write", 13, "#ffffff", "middle")
    if reads + writes == 0:
      body += words(left, y + 20, "0", 15, BLUE, weight="700")
  return document(700, 330, "Softmax and its traffic", body)


def tiles() -> str:
  body = words(24, 36, "One block of scores at a time", 20, weight="700") + words(24, 60,
      "S and P exist for block_m x block_n pairs only; O, maximum and sum of the rows go along", 14, GREY)
  cell, left, top = 40, 120, 100
  for i in range(6):
    for j in range(8):
      now, done = (i, j) == (2, 4), i < 2 or (i == 2 and j < 4)
      body += box(left + j * cell, top + i * cell, cell - 2, cell - 2, RED if now else "#cfe4ee" if done else PALE)
  body += box(left, top - 26, 8 * cell - 2, 18, PALE, LINE) + box(left + 4 * cell, top - 26, cell - 2, 18,
      BLUE) + words(left - 12, top - 12, "K, V", 14, GREY, "end")
  body += box(left - 26, top, 18, 6 * cell - 2, PALE, LINE) + box(left - 26, top + 2 * cell, 18, cell - 2,
      BLUE) + words(left - 38, top + 2.6 * cell, "Q", 14, GREY, "end")
  body += box(left + 8 * cell + 12, top, 18, 6 * cell - 2, PALE, LINE) + box(left + 8 * cell + 12, top + 2 * cell, 18,
      cell - 2, RED)
  body += words(left + 8 * cell + 40, top + 2.45 * cell, "O, max, sum", 14, GREY) + words(left + 8 * cell + 40, top
      + 2.9 * cell, "of one block", 14, GREY)
  body += words(left + 4.5 * cell, top + 2.65 * cell, "S, P", 13, "#ffffff", "middle", "700")
  return document(760, top + 6 * cell + 24, "One block of scores at a time", body)


def bars(title: str, note: str, rows: list[tuple[str, float, str, str]], unit_label: str) -> str:
  """Horizontal bars: (name, value, text, colour)."""
  most, left, width = max(value for _, value, _, _ in rows), 380, 330
  body = words(24, 36, title, 20, weight="700") + words(24, 60, note, 13.5, GREY)
  for n, (name, value, text, colour) in enumerate(rows):
    y = 84 + 27 * n
    body += words(left - 10, y + 15, name, 13, INK, "end") + box(left, y, max(width * value / most, 1), 20,
        colour) + words(left + width * value / most + 8, y + 15, text, 13, GREY)
  return document(800, 84 + 27 * len(rows) + 34, title, body + words(left, 84 + 27 * len(rows) + 18, unit_label, 12.5, GREY))


def measured_memory() -> str:
  record = json.loads((ROOT / "bench/results/memory_cpu.json").read_text(encoding="utf-8"))
  problems, rows = [], []
  for check in record["checks"]:
    if check["problem"] not in problems:
      problems.append(check["problem"])
  for problem in problems:
    found = {c["what"]: c["measured"] / 2**20 for c in record["checks"] if c["problem"] == problem and c["pass"] == "backward"}
    if len(found) == 2 and len(rows) < 16:
      rows += [(problem, found["standard"], f"{found['standard']:,.0f} MiB", RED), ("", found["tilewise"],
          f"{found['tilewise']:,.0f} MiB", BLUE)]
  return bars("Measured on a CPU, forward and backward",
      "high-water mark above q, k, v; standard attention above, Tilewise below", rows, "bench/results/memory_cpu.json")


def measured_speed() -> str:
  record = json.loads((ROOT / "bench/results/cpu.json").read_text(encoding="utf-8"))
  rows = []
  for result in record["results"]:
    if "standard_samples" in result:
      ratio = result["standard_samples"]["median"] / result["samples"]["median"]
      if ratio < 10:
        rows.append((result["problem"], ratio, f"{ratio:.1f}x", BLUE))
  return bars("Time of standard attention over Tilewise's",
      "float32, blocked matrix products, scores in memory; the same machine in turns", rows, "bench/results/cpu.json")


def memory_chart(tool: str, out: pathlib.Path) -> str:
  path = out / "memory.svg.new"
  environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
  subprocess.run([tool, "memory", "bwd bf16 cuda hq=16 d=64", "--sweep", "sq=512..131072", "--svg", str(path)], check=True,
      capture_output=True, env=environment)
  text = path.read_text(encoding="utf-8")
  path.unlink()
  return text


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--library", required=True)
  parser.add_argument("--tilewise", required=True)
  parser.add_argument("--check", action="store_true")
  arguments = parser.parse_args()
  FIGURES.mkdir(exist_ok=True)
  try:
    import numpy  # noqa: F401
  except ImportError:
    print("draw_docs: the masks need NumPy")
    return 77
  drawn = {**masks(str(pathlib.Path(arguments.library).resolve())), "passes": passes(), "tiles": tiles(),
      "measured_memory": measured_memory(),
           "measured_speed": measured_speed(), "memory": memory_chart(str(pathlib.Path(arguments.tilewise).resolve()), FIGURES)}
  stale = [name for name, text in drawn.items()
           if not (FIGURES / f"{name}.svg").exists() or (FIGURES / f"{name}.svg").read_text(encoding="utf-8") != text]
  if arguments.check:
    print("\n".join(f"docs/figures/{name}.svg is not current: run tools/draw_docs.py" for name in stale) or f"{len(drawn)} figures, all current")
    return 1 if stale else 0
  for name in stale:
    (FIGURES / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
  print(f"{len(drawn)} figures, {len(stale)} drawn anew")
  return 0


if __name__ == "__main__":
  sys.exit(main())
