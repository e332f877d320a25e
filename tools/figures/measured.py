"""Speed and accuracy, as bench/results have them."""

import json

import numpy as np
import style
from story import RESULTS


def cpu() -> dict:
  record = json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))
  rows = []
  for result in record["results"]:
    peak = next((p["before"] + p["after"]) / 2 for p in record["peaks"] if p["isa"] == result["peak_isa"])
    beside = result.get("standard_samples")
    rows.append({"problem": result["problem"], "percent": result["percent_of_peak"],
                 "standard": beside and result["percent_of_peak"] * result["samples"]["median"] / beside["median"], "peak": peak})
  return {"rows": rows, "threads": record["threads"], "date": record["date"][:10]}


def draw_cpu(data):
  rows = data["rows"][::-1]
  figure, axes = style.panels(1, 1, 0.22 * len(rows) + 0.7)
  places = np.arange(len(rows))
  colours = [style.GREEN if row["problem"].startswith("bwd") else style.BLUE for row in rows]
  axes.barh(places, [row["percent"] for row in rows], color=colours, height=0.66)
  beside = [(place, row["standard"]) for place, row in zip(places, rows) if row["standard"]]
  axes.plot([value for _, value in beside], [place for place, _ in beside], "D", color=style.ORANGE, markersize=4.5, markeredgecolor="white",
            markeredgewidth=0.6)
  for place, row in zip(places, rows):
    axes.text(row["percent"] + 1, place, f"{row['percent']:.0f} %", va="center", fontsize=8)
  axes.set_yticks(places, [row["problem"].replace(" b=1", "") for row in rows], fontsize=8, color=style.INK)
  axes.set(xlim=(0, 100), xlabel=f"percent of the multiply-adds that {data['threads']} threads did in registers in the same run")
  axes.tick_params(axis="y", length=0)
  handles = [style.plt.Rectangle((0, 0), 1, 1, color=style.BLUE), style.plt.Rectangle((0, 0), 1, 1, color=style.GREEN),
             style.plt.Line2D([], [], color=style.ORANGE, marker="D", linestyle="")]
  figure.legend(handles, ["forward", "backward", "standard attention, forward"], loc="outside upper right", ncols=3, fontsize=8.5)
  return figure


PEERS = {"cudnn": ("cuDNN", "x--"), "flash": ("FlashAttention 2", "+:"), "fa3": ("FlashAttention 3, scaled", "d-.")}


def h200() -> dict:
  """{"forward, d 64, full": {"tilewise": {length: TFLOP/s}, "cudnn": .., "flash": .., "fa3": ..}, ..}."""
  record = json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))
  data: dict[str, dict] = {"gpu": record["gpu"]}
  for cell in record["cells"]:
    if cell["group"] != "grid" or cell["dtype"] != "bf16":
      continue
    panel = data.setdefault(f"{'forward' if cell['pass'] == 'fwd' else 'backward'}, d {cell['d']}, {'causal' if cell['causal'] else 'full'}", {})
    for name in ("tilewise", "cudnn", "flash"):
      panel.setdefault(name, {})[str(cell["sq"])] = cell["results"][name]["tflops"]
    if "fa3_tflops_scaled" in cell:
      panel.setdefault("fa3", {})[str(cell["sq"])] = cell["fa3_tflops_scaled"]
  return data


def draw_h200(data):
  figure, axes = style.panels(4, 3, 8.4, sharey=True, sharex=True)
  rows = [(name, kind) for name in ("forward", "backward") for kind in ("full", "causal")]
  for row, (name, kind) in zip(axes, rows):
    for one, d in zip(row, (64, 128, 256)):
      panel = data[f"{name}, d {d}, {kind}"]
      lines = [(p, look, style.ORANGE if p == "cudnn" else style.INK, 1.1) for p, (_, look) in PEERS.items()]
      for peer, look, colour, width in [*lines, ("tilewise", "o-", style.BLUE, 2)]:
        line = sorted((int(sq), value) for sq, value in panel.get(peer, {}).items())
        one.semilogx([sq for sq, _ in line], [value for _, value in line], look, color=colour, linewidth=width, markersize=4.5)
      one.set(title=f"{name}, {kind}, d {d}", ylim=(0, 900), xticks=[512, 1024, 2048, 4096, 8192, 16384])
      one.set_xticklabels(["512", "1k", "2k", "4k", "8k", "16k"])
      one.minorticks_off()
      one.grid(axis="y")
    row[0].set_ylabel("TFLOP/s")
  for one in axes[-1]:
    one.set_xlabel("tokens to a sequence")
  line = style.plt.Line2D
  handles = [line([], [], color=style.BLUE, marker="o", linewidth=2)]
  handles += [line([], [], color=style.ORANGE if p == "cudnn" else style.INK, marker=look[0], linestyle=look[1:], linewidth=1.1)
              for p, (_, look) in PEERS.items()]
  figure.legend(handles, ["Tilewise"] + [words for words, _ in PEERS.values()], loc="outside upper center", ncols=4, fontsize=8.5)
  return figure


