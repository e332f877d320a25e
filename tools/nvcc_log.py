#!/usr/bin/env python3
"""Runs a CUDA compilation and keeps what ptxas says of every kernel beside the object, for tests/cuda/spill_test.py.

    nvcc_log.py nvcc ... -o OBJECT       (CMake's CUDA_COMPILER_LAUNCHER)
"""

import subprocess
import sys


def main():
    command = sys.argv[1:]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    told = [line for line in done.stderr.split("\n") if line and not line.startswith("ptxas info") and "bytes stack frame" not in line]
    if told:
        print("\n".join(told), file=sys.stderr)
    if "-o" in command and "-c" in command:
        with open(command[command.index("-o") + 1] + ".ptxas", "w") as file:
            file.write(done.stderr)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
