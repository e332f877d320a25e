#!/usr/bin/env python3
"""Draws time and memory against sequence length from a JSON file, as SVG and PNG.

    tools/plot_demo.py results.json [--out demo]      writes demo.svg and demo.png (default: beside the JSON file)

    {
      "title":   "Forward pass, float32, 8 heads, head_dim 64",
      "machine": "2 cores of ...",
      "points": [
        {"seqlen": 512, "time_ms": {"standard": 1.9, "tilewise": 0.8}, "memory_mib": {"standard": 16, "tilewise": 0.2}},
        {"seqlen": 65536, "time_ms": {"tilewise": 9000}, "memory_mib": {"standard": 262144, "tilewise": 0.2},
         "predicted": {"memory_mib": ["standard"]}}
      ]
    }

A series may be absent from a point. A value that was not measured but follows from a formula is named under
"predicted"; it is drawn hollow and dashed. "predicted": true on a point stands for all of its values,
"predicted": ["standard"] for both panels of one series, and {"memory_mib": ["standard"]} for one panel. A value may
also carry the flag itself: {"value": 262144, "predicted": true}.
"""

import argparse
import json
import math
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

# Okabe and Ito's colours, which stay apart under all common forms of colour blindness; the markers differ as well.
KNOWN_STYLES = {"tilewise": ("#0072B2", "o"), "standard": ("#D55E00", "s")}
OTHER_STYLES = [("#009E73", "^"), ("#CC79A7", "D"), ("#56B4E9", "v"), ("#000000", "P")]
INK, GREY, GRID = "#222222", "#666666", "#E3E3E3"
DASHES = (0, (4, 2.5))
PANELS = [("time_ms", "time", "ms", "Time"), ("memory_mib", "memory", "MiB", "Memory above inputs and outputs")]


def read_value(point: dict, panel: str, name: str) -> tuple[float, bool] | None:
  """The value of a series in a panel at a point and whether it was predicted; None if it is missing."""
  value = point.get(panel, {}).get(name)
  predicted = point.get("predicted", False)
  if isinstance(predicted, dict):
    predicted = predicted.get(panel, False)
  if isinstance(predicted, list):
    predicted = name in predicted
  if isinstance(value, dict):
    predicted = value.get("predicted", predicted)
    value = value.get("value")
  if value is None:
    return None
  if not isinstance(value, (int, float)) or not value > 0:
    sys.exit(f"plot_demo: {panel} of {name} at seqlen {point['seqlen']}: {value!r} is not a number above 0")
  return float(value), bool(predicted)


def read_series(points: list[dict], panel: str) -> dict[str, list[tuple[float, float, bool]]]:
  """{name: [(seqlen, value, predicted), ...]} in the order in which the names first appear."""
  series = {}
  for point in sorted(points, key=lambda p: p["seqlen"]):
    for name in point.get(panel, {}):
      entry = read_value(point, panel, name)
      if entry is not None:
        series.setdefault(name, []).append((point["seqlen"], *entry))
  return series


def format_number(x: float) -> str:
  """Three significant digits without an exponent; thousands are grouped."""
  if x >= 100:
    return f"{x:,.0f}"
  return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}".rstrip("0").rstrip(".") if x < 1 else f"{x:.3g}"


def format_quantity(x: float, unit: str) -> str:
  for small, large, factor in (("ms", "s", 1000), ("MiB", "GiB", 1024)):
    if unit == small and x >= factor:
      return f"{format_number(x / factor)} {large}"
  return f"{format_number(x)} {unit}"


def format_tick(x: float, _) -> str:
  return f"{x:,.0f}" if x >= 1 else f"{x:g}"


def format_seqlen(n: float, _=None) -> str:
  n = int(n)
  return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n}"


def spread(positions: list[float], gap: float) -> list[float]:
  """Moves label positions in [0, 1] apart to at least `gap`, as little as possible and in their order."""
  order = sorted(range(len(positions)), key=lambda i: positions[i])
  clusters = []  # [centre, [indices]]
  for i in order:
    clusters.append([positions[i], [i]])
    while len(clusters) > 1 and (clusters[-1][0] - clusters[-2][0] <
                                 gap * (len(clusters[-1][1]) + len(clusters[-2][1])) / 2):
      upper, lower = clusters.pop(), clusters.pop()
      members = lower[1] + upper[1]
      clusters.append([sum(positions[j] for j in members) / len(members), members])
  result = list(positions)
  for centre, members in clusters:
    half = gap * len(members) / 2
    centre = max(min(centre, 1.05 - half), half - 0.05)
    for rank, i in enumerate(members):
      result[i] = centre + gap * (rank - (len(members) - 1) / 2)
  return result


def draw_series(ax, entries: list[tuple[float, float, bool]], colour: str, marker: str, zorder: int) -> None:
  for (x0, y0, predicted0), (x1, y1, predicted1) in zip(entries, entries[1:]):
    line_style = DASHES if predicted0 or predicted1 else "-"  # solid only between two measured points
    ax.plot([x0, x1], [y0, y1], color=colour, lw=2.2, ls=line_style, solid_capstyle="round", zorder=zorder)
  for x, y, predicted in entries:
    ax.plot([x], [y], marker=marker, ms=6, mfc="white" if predicted else colour, mec=colour, mew=1.6, ls="none",
            zorder=zorder)


