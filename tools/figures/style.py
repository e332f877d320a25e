"""How the book's figures look: one width, Okabe and Ito's colours, a white ground that suits dark pages too."""

import itertools

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import PathPatch
from matplotlib.path import Path

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
INK, GREY, GRID, HIDDEN = "#222222", "#666666", "#E3E3E3", "#EDEDED"
WIDTH = 8.0  # inches: 576 points, a column of text

plt.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "tilewise", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial", "sans-serif"],
    "font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "grid.color": GRID,
    "legend.frameon": False, "figure.dpi": 72, "lines.linewidth": 1.8, "lines.markersize": 5,
})


def save(figure, path, description: str) -> None:
  figure.savefig(path, metadata={"Date": None, "Creator": "tools/figures", "Description": description}, facecolor="white")
  plt.close(figure)
  text = path.read_text(encoding="utf-8")
  path.write_text("\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n", encoding="utf-8")


def squares(axes, places, colour: str, gap: float = 0.06) -> None:
  """Unit squares at (row, column), all as one path."""
  rectangles(axes, [(row + gap, column + gap, 1 - 2 * gap, 1 - 2 * gap) for row, column in places], colour)


def rectangles(axes, places, colour: str) -> None:
  """(row, column, height, width), all as one path."""
  vertices, codes = [], []
  for row, column, height, width in places:
    x, y = column + width, row + height
    vertices += [(column, row), (x, row), (x, y), (column, y), (column, row)]
    codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
  if vertices:
    axes.add_patch(PathPatch(Path(vertices, codes), facecolor=colour, edgecolor="none"))


def matrix(axes, seen, title: str, rows: str = "query i", columns: str = "key j", colour: str = BLUE) -> None:
  """A matrix of true and false: a rectangle for each run in a row, then a white grid that makes squares of them."""
  height, width = len(seen), len(seen[0])
  rectangles(axes, [(0, 0, height, width)], HIDDEN)
  runs = []
  for i, row in enumerate(seen):
    j = 0
    for key, run in itertools.groupby(row):
      count = len(list(run))
      runs += [(i, j, 1, count)] if key else []
      j += count
  rectangles(axes, runs, colour)
  lines = [[(0, i), (width, i)] for i in range(height + 1)] + [[(j, 0), (j, height)] for j in range(width + 1)]
  axes.add_patch(PathPatch(Path([point for line in lines for point in line], [Path.MOVETO, Path.LINETO] * len(lines)), facecolor="none",
                           edgecolor="white", linewidth=1.3))
  frame(axes, height, width, title, rows, columns)


def frame(axes, height, width, title, rows="query i", columns="key j") -> None:
  axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal", title=title, xticks=[], yticks=[])
  axes.set_xlabel(columns, color=GREY)
  axes.set_ylabel(rows, color=GREY)
  axes.spines[:].set_visible(False)


def panels(rows: int, columns: int, height: float, **options):
  return plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **options)


def size(count: float) -> str:
  for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= factor:
      return f"{count / factor:.3g} {unit}"
  return f"{count:.0f} B"
