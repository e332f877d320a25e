#!/usr/bin/env python3
"""The parts of README.md that come from elsewhere: quoted code, the support table, output of commands, measured numbers.

    tools/readme.py --check [--tilewise TOOL]      exit status 1, and what differs, if a part is not current
    tools/readme.py --write --tilewise TOOL        makes them current

Each part stands between two comments, <!-- begin KIND ARGUMENTS --> and <!-- end -->:

    code FILE | FIRST | LAST   lines of FILE, from the one that begins with FIRST (spaces aside) to the next that does with LAST
    kernels                    `tilewise list --markdown`; a build without CUDA leaves CUDA's rows as they are
    output COMMAND             what a `tilewise` command prints, as on a machine without a GPU
    numbers FILE...            a table of bench/results files, as `tilewise bench --json` writes them
    gpu FILE                   the grid of a bench/results file that `./dev gpu-bench` writes
    decode FILE                the decoding steps of `./dev gpu-bench`
    llama FILE                 the result of bench/python/llama_memory.py
    sdpa FILE                  the result of bench/python/sdpa.py
    overhead FILE              the result of bench/python/call_overhead.py
"""

import argparse
import difflib
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PART = re.compile(r"(<!-- begin ([^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
LANGUAGES = {".c": "c", ".cpp": "cpp", ".py": "python"}


def code(arguments: str) -> str:
  file, first, last = (word.strip() for word in arguments.split("|"))
  path = ROOT / file
  lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
  begin = next((n for n, line in enumerate(lines) if line.strip().startswith(first)), None)
  end = next((n for n, line in enumerate(lines) if begin is not None and n > begin and line.strip().startswith(last)), None)
  if end is None:
    sys.exit(f"readme: {file} has no lines from \"{first}\" to \"{last}\"")
  return f"```{LANGUAGES[path.suffix]}\n{textwrap.dedent(''.join(lines[begin : end + 1]))}```\n"


def kernels(current: str, tool: str) -> str:
  table = subprocess.run([tool, "list", "--markdown"], check=True, capture_output=True, text=True).stdout
  if "| cuda |" in table:
    return table
  header, separator, *rows = table.splitlines(keepends=True)
  kept = [line for line in current.splitlines(keepends=True) if "| cuda |" in line]
  return "".join([header, separator, *kept, *rows])


def numbers(files: list[str]) -> str:
  text = ""
  for file in files:
    path = ROOT / file
    if not path.exists():
      text += f"No numbers yet: `./dev bench` writes {file}.\n"
      continue
    record = json.loads(path.read_text(encoding="utf-8"))
    peaks = ", ".join(f"{p['isa']} {(p['before'] + p['after']) / 2:,.0f} GFLOP/s" for p in record["peaks"])
    model = next((line for line in record["machine"].splitlines() if line), "")
    text += (f"From [{file}]({file}): {record['threads']} threads, {record.get('processor', model)}, {record['date'][:10]}; "
             f"peak of multiply-adds measured in the same run: {peaks}.\n\n"
             "| problem | kernel | time | GFLOP/s | of peak | standard attention |\n|---|---|---|---|---|---|\n")
    for result in record["results"]:
      median = result["samples"]["median"]
      beside = ""
      if "standard_samples" in result:
        standard = result["standard_samples"]["median"]
        beside = f"{1e3 * standard:,.1f} ms ({standard / median:.1f}x)"
      text += (f"| `{result['problem']}` | `{result['kernel']}` | {1e3 * median:,.1f} ms | {result['gflops']:,.0f} | "
               f"{result['percent_of_peak']:.0f} % | {beside} |\n")
  return text


def gpu(file: str) -> str:
  record = json.loads((ROOT / file).read_text(encoding="utf-8"))
  cells = [c for c in record["cells"] if c["group"] == "grid" and c["dtype"] == "bf16"]
  lengths = sorted({c["sq"] for c in cells})
  text = (f"From [{file}]({file}): {record['gpu']}, {record['date'][:10]}, torch {record['torch']}, cuDNN {record['cudnn']}, matrix product "
          f"{record['ceilings']['matmul_bf16_tflops']:.0f} TFLOP/s in the same run. bfloat16, {cells[0]['b'] * cells[0]['sq']:,} tokens, heads x "
          f"head dim = {cells[0]['hq'] * cells[0]['d']:,}, random normal data. TFLOP/s, and in brackets how many times the speed of the fastest "
          "of cuDNN, FlashAttention 2 (same run) and FlashAttention 3 ([measured before](bench/cases/fa3_h200.json), scaled by the matrix product).\n\n"
          "| | " + " | ".join(f"{s:,}" for s in lengths) + " |\n|---|" + "---|" * len(lengths) + "\n")
  best = lambda c: c.get("over_best", c["ratio"])
  for direction, word in (("fwd", "forward"), ("bwd", "backward")):
    for d in sorted({c["d"] for c in cells}):
      for causal in (False, True):
        row = {c["sq"]: c for c in cells if (c["pass"], c["d"], c["causal"]) == (direction, d, causal)}
        text += f"| {word}, d {d}, {'causal' if causal else 'full'} | " + " | ".join(
            f"{row[s]['results']['tilewise']['tflops']:.0f} ({best(row[s]):.2f})" if s in row else "" for s in lengths) + " |\n"
  means = []
  for direction, word in (("fwd", "forward"), ("bwd", "backward")):
    ratios = [best(c) for c in cells if c["pass"] == direction]
    means.append(f"{word} {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
  return text + f"\nGeometric means of the numbers in brackets: {', '.join(means)}.\n"


def decode(file: str) -> str:
  record = json.loads((ROOT / file).read_text(encoding="utf-8"))
  cells = [c for c in record["cells"] if c["group"] == "decode"]
  first = cells[0]
  text = (f"Decoding, one query a sequence, {first['hq']} query heads over {first['hk']} key heads of {first['d']}, bfloat16, from [{file}]({file}): "
          f"microseconds a call, and TB/s of keys and values; a copy moved {record['ceilings']['copy_gb_s'] / 1e3:.2f} TB/s in the same run.\n\n"
          "| batch x keys | Tilewise | cuDNN | FlashAttention 2 |\n|---|---|---|---|\n")
  show = lambda row: f"{1e3 * row['ms']:.1f} ({row['gb_s'] / 1e3:.2f})" if row else ""
  for c in cells:
    text += f"| {c['b']} x {c['sk']:,} | " + " | ".join(show(c["results"].get(n)) for n in ("tilewise", "cudnn", "flash")) + " |\n"
  return text


def machine(record: dict) -> str:
  """The processor's instruction sets, threads, torch, date and load, from what bench/python/common.py writes."""
  lines = record["machine"]["cpu"].splitlines()
  isa = next(line.split()[-1] for line in lines if line.startswith("cpu "))
  before, after = record["machine"]["load_average"][0], record["load_average_after"][0]
  threads = record["machine"]["torch_threads"]
  return (f"{isa}, {threads} thread{'s' if threads > 1 else ''}, torch {record['machine']['torch']}, {record['machine']['date'][:10]}, "
          f"load average {before:.1f} before and {after:.1f} after")


def python_record(file: str, member: str, script: str) -> tuple[dict | None, str]:
  """The record, if it was written by the script as it is now (it has `member` then), else the words in its place."""
  path = ROOT / file
  record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
  return (record, "") if member in record else (None, f"No numbers by this method yet: {script} writes {file}.\n")


def llama(file: str) -> str:
  record, instead = python_record(file, "rounds", "bench/python/llama_memory.py")
  if record is None:
    return instead
  text = (f"From [{file}]({file}): {machine(record)}; s = {record['s']:,}, {record['dtype']}, {record['rounds']} rounds in turns, "
          "each in a process of its own.\n\n| attention | fastest step | median | peak memory above the model |\n|---|---|---|---|\n")
  for row in record["rows"]:
    text += (f"| {row['implementation']} | {row['seconds']:.2f} s | {row['median_seconds']:.2f} s | "
             f"{row['peak_bytes_above_model'] / 2**20:,.0f} MiB |\n")
  return text


def sdpa(file: str) -> str:
  record, instead = python_record(file, "summary", "bench/python/sdpa.py")
  if record is None:
    return instead
  lengths = sorted({row["s"] for row in record["rows"]})
  text = (f"From [{file}]({file}): {machine(record)}; fastest of turns. A number above 1: Tilewise is faster.\n\n"
          "| torch's time over Tilewise's | mask | d | " + " | ".join(f"s = {s:,}" for s in lengths) + " |\n"
          "|---|---|---|" + "---|" * len(lengths) + "\n")
  groups = {}
  for row in record["rows"]:
    key = (row["dtype"], row["pass"].replace("+", " and "), "causal" if row["causal"] else "full", row["d"])
    groups.setdefault(key, {})[row["s"]] = row["ratio"]
  for (dtype, direction, mask, d), ratios in groups.items():
    text += f"| {dtype}, {direction} | {mask} | {d} | " + " | ".join(f"{ratios[s]:.2f}" for s in lengths) + " |\n"
  means = ", ".join(f"{g['dtype']} {g['pass'].replace('+', ' and ')} {g['geometric_mean']:.2f}" for g in record["summary"])
  return text + f"\nGeometric means: {means}.\n"


def overhead(file: str) -> str:
  record, instead = python_record(file, "beside_us", "bench/python/call_overhead.py")
  if record is None:
    return instead
  beside = record["beside_us"]
  text = (f"From [{file}]({file}): {machine(record)}; shape {record['shape']}, fastest of many; the C call itself takes "
          f"{record['c_call_us']['forward']:.1f} us.\n\n| call | over the C call |\n|---|---|\n")
  for row in record["rows"]:
    text += f"| {row['name']} | {row['over_c_call_us']:.1f} us |\n"
  return text + (f"\nBeside it, in full: an autograd function that only allocates, {beside['empty autograd.Function, forward']:.1f} us forward and "
                 f"{beside['empty autograd.Function, forward and backward']:.1f} us with backward; torch's own SDPA "
                 f"{beside['torch sdpa, no gradient']:.1f} us, {beside['torch sdpa, autograd forward']:.1f} us and "
                 f"{beside['torch sdpa, forward and backward']:.1f} us.\n")


def output(command: str, tool: str) -> str:
  environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a plan for the GPU at hand would differ by a few bytes
  name, *words = shlex.split(command)
  if name != "tilewise":
    sys.exit(f"readme: \"{command}\" is no tilewise command")
  return f"```\n$ {command}\n{subprocess.run([tool, *words], check=True, capture_output=True, text=True, env=environment).stdout}```\n"


def rendered(text: str, tool: str | None) -> str:
  def part(match: re.Match) -> str:
    kind, _, arguments = match.group(2).partition(" ")
    if kind == "code":
      body = code(arguments)
    elif kind == "kernels":
      body = kernels(match.group(3), tool) if tool else match.group(3)
    elif kind == "output":
      body = output(arguments, tool) if tool else match.group(3)
    elif kind == "numbers":
      body = numbers(arguments.split())
    elif kind == "gpu":
      body = gpu(arguments)
    elif kind == "decode":
      body = decode(arguments)
    elif kind == "llama":
      body = llama(arguments)
    elif kind == "overhead":
      body = overhead(arguments)
    elif kind == "sdpa":
      body = sdpa(arguments)
    else:
      sys.exit(f"readme: unknown part {kind}")
    return match.group(1) + body + match.group(4)

  return PART.sub(part, text)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  mode = parser.add_mutually_exclusive_group(required=True)
  mode.add_argument("--check", action="store_true")
  mode.add_argument("--write", action="store_true")
  parser.add_argument("--tilewise", help="the built command line tool; without it the support table is left out")
  arguments = parser.parse_args()
  before = README.read_text(encoding="utf-8")
  if not PART.search(before):
    sys.exit("readme: README.md has no parts")
  after = rendered(before, arguments.tilewise)
  if arguments.write:
    README.write_text(after, encoding="utf-8")
    return 0
  if before != after:
    sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "README.md", "README.md, current"))
    print("run: tools/readme.py --write --tilewise build/src/cli/tilewise")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
