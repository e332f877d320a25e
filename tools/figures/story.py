"""The pictures of chapter 1: the online softmax at work, memory by length, the levels of memory, the roofline."""

import json
import pathlib

import numpy as np
import style
import tilewise

RESULTS = pathlib.Path(__file__).resolve().parent.parent.parent / "bench" / "results"


def online() -> dict:
  """One row of 32 logits through tilewise.OnlineSoftmax, one at a time."""
  scores = np.random.default_rng(5).normal(0, 1.6, 32).astype(np.float32)
  stream = tilewise.OnlineSoftmax(num_rows=1)
  lse = []
  for score in scores:
    stream.push(score.reshape(1, 1))
    lse.append(float(stream.lse()[0]))
  return {"scores": np.round(scores, 4).tolist(), "lse": [round(x, 4) for x in lse],
          "passes": [["naive: overflows", 2, 1], ["safe: three passes", 3, 1], ["online: two passes", 2, 1], ["inside attention: one", 1, 0]]}


def draw_online(data):
  figure, (left, right) = style.panels(1, 2, 2.7, width_ratios=[3, 2])
  scores = np.array(data["scores"])
  steps = np.arange(len(scores))
  running = np.maximum.accumulate(scores)
  left.vlines(steps, 0, scores, color=style.SKY, linewidth=2.5)
  left.step(steps, running, where="post", color=style.ORANGE)
  left.plot(steps, data["lse"], color=style.GREEN)
  raised = [n for n in steps if n == 0 or running[n] > running[n - 1]]
  left.plot(raised, running[raised], "o", color=style.ORANGE)
  left.axhline(0, color=style.GREY, linewidth=0.6)
  left.text(31.4, data["lse"][-1], "m + log l", color=style.GREEN, va="center")
  left.text(31.4, running[-1], "m", color=style.ORANGE, va="center")
  left.set(xlim=(-0.8, 41), xlabel="logits in the order in which they arrive", title=f"the sum is repaired {len(raised) - 1} times in 32 steps",
           xticks=[0, 10, 20, 30])
  names = [name for name, _, _ in data["passes"]][::-1]
  reads = np.array([count for _, count, _ in data["passes"]][::-1])
  writes = np.array([count for _, _, count in data["passes"]][::-1])
  right.barh(names, reads, color=style.BLUE, height=0.6)
  right.barh(names, writes, left=reads, color=style.ORANGE, height=0.6)
  right.text(0.1, 3, "read", color="white", va="center")
  right.text(2.1, 3, "write", color="white", va="center")
  right.set(xlim=(0, 4.2), title="times a logit crosses memory", xticks=[0, 1, 2, 3, 4])
  right.tick_params(axis="y", length=0, labelcolor=style.INK)
  right.spines.left.set_visible(False)
  return figure


LENGTHS = [2**n for n in range(9, 18)]


def memory() -> dict:
  """tilewise.memory of a training step, bfloat16, 16 heads of 64."""
  data = {"sq": LENGTHS}
  for sq in LENGTHS:
    found = tilewise.memory(f"bwd bf16 cuda hq=16 sq={sq} d=64")
    for name, use in (("standard", found.standard), ("tiled", found.tiled)):
      for part in ("peak_forward", "saved", "peak_backward"):
        data.setdefault(f"{name} {part}", []).append(getattr(use, part))
  return data


