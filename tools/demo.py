#!/usr/bin/env python3
"""`./dev demo`: attention on tensors of a real model, with every kernel of this machine, CPU and GPU, and with standard attention.

    tools/demo.py --tilewise build/src/cli/tilewise [--out demo] [--max-seqlen 16384]

Prints two tables and writes OUT/demo.json, which holds their numbers and is the input of tools/plot_demo.py. Needs
Python's standard library only.

Errors are the largest absolute difference to the reference kernel, which computes in float64. Times are medians of
`tilewise bench` on the same problem. Memory is what a run adds above its inputs and outputs, as Linux counts resident
pages; for standard attention, by formula: float32 scores, softmax and probabilities, 12 bytes for each pair of tokens.
"""

import argparse
import array
import json
import os
import pathlib
import platform
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSORS = ROOT / "examples/data/minilm_layer3.safetensors"
REFERENCE = "reference"
OUTPUTS = {"forward": ["o"], "backward": ["dq", "dk", "dv"]}
LONGEST_WITH_REFERENCE = 1024  # float64 loops take 4 s for 12 heads there, and 4 times that for each doubling
LONGEST_STANDARD = 8192        # 12 heads of scores, softmax and probabilities are 9 GiB there
SLOW_SECONDS = 8               # a call that takes longer is timed once instead of by `bench`


