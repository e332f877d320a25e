#!/usr/bin/env python3
"""Do the tests notice? Plants one fault at a time in a copy of the sources, builds the command line tool and expects
`tilewise check --all --kernel all` to fail. A fault that passes is a hole in the harness, its cases or its tolerances.

  tools/mutate.py [--only TEXT] [--jobs N]     exit status 1 if a fault went unnoticed
"""
import argparse
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "build-mutate"

# (what is wrong, file, text, replacement). The text must occur exactly once.
FAULTS = [
    ("2^x: last coefficient off by 1e-5 (float32)", "src/cpu/tile_kernels.h", "0x1.62e42a98a7c7fp-1f", "0x1.62e50a98a7c7fp-1f"),
    ("2^x: coefficient of x^2 off by 5e-5 (float32)", "src/cpu/tile_kernels.h", "0x1.ebf9bf95b1c07p-3f", "0x1.ebffbf95b1c07p-3f"),
    ("tanh: coefficient of x^5 off by 1e-3", "src/cpu/tile_kernels.h", "0.13333231874486096f", "0.1334f"),
    ("dS without the softcap's derivative", "src/cpu/tile_kernels.h", "if (t.softcap_factor != nullptr) ds =", "if (false) ds ="),
    ("dP of dropout not scaled", "src/cpu/tile_kernels.h", "S::set1(t.keep_scale)", "S::set1(1.0f)"),
    ("dV of dropout not scaled", "src/cpu/backward.cpp", "rules_.dropout.active() ? rules_.dropout.scale : 1.0f", "1.0f"),
    ("sink's gradient with the wrong sign", "src/cpu/backward.cpp", "-std::exp(sink - lse) * delta", "std::exp(sink - lse) * delta"),
    ("lse of the backward pass off by 1e-4", "src/cpu/backward.cpp", "static_cast<float>(lse * kLog2E)", "static_cast<float>(lse * kLog2E + 1e-4)"),
    ("causal mask one key too far", "src/core/mask.h", ": diagonal + right + 1;", ": diagonal + right + 2;"),
    ("left window one key short", "src/core/mask.h", "diagonal - left", "diagonal - left + 1"),
    ("delta off by 1e-4", "src/cpu/backward.cpp", "space_.delta[slot] = delta;", "space_.delta[slot] = delta + 1e-4f;"),
]


def copy(source, target):
    """Writes only what differs, so that the build sees what a planted fault or an edit has changed."""
    if source.is_dir():
        for entry in source.iterdir():
            copy(entry, target / entry.name)
    elif not target.exists() or target.read_bytes() != source.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def plant(fault):
    name, path, text, replacement = fault
    source = (ROOT / path).read_text()
    if source.count(text) != 1:
        sys.exit(f"{path} holds {text!r} {source.count(text)} times, not once: fault {name!r} must be written anew")
    (COPY / path).write_text(source.replace(text, replacement))


def run(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def build(jobs):
    result = run("cmake", "--build", COPY / "build", "-j", jobs, "--target", "tilewise_cli")
    if result.returncode:
        sys.exit(result.stdout[-3000:])


def check():
    return run(COPY / "build/src/cli/tilewise", "check", "--all", "--kernel", "all")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="faults whose name contains this text")
    options.add_argument("--jobs", default="2")
    options = options.parse_args()
    for path in ("src", "include", "cmake", "tests/cases", "CMakeLists.txt"):
        copy(ROOT / path, COPY / path)
    configured = run("cmake", "-S", COPY, "-B", COPY / "build", "-DCMAKE_BUILD_TYPE=Release", "-DTILEWISE_CUDA=OFF",
                     "-DTILEWISE_BUILD_TESTS=OFF", "-DTILEWISE_BUILD_EXAMPLES=OFF")
    if configured.returncode:
        sys.exit(configured.stdout[-3000:])
    build(options.jobs)
    if check().returncode:
        sys.exit("the sources fail without any fault planted")
    unnoticed = 0
    for fault in FAULTS:
        if options.only not in fault[0]:
            continue
        plant(fault)
        build(options.jobs)
        result = check()
        failures = [line for line in result.stdout.splitlines() if "FAILED" in line]
        print(f"{'noticed' if result.returncode else 'UNNOTICED':10} {fault[0]}: {len(failures)} checks fail", flush=True)
        unnoticed += result.returncode == 0
        copy(ROOT / fault[1], COPY / fault[1])
    sys.exit(1 if unnoticed else 0)


if __name__ == "__main__":
    main()
