#!/usr/bin/env python3
"""`./dev bench`: times the problems of a file with `tilewise bench` and keeps the record, with the processor's name in it.

    tools/bench.py --tilewise build/src/cli/tilewise [--cases bench/cases/cpu.txt] [--out bench/results/cpu.json] [--time 1]
"""

import argparse
import json
import pathlib
import platform
import subprocess
import sys


def read_cases(path: pathlib.Path) -> list[str]:
  lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
  return [line for line in lines if line]


def processor() -> str:
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  except OSError:
    pass
  return platform.machine()


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tilewise", required=True, help="the built command line tool")
  parser.add_argument("--cases", type=pathlib.Path, default="bench/cases/cpu.txt")
  parser.add_argument("--out", type=pathlib.Path, default="bench/results/cpu.json")
  parser.add_argument("--time", default="1", help="seconds for each problem")
  parser.add_argument("--threads", help="default: the library's")
  arguments = parser.parse_args()

  arguments.out.parent.mkdir(parents=True, exist_ok=True)
  command = [arguments.tilewise, "bench", *read_cases(arguments.cases), "--standard", "--time", arguments.time,
             "--json", str(arguments.out), *(["--threads", arguments.threads] if arguments.threads else [])]
  status = subprocess.run(command).returncode
  if status != 0:
    return status
  record = json.loads(arguments.out.read_text(encoding="utf-8"))
  record = {"cases": str(arguments.cases), "processor": processor(), **record}
  arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
  print(f"{arguments.out} written; tools/readme.py --write puts it into the README")
  return 0


if __name__ == "__main__":
  sys.exit(main())