def draw_panel(ax, points: list[dict], panel: tuple[str, str, str, str], styles: dict) -> bool:
  key, quantity, unit, title = panel
  series = read_series(points, key)
  ax.set_xscale("log", base=2)
  ax.set_yscale("log")
  for name, entries in series.items():
    draw_series(ax, entries, *styles[name], zorder=4 if name == "tilewise" else 3)

  values = [value for entries in series.values() for _, value, _ in entries]
  low, high = min(values), max(values)
  margin = max((high / low) ** 0.06, 1.25)
  ax.set_ylim(low / margin, high * margin)
  seqlens = sorted({point["seqlen"] for point in points})
  step = math.ceil(len(seqlens) / 8)  # at most 8 labels fit side by side
  ax.xaxis.set_major_locator(FixedLocator(seqlens[::-1][::step][::-1]))
  ax.xaxis.set_minor_locator(NullLocator())
  ax.xaxis.set_major_formatter(FuncFormatter(format_seqlen))
  ax.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
  ax.yaxis.set_minor_formatter(NullFormatter())
  ax.yaxis.set_minor_locator(NullLocator())
  ax.yaxis.set_major_formatter(FuncFormatter(format_tick))
  ax.set_xlim(seqlens[0] / 1.15, seqlens[-1] * 1.1)

  # Name and last value at the right end of each line, kept apart by two lines of text.
  bottom, top = (math.log10(v) for v in ax.get_ylim())
  wanted = [(math.log10(entries[-1][1]) - bottom) / (top - bottom) for entries in series.values()]
  for (name, entries), y in zip(series.items(), spread(wanted, gap=0.135)):
    x_end, value, predicted = entries[-1]
    at_end = x_end == seqlens[-1]
    text = f"{name}\n{format_quantity(value, unit)}" + (" (predicted)" if predicted else "")
    if not at_end:
      text += f" at {format_seqlen(x_end)}"
    x_label = (math.log(x_end) - math.log(ax.get_xlim()[0])) / (math.log(ax.get_xlim()[1]) - math.log(ax.get_xlim()[0]))
    ax.text(1.015 if at_end else x_label, y if at_end else y + 0.035, text, transform=ax.transAxes,
            color=styles[name][0], fontsize=10.5, fontweight="bold", linespacing=1.15,
            ha="left" if at_end else "right", va="center" if at_end else "bottom", clip_on=False)

  ax.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
  ax.set_xlabel("sequence length (tokens)", fontsize=11, color=INK)
  ax.set_ylabel(f"{quantity} ({unit})", fontsize=11, color=INK)
  ax.grid(True, which="major", color=GRID, lw=0.8)
  ax.set_axisbelow(True)
  ax.tick_params(length=0, labelsize=10, colors=INK)
  for side in ("top", "right"):
    ax.spines[side].set_visible(False)
  for side in ("left", "bottom"):
    ax.spines[side].set_color("#999999")
  return any(predicted for entries in series.values() for _, _, predicted in entries)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("json", type=pathlib.Path)
  parser.add_argument("--out", type=pathlib.Path, help="path without suffix")
  args = parser.parse_args()
  data = json.loads(args.json.read_text(encoding="utf-8"))
  stem = args.out or args.json.with_suffix("")

  names = list(dict.fromkeys(name for point in data["points"] for panel in PANELS for name in point.get(panel[0], {})))
  others = iter(OTHER_STYLES)
  styles = {name: KNOWN_STYLES.get(name) or next(others) for name in names}

  plt.rcParams.update({"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "tilewise"})
  figure, axes = plt.subplots(1, 2, figsize=(13.2, 5.4))
  figure.subplots_adjust(left=0.065, right=0.865, top=0.80, bottom=0.20, wspace=0.56)
  drawn = [draw_panel(ax, data["points"], panel, styles) for ax, panel in zip(axes, PANELS)]
  figure.text(0.065, 0.935, data["title"], fontsize=16, fontweight="bold", color=INK, va="center")
  figure.text(0.065, 0.884, data.get("machine", ""), fontsize=10.5, color=GREY, va="center")

  handles = [Line2D([], [], color=GREY, lw=2.2, marker="o", ms=6, label="measured")]
  if any(drawn):
    handles.append(Line2D([], [], color=GREY, lw=2.2, ls=DASHES, marker="o", ms=6, mfc="white", mec=GREY, mew=1.6,
                          label="predicted by formula, not run"))
  figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.056, 0.012), ncol=2, frameon=False, fontsize=10.5,
                labelcolor=INK, handlelength=3.2)
  for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 160})):
    path = stem.with_name(stem.name + suffix)
    figure.savefig(path, facecolor="white", **options)
    print(path)


if __name__ == "__main__":
  main()