class Tool:
  """The command line tool; its results as Python values."""

  def __init__(self, path: str, scratch: pathlib.Path):
    self.path, self.scratch = path, scratch

  def call(self, *arguments: str) -> str:
    done = subprocess.run([self.path, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
      sys.exit(f"demo: tilewise {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout

  def kernels(self) -> list[dict]:
    return json.loads(self.call("list", "--json"))

  def takes(self, problem: str, kernel: str) -> bool:
    return subprocess.run([self.path, "plan", problem, "--kernel", kernel], capture_output=True).returncode == 0

  def run(self, tensors: pathlib.Path, kernel: str | None, dtype: str) -> tuple[dict, dict[str, array.array]]:
    """Record of each pass, and every output."""
    out = self.scratch / "out"
    chosen = ["--kernel", kernel] if kernel else []
    report = json.loads(self.call("run", "--tensors", str(tensors), "--dtype", dtype, "--out", str(out), "--json", *chosen))
    passes = {"backward" if p["problem"].startswith("bwd") else "forward": p for p in report["passes"]}
    return passes, {pathlib.Path(path).stem: read_npy(path) for path in report["outputs"]}

  def bench(self, problem: str, kernel: str | None = None, standard: bool = False, seconds: float = 0.3) -> dict:
    record = self.scratch / "bench.json"
    arguments = ["bench", problem, "--time", str(seconds), "--json", str(record)]
    self.call(*arguments, *(["--kernel", kernel] if kernel else []), *(["--standard"] if standard else []))
    return json.loads(record.read_text())["results"][0]


# ---- files ----------------------------------------------------------------------------------------------------------


def read_npy(path: str) -> array.array:
  data = pathlib.Path(path).read_bytes()
  (header_size,) = struct.unpack_from("<H", data, 8)
  if data[:8] != b"\x93NUMPY\x01\x00" or b"'<f4'" not in data[10 : 10 + header_size]:
    sys.exit(f"demo: {path}: expected float32 in npy format 1.0")
  return array.array("f", data[10 + header_size :])


def read_safetensors(path: pathlib.Path) -> dict[str, tuple[list[int], bytes]]:
  data = path.read_bytes()
  (header_size,) = struct.unpack_from("<Q", data)
  entries = json.loads(data[8 : 8 + header_size])
  entries.pop("__metadata__", None)
  body = data[8 + header_size :]
  return {name: (e["shape"], body[slice(*e["data_offsets"])]) for name, e in entries.items()}


def write_safetensors(path: pathlib.Path, tensors: dict[str, tuple[list[int], bytes]]) -> None:
  header, begin = {}, 0
  for name, (shape, data) in tensors.items():
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + len(data)]}
    begin += len(data)
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with path.open("wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for _, data in tensors.values():
      file.write(data)


def repeat_tokens(tensors: dict, seqlen: int) -> dict:
  """q, k and v with the text repeated up to `seqlen` tokens."""
  longer = {}
  for name in ("q", "k", "v"):
    (batch, tokens, heads, head_dim), data = tensors[name]
    bytes_per_token = heads * head_dim * 4
    data = (data * (seqlen // tokens + 1))[: seqlen * bytes_per_token]
    longer[name] = ([batch, seqlen, heads, head_dim], data)
  return longer


def largest_difference(a: array.array, b: array.array) -> float:
  return max(abs(x - y) for x, y in zip(a, b))


# ---- words ----------------------------------------------------------------------------------------------------------


def text_of_time(milliseconds: float) -> str:
  return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.2f} ms"


def text_of_memory(mebibytes: float) -> str:
  return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.1f} MiB"


def text_of_machine() -> str:
  model = platform.machine()
  try:
    for line in open("/proc/cpuinfo", encoding="utf-8"):
      if line.startswith("model name"):
        model = line.split(":", 1)[1].strip()
        break
  except OSError:
    pass
  cores = len(os.sched_getaffinity(0))
  return f"{cores} core{'s' if cores > 1 else ''} of {model}"


def mebibytes(record: dict) -> float:
  """Memory of a pass: measured, or what the plan allocates where the system does not say or a page covers it."""
  return max(record["peak_growth_bytes"] or 0, record["workspace_bytes"]) / 2**20


def print_row(widths: list[int], cells: list[str]) -> None:
  line = "  ".join(f"{c:<{w}}" if n == 0 else f"{c:>{w}}" for n, (w, c) in enumerate(zip(widths, cells)))
  print("  " + line.rstrip(), flush=True)


# ---- the two parts --------------------------------------------------------------------------------------------------


def every_kernel(tool: Tool) -> list[dict]:
  """The captured layer with every available kernel, both passes, float32 and bfloat16."""
  tensors = read_safetensors(TENSORS)
  print(f"\nOne attention layer of a sentence encoder on 245 tokens of Moby-Dick: {TENSORS.relative_to(ROOT)}")
  kernels = [k for k in tool.kernels() if k["available"]]
  widths = [21, 9, 10, 9, 10]
  rows = []
  for dtype in ("f32", "bf16"):
    exact_passes, exact = tool.run(TENSORS, REFERENCE, dtype)
    for direction in ("forward", "backward"):
      problem = exact_passes[direction]["problem"]
      print(f"\n  {problem}")
      print_row(widths, ["kernel", "max error", "time", "GFLOP/s", "memory"])
      for kernel in kernels:
        name, there = kernel["name"], problem + (" cuda" if kernel["backend"] == "cuda" else "")
        if kernel["pass"] not in (direction, "both") or not tool.takes(there, name):
          continue
        passes, outputs = tool.run(TENSORS, name, dtype)
        timing = tool.bench(there, name)
        row = {"problem": problem, "kernel": name, "time_ms": timing["samples"]["median"] * 1e3, "gflops": timing["gflops"],
               "memory_mib": mebibytes(passes[direction])}
        if name != REFERENCE:
          row["max_error"] = max(largest_difference(outputs[o], exact[o]) for o in OUTPUTS[direction])
        rows.append(row)
      if direction == "forward":
        timing = tool.bench(problem, standard=True)
        seconds = timing["standard_samples"]["median"]
        row = {"problem": problem, "kernel": "standard attention", "time_ms": seconds * 1e3,
               "gflops": timing["flops"] / seconds * 1e-9, "memory_mib": exact_passes[direction]["standard_bytes"] / 2**20,
               "memory_by_formula": True}
        if dtype == "f32":  # the model's own output came from standard attention in float32
          row["max_error"] = largest_difference(array.array("f", tensors["o"][1]), exact["o"])
        rows.append(row)
      for row in rows:
        if row["problem"] == problem:
          error = f"{row['max_error']:.1e}" if "max_error" in row else "-"
          memory = text_of_memory(row["memory_mib"]) + ("*" if "memory_by_formula" in row else "")
          print_row(widths, [row["kernel"], error, text_of_time(row["time_ms"]), f"{row['gflops']:.1f}", memory])
  print("\n  max error: against float64; of standard attention in float32, that of the model's own output"
        "\n  * by formula")
  return rows


def longer_and_longer(tool: Tool, max_seqlen: int) -> list[dict]:
  """The same layer, forward, with the text repeated: Tilewise's best kernel beside standard attention."""
  tensors = read_safetensors(TENSORS)
  heads, head_dim = tensors["q"][0][2:]
  print(f"\nThe same layer, the text repeated: forward, float32, {heads} heads, head_dim {head_dim}\n")
  widths = [8, 11, 11, 8, 11, 11, 10]
  print_row(widths, ["tokens", "tilewise", "standard", "", "tilewise", "standard", "max error"])
  print_row(widths, ["", "time", "time", "faster", "memory", "memory*", ""])
  points = []
  seqlen, tensor_file = 512, tool.scratch / "longer.safetensors"
  while seqlen <= max_seqlen:
    write_safetensors(tensor_file, repeat_tokens(tensors, seqlen))
    passes, outputs = tool.run(tensor_file, None, "f32")
    record = passes["forward"]
    error = None
    if seqlen <= LONGEST_WITH_REFERENCE:
      error = largest_difference(outputs["o"], tool.run(tensor_file, REFERENCE, "f32")[1]["o"])
    before = points[-1]["time_ms"] if points else {"tilewise": 0, "standard": 0}
    with_standard = seqlen <= LONGEST_STANDARD and 4 * before["standard"] < SLOW_SECONDS * 1e3
    predicted = {"memory_mib": ["standard"]}
    if with_standard or record["seconds"] < SLOW_SECONDS:
      timing = tool.bench(record["problem"], standard=with_standard)
      times = {"tilewise": timing["samples"]["median"] * 1e3}
    else:
      times = {"tilewise": record["seconds"] * 1e3}
    if with_standard:
      times["standard"] = timing["standard_samples"]["median"] * 1e3
    else:
      times["standard"] = 4 * before["standard"]  # twice the tokens, four times the pairs
      predicted["time_ms"] = ["standard"]
    point = {"seqlen": seqlen, "problem": record["problem"], "kernel": record["kernel"], "time_ms": times,
             "memory_mib": {"tilewise": mebibytes(record), "standard": record["standard_bytes"] / 2**20},
             "predicted": predicted}
    if error is not None:
      point["max_error"] = error
    points.append(point)
    mark = "" if with_standard else "?"
    print_row(widths, [f"{seqlen}", text_of_time(times["tilewise"]), text_of_time(times["standard"]) + mark,
                       f"{times['standard'] / times['tilewise']:.2f}x", text_of_memory(point["memory_mib"]["tilewise"]),
                       text_of_memory(point["memory_mib"]["standard"]), f"{error:.1e}" if error is not None else "-"])
    seqlen *= 2
  tensor_file.unlink(missing_ok=True)
  print("\n  * by formula: all heads' scores, softmax and probabilities in float32, as a framework holds them"
        "\n  ? not run: four times the time at half the length")
  return points


def on_the_gpu(tool: Tool) -> list[dict]:
  """Longer and longer sequences on the GPU, forward and backward, beside what the matrices of standard attention would take."""
  print("\nOn the GPU: bfloat16, 16 heads, head_dim 128, causal, random inputs\n")
  widths = [8, 9, 15, 11, 9, 10, 10]
  print_row(widths, ["tokens", "pass", "kernel", "time", "TFLOP/s", "memory", "standard*"])
  rows = []
  for seqlen in (1024, 4096, 16384, 32768):
    for direction in ("fwd", "bwd"):
      timing = tool.bench(f"{direction} bf16 cuda b=1 hq=16 sq={seqlen} d=128 causal")
      row = {"seqlen": seqlen, "pass": direction, "kernel": timing["kernel"], "time_ms": timing["samples"]["median"] * 1e3,
             "tflops": timing["gflops"] * 1e-3, "workspace_mib": timing["workspace_bytes"] / 2**20,
             "standard_mib": timing["standard_bytes"] / 2**20}
      rows.append(row)
      print_row(widths, [f"{seqlen}", direction, row["kernel"], text_of_time(row["time_ms"]), f"{row['tflops']:.0f}",
                         text_of_memory(row["workspace_mib"]), text_of_memory(row["standard_mib"])])
  print("\n  * by formula: scores and probabilities of all heads")
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tilewise", required=True, help="the built command line tool")
  parser.add_argument("--out", type=pathlib.Path, default=ROOT / "demo")
  parser.add_argument("--max-seqlen", type=int, default=16384)
  arguments = parser.parse_args()

  began = time.monotonic()
  machine = text_of_machine()
  print(machine)
  with tempfile.TemporaryDirectory(prefix="tilewise-demo-") as scratch:
    tool = Tool(arguments.tilewise, pathlib.Path(scratch))
    rows = every_kernel(tool)
    points = longer_and_longer(tool, arguments.max_seqlen)
    has_gpu = any(k["backend"] == "cuda" and k["available"] for k in tool.kernels())
    gpu = on_the_gpu(tool) if has_gpu else []
  arguments.out.mkdir(parents=True, exist_ok=True)
  result = {"title": "Attention forward, float32, 12 heads, head_dim 32: a real layer, its text repeated",
            "machine": machine, "points": points, "kernels": rows, "gpu": gpu}
  path = arguments.out / "demo.json"
  path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
  print(f"\n{path} written; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
  main()