def draw_memory(data):
  figure, axes = style.panels(1, 3, 2.8, sharey=True)
  parts = (("peak_forward", "forward, peak"), ("saved", "kept for the backward pass"), ("peak_backward", "backward, peak"))
  for one, (part, title) in zip(axes, parts):
    standard, tiled = np.array(data[f"standard {part}"]), np.array(data[f"tiled {part}"])
    one.loglog(data["sq"], standard, "s-", color=style.ORANGE)
    one.loglog(data["sq"], tiled, "o-", color=style.BLUE)
    one.axhline(141e9, color=style.GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    at = data["sq"].index(16384)
    one.annotate(f"{style.size(standard[at])}", (16384, standard[at]), xytext=(7, -12), textcoords="offset points", color=style.ORANGE)
    one.annotate(f"{style.size(tiled[at])}", (16384, tiled[at]), xytext=(-4, 6), textcoords="offset points", ha="right", color=style.BLUE)
    one.set(title=title, xlabel="tokens", xticks=[512, 2048, 8192, 32768, 131072], ylim=(3e5, 2e13))
    one.set_xticklabels(["512", "2k", "8k", "32k", "128k"])
    one.set_yticks([2**20, 2**30, 2**40], ["1 MiB", "1 GiB", "1 TiB"])
    one.minorticks_off()
    one.grid(axis="y")
  axes[0].text(540, 1.8e11, "memory of an H200", color=style.GREY, fontsize=8.5)
  axes[0].text(560, 2.5e9, "standard", color=style.ORANGE, ha="left")
  axes[0].text(2600, 1.0e6, "Tilewise", color=style.BLUE)
  return figure


def levels() -> dict:
  record = json.loads((RESULTS / "memory_levels.json").read_text(encoding="utf-8"))
  return {"processor": record["processor"], "caches": record["caches_kib"], "points": [[p["bytes"], p["gb_per_s"]] for p in record["points"]]}


def draw_levels(data):
  figure, axes = style.panels(1, 1, 3.2)
  bytes_, rate = np.array(data["points"]).T
  edges = [2048, *(kib * 1024 for kib in data["caches"].values()), 2**31]
  for n, (name, low, high) in enumerate(zip([*data["caches"], "memory"], edges, edges[1:])):
    axes.axvspan(low, high, color=style.HIDDEN if n % 2 else "#F8F8F8", zorder=0)
    label = name if name == "memory" else f"{name}\n{style.size(high)}"
    axes.text((low * high) ** 0.5, 276, label, ha="center", va="top", color=style.GREY)
  axes.semilogx(bytes_, rate, "o-", color=style.BLUE)
  d, queries, keys = 64, 96, 256
  things = [("a panel of K: 64 keys", 64 * d * 4), ("a block of P:\n96 x 256", queries * keys * 4), ("packed K and V\nof 4096 keys", 2 * 4096 * d * 4),
            ("S of 4096 tokens,\none head", 4096 * 4096 * 4)]
  for text, size in things:
    height = float(np.interp(np.log(size), np.log(bytes_), rate))
    axes.plot(size, height, "D", color=style.ORANGE, zorder=3)
    above = text[0] in "aS" and "P" not in text
    axes.annotate(text, (size, height), xytext=(0, 12 if above else -12), textcoords="offset points", ha="center", va="bottom" if above else "top",
                  color=style.ORANGE, fontsize=8.5)
  axes.set(xlim=(2048, 2**31), ylim=(0, 285), xlabel="bytes that are read over and over (float32, head_dim 64)", ylabel="GB/s, one thread",
           xticks=[2**12, 2**15, 2**18, 2**21, 2**24, 2**27, 2**30])
  axes.set_xticklabels(["4 KiB", "32 KiB", "256 KiB", "2 MiB", "16 MiB", "128 MiB", "1 GiB"])
  axes.minorticks_off()
  return figure


def roofline() -> dict:
  """FLOPs and bytes of forward passes, as tilewise.memory counts them; measured speeds from bench/results; the data sheet."""
  gpu = tilewise.gpus()["H200"]
  measured = {}
  for cell in json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))["cells"]:
    if (cell["group"], cell["pass"], cell["dtype"], cell["causal"]) == ("grid", "fwd", "bf16", False):
      measured[cell["d"], cell["sq"]] = cell["results"]["tilewise"]["tflops"]
  points = []
  for d in (64, 128):
    for sq in (512, 2048, 16384):
      problem = f"fwd bf16 cuda b={16384 // sq} hq={2048 // d} sq={sq} d={d}"
      found = tilewise.memory(problem)
      points.append({"d": d, "sq": sq, "standard": found.flops / found.standard_bytes_moved, "tiled": found.flops / found.tiled_bytes_moved,
                     "tflops": measured[d, sq]})
  return {"bandwidth": gpu.memory_bytes_per_second, "tensor": gpu.tensor_flops, "points": points}


def draw_roofline(data):
  figure, axes = style.panels(1, 1, 3.2)
  x = np.array([4, data["tensor"] / data["bandwidth"], 25000])
  roof = np.minimum(data["tensor"], x * data["bandwidth"]) / 1e12
  axes.loglog(x, roof, color=style.INK)
  axes.text(1.9e4, data["tensor"] / 1e12 * 1.12, f"tensor cores: {data['tensor'] / 1e12:.0f} TFLOP/s", ha="right", va="bottom")
  axes.text(9, 9 * data["bandwidth"] / 1e12 * 1.35, f"memory: {data['bandwidth'] / 1e12:.1f} TB/s", rotation=33, ha="left", va="bottom")
  for d, colour in ((64, style.SKY), (128, style.BLUE)):
    mine = [p for p in data["points"] if p["d"] == d]
    axes.plot([p["tiled"] for p in mine], [p["tflops"] for p in mine], "o-", color=colour, linewidth=1)
    axes.annotate(f"Tilewise, d {d}", (mine[-1]["tiled"], mine[-1]["tflops"]), xytext=(8, 0 if d == 128 else -3),
                  textcoords="offset points", color=colour, va="center")
  standard = data["points"]
  axes.plot([p["standard"] for p in standard], [p["standard"] * data["bandwidth"] / 1e12 for p in standard], "s", color=style.ORANGE)
  last = standard[-1]
  axes.annotate("standard attention:\nno faster than here", (last["standard"], last["standard"] * data["bandwidth"] / 1e12), xytext=(12, -14),
                textcoords="offset points", color=style.ORANGE, va="center")
  for p in [p for p in data["points"] if p["d"] == 64]:
    label = f"{p['sq']}" + " tokens" * (p["sq"] == 512)
    axes.annotate(label, (p["tiled"], p["tflops"]), xytext=(0, -14), textcoords="offset points", ha="center", color=style.BLUE, fontsize=8)
  axes.set(xlim=(4, 4e4), ylim=(20, 2000), xlabel="FLOPs for each byte that crosses the GPU's memory interface", ylabel="TFLOP/s", yticks=[30, 100, 300, 1000])
  axes.set_yticklabels(["30", "100", "300", "1000"])
  axes.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
  axes.minorticks_off()
  axes.grid(axis="y")
  return figure


FIGURES = {
    "online_softmax": (online, draw_online),
    "memory": (memory, draw_memory),
    "levels": (levels, draw_levels),
    "roofline": (roofline, draw_roofline),
}