def accuracy() -> dict:
  data: dict[str, dict] = {}
  for point in json.loads((RESULTS / "accuracy.json").read_text(encoding="utf-8"))["points"]:
    series = data.setdefault(point["inputs"], {}).setdefault(point["dtype"], {"sq": [], "tilewise": [], "standard": []})
    for key in series:
      series[key].append(point[key])
  return data


def draw_accuracy(data):
  figure, axes = style.panels(1, 2, 2.9, sharey=True)
  colours = {"bfloat16": style.ORANGE, "float16": style.BLUE, "float32": style.GREEN}
  titles = {"gaussian": "Gaussian inputs", "peaked": "peaked: q four times as large"}
  for one, (inputs, types) in zip(axes, data.items()):
    for name, series in types.items():
      one.loglog(series["sq"], series["standard"], "s--", color=colours[name], linewidth=1.2, markerfacecolor="white")
      one.loglog(series["sq"], series["tilewise"], "o-", color=colours[name])
    one.set(title=titles[inputs], xlabel="tokens", xticks=[64, 256, 1024, 4096], ylim=(1e-7, 5e-2))
    one.set_xticklabels(["64", "256", "1k", "4k"])
    one.minorticks_off()
    one.grid(axis="y")
  axes[0].set_ylabel("error against float64")
  line = style.plt.Line2D
  handles = [line([], [], color=colour) for colour in colours.values()]
  handles += [line([], [], color=style.INK, marker="s", linestyle="--", linewidth=1.2, markerfacecolor="white"), line([], [], color=style.INK, marker="o")]
  figure.legend(handles, [*colours, "standard attention\nin the same type", "Tilewise"], loc="outside right center", fontsize=8.5)
  return figure


def memory() -> dict:
  """Every peak that was measured, on the CPU and on a GPU, beside what was predicted for it."""
  data = {}
  for name, file, key in (("CPU, resident high-water mark", "memory_cpu.json", "checks"), ("H200, torch's allocator", "memory_gpu.json", "rows")):
    rows = json.loads((RESULTS / file).read_text(encoding="utf-8"))[key]
    data[name] = {what: [[row["predicted"], row["measured"]] for row in rows if row["what"] == what and row["predicted"] > 0]
                  for what in ("standard", "tilewise")}
  return data


def draw_memory(data):
  figure, axes = style.panels(1, 2, 3.2, sharey=True)
  for one, (title, series) in zip(axes, data.items()):
    one.loglog([2e5, 1e12], [2e5, 1e12], color=style.GRID, zorder=0)
    for what, colour, marker in (("standard", style.ORANGE, "s"), ("tilewise", style.BLUE, "o")):
      predicted, measured = np.array(series[what]).T
      one.loglog(predicted, measured, marker, color=colour, markerfacecolor="none", label="standard attention" if what == "standard" else "Tilewise")
    count = sum(len(points) for points in series.values())
    one.set(title=f"{title}: {count} peaks", xlabel="predicted", xlim=(2e5, 1e12), ylim=(2e5, 1e12))
    for axis in (one.xaxis, one.yaxis):
      axis.set_ticks([2**20, 2**30], ["1 MiB", "1 GiB"])
    one.minorticks_off()
  axes[0].set_ylabel("measured")
  axes[0].legend(loc="upper left")
  return figure


def training() -> dict:
  record = json.loads((RESULTS / "train_gpt2.json").read_text(encoding="utf-8"))
  return {"curves": record["curves"], "batch": record["model"]["batch"], "context": record["model"]["context"]}


def draw_training(data):
  curves = data["curves"]
  figure, (left, right) = style.panels(1, 2, 2.9)
  steps = range(1, len(curves["eager"]) + 1)
  left.plot(steps, curves["eager"], color=style.ORANGE, linewidth=3.2, label="eager")
  left.plot(steps, curves["Tilewise"], color=style.BLUE, linewidth=1.2, label="Tilewise")
  left.set(title="loss", xlabel=f"step of {data['batch']} x {data['context']} bytes", ylim=(2, 11.5))
  left.legend()
  left.grid(axis="y")
  looks = {"SDPA flash": (style.GREEN, "FlashAttention 2"), "eager, keys reversed": (style.YELLOW, "eager, keys reversed"),
           "Tilewise": (style.BLUE, "Tilewise")}
  for name, (colour, label) in looks.items():
    if name in curves:
      apart = [max(abs(a - b), 1e-7) for a, b in zip(curves[name], curves["eager"])]
      right.semilogy(steps, apart, color=colour, linewidth=1.2, label=label)
  right.set(title="distance of the loss from eager's", xlabel="step", ylim=(1e-6, 1e-1))
  right.minorticks_off()
  right.legend(loc="lower right")
  right.grid(axis="y")
  return figure


FIGURES = {
    "cpu": (cpu, draw_cpu),
    "h200": (h200, draw_h200),
    "accuracy": (accuracy, draw_accuracy),
    "memory_measured": (memory, draw_memory),
    "training": (training, draw_training),
}
