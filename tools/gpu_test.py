#!/usr/bin/env python3
"""Every test that needs a GPU, side by side and within a time limit; the last line is "N passed, N failed, N skipped".

    tools/gpu_test.py --build build-cuda [--python PYTHON] [--seconds 480] [--only REGEX] [--log FILE]

Parts: the rows on the case matrix and on the lines of tests/cases against float64, random problems, the contract tests if they
were built, calls (repeats, graphs, streams, failed launches), the Python tests on CUDA tensors, and a subset of the cases under
compute-sanitizer where it exists.
"""

import argparse
import concurrent.futures
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Cases for the sanitizers, which slow kernels down by 10 to 100: small ones that between them reach every kind of kernel.
SANITIZED = {
    "forward": r"sq=113 sk=203 d=64( causal| mask=bhqk causal)?$|b=1 hq=2 sq=133 sk=150 d=(128|256)( |$)|b=3 hq=8 hk=2 sk=1500 d=64 sq=1 splits=5"
               r"|b=7 .*d=64 packed_q=900 packed_k=800 causal$|b=7 .*d=64 pages=300x5|new=5 seqused_k d=64 sq=5 rotary=32",
    "backward": r"sq=113 sk=203 d=64( causal| mask=bhqk causal)?$|b=1 hq=2 sq=133 sk=150 d=(128|256)( |$)|d=64 causal deterministic dlse"
                r"|sq=140 sk=200 d=(64 dv=128|256 dv=8) causal$|b=9 hq=2 hk=1 sq=130 sk=700 deterministic d=128 sm_margin=125"
                r"|d=64 dropout=0.2 causal|b=7 .*d=64 packed_q=900 packed_k=800 causal deterministic",
}
# Suites of tests/contract that run on any backend; the others call the library with tensors in host memory.
CONTRACT = ("MaskedKeys.*:Splits.*:BatchInvariance.*:*DeadMemory.*", "Extremes.*:Statistics.*-Extremes.HighPageNumbers:Extremes.CacheStride*", "*Layouts.*")
SMALL_SHAPES = (r" (bf16|f32) .*(sq=133 sk=150 d=(129|200|255)|sq=300 sk=333 d=(128|256)( causal| dropout=0.1 .*| causal softcap.*deterministic)$"
                r"|b=7 .* d=(128|256) packed_q=900 packed_k=800 causal|sq=150 sk=170 d=(128|192|256)( causal| causal softcap=5)$)")
RACES_BACKWARD = r"sq=113 sk=203 d=64 causal$|b=1 hq=2 sq=133 sk=150 d=128( |$)|sq=113 sk=203 d=64 causal window=70,0 deterministic"  # the slowest  # fmt: skip


def parts(options):
    """(name, command, environment): the long ones first."""
    program = {n: os.path.join(options.build, "tests", "cuda", "tilewise_cuda_" + n)
               for n in ("rows_test", "calls_test", "backward_repeat", "sm90_forward", "sm90_ptx")}  # fmt: skip
    found = []
    few = {"TILEWISE_NUM_THREADS": "2"}  # for the oracle: the parts run side by side
    found.append(("calls", [program["calls_test"]], {}))
    for n in range(4):
        found.append(("deterministic repeats %d/4" % (n + 1), [program["backward_repeat"], "500", "%d/4" % n], {}))
    cache = os.path.join(options.build, "CMakeCache.txt")
    all_shapes = os.path.exists(cache) and "TILEWISE_ALL_SHAPES:BOOL=ON" in open(cache).read()
    for pass_ in ("backward", "forward") if all_shapes else ():  # the shapes for GPUs with 99 KiB of shared memory a block, where they are others
        found.append(("small shapes " + pass_, [program["rows_test"], pass_, SMALL_SHAPES, ""], {"TILEWISE_CUDA_SHARED_BYTES": "101376", **few}))
    for pass_ in ("backward", "forward"):
        for dtype in ("f32", "bf16", "f16"):
            shards = 3 if dtype == "f32" else 8 if pass_ == "backward" else 6  # one to four minutes each on 16 cores
            for n in range(shards):
                command = [program["rows_test"], pass_, " %s " % dtype, "", "%d/%d" % (n, shards)]
                found.append(("rows %s %s %d/%d" % (pass_, dtype, n + 1, shards), command, few))
    python = {"TILEWISE_TEST_DEVICE": "cuda", "TILEWISE_LIBRARY": os.path.join(options.build, "src", "libtilewise.so"),
              "PYTHONPATH": os.path.join(ROOT, "python"), "TILEWISE_TEST_THREADS": "1"}  # fmt: skip
    if subprocess.run([options.python, "-c", "import torch, pytest, hypothesis; assert torch.cuda.is_available()"], capture_output=True).returncode:
        found.append(("python", None, "%s has no torch with CUDA, pytest and hypothesis" % options.python))
    else:
        tests = os.path.join(ROOT, "python", "tests")
        for path in sorted(glob.glob(os.path.join(tests, "test_*.py"))):
            name = os.path.basename(path)[5:-3]
            junit = os.path.join(options.work, "python-%s.xml" % name)
            if name not in ("numpy", "package", "examples", "validation"):
                found.append(("python " + name, [options.python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--junitxml", junit, path], python))
    for pass_ in ("bwd", "fwd"):
        for dtype in ("f32", "bf16", "f16"):
            found.append(("cases %s %s" % (pass_, dtype), [program["rows_test"], "cases", "^%s %s " % (pass_, dtype)], few))
    contract = os.path.join(options.build, "tests", "tilewise_contract_tests")
    if os.path.exists(contract):  # with GoogleTest
        for n, suites in enumerate(CONTRACT):
            junit = os.path.join(options.work, "contract-%d.xml" % n)
            command = [contract, "--gtest_brief=1", "--gtest_filter=" + suites, "--gtest_output=xml:" + junit]
            found.append(("contract %d" % n, command, {"TILEWISE_TEST_BACKEND": "cuda", **few}))
    if os.path.exists(program["sm90_forward"]):
        found.append(("sm90 forward", [program["sm90_forward"], "check"], {}))
        found.append(("sm90 forward repeats", [program["sm90_forward"], "repeat", "500"], {}))
        found.append(("sm90 instructions", [program["sm90_ptx"]], {}))
    for n in range(2):
        found.append(("random %d" % n, [program["rows_test"], "random", "%g" % options.random_seconds, str(options.seed + n)], few))
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        for pass_, cases in SANITIZED.items():
            cases = RACES_BACKWARD if (tool, pass_) == ("racecheck", "backward") else cases
            name = "%s %s" % (tool, pass_)
            if not os.path.exists(sanitizer):
                found.append((name, None, "compute-sanitizer is not installed"))
            else:
                found.append((name, [sanitizer, "--tool", tool, "--error-exitcode", "86", program["rows_test"], pass_, " (bf16|f32) ", cases], few))
    return [p for p in found if re.search(options.only, p[0])]


def run(part, options, deadline):
    name, command, environment = part
    if command is None:
        return {"name": name, "passed": 0, "failed": 0, "skipped": 1, "seconds": 0, "text": environment}
    start = time.perf_counter()
    log = os.path.join(options.work, re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".log")
    left = deadline - time.perf_counter()
    with open(log, "w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                                  timeout=max(left, 1), cwd=ROOT).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "out of time"
    text = open(log, errors="replace").read()
    result = {"name": name, "seconds": round(time.perf_counter() - start, 1), "log": os.path.basename(log), "text": ""}
    result.update(count(part, code, text))
    return result


def count(part, code, text):
    """Passed, failed and skipped of one part, and the lines worth showing."""
    name, command, _ = part
    junit = next((w.removeprefix("--gtest_output=xml:") for w in command if w.endswith(".xml")), None)
    if "Device not supported" in text or "no longer supported" in text:
        return {"passed": 0, "failed": 0, "skipped": 1, "text": "compute-sanitizer does not work on this machine"}
    if junit is None and re.search("^SKIPPED", text, re.M):
        return {"passed": 0, "failed": 0, "skipped": 1, "text": re.search("^SKIPPED.*", text, re.M).group()}
    bad = [line for line in text.split("\n") if re.match(r"FAIL|FAILED|ERROR |E   |={9} (Invalid|Error|Race|Uninit|Barrier)", line)]
    if junit is not None and os.path.exists(junit) and code in (0, 1, 5):
        root = xml.etree.ElementTree.parse(junit).getroot()
        suites = list(root.iter("testsuite"))
        for case in root.iter("testcase"):
            bad += ["FAILED %s.%s: %s" % (case.get("classname"), case.get("name"), (f.get("message") or "")[:180].replace("\n", " "))
                    for f in case if f.tag in ("failure", "error")]  # fmt: skip
        total, failed, skipped = (sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "skipped"))
        failed += sum(int(s.get("errors", 0)) for s in suites)
        return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped, "text": "\n".join(bad[:40])}
    numbers = re.search(r"^(\d+) cases(?:, (\d+) checks)?, (\d+) failed", text, re.M)
    if numbers is None:
        return {"passed": 0, "failed": 1, "skipped": 0, "text": "ended with %s\n%s" % (code, text[-1500:])}
    total, failed = int(numbers.group(2) or numbers.group(1)), int(numbers.group(3))
    if code == 86 or (code != 0 and failed == 0):
        failed = max(failed, 1)
        bad.append("ended with %s" % code)
    if total == 0:
        return {"passed": 0, "failed": 1, "skipped": 0, "text": "no case matched"}
    return {"passed": max(total - failed, 0), "failed": failed, "skipped": 0, "text": "\n".join(bad[:40])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default=os.path.join(ROOT, "build-cuda"), help="with the library and tests/cuda built in it")
    parser.add_argument("--python", default=sys.executable, help="a Python with torch, pytest and hypothesis")
    parser.add_argument("--seconds", type=float, default=480, help="for everything; what has not ended by then has failed")
    parser.add_argument("--random-seconds", type=float, default=45)
    parser.add_argument("--seed", type=int, default=1, help="of the random problems")
    parser.add_argument("--jobs", type=int, default=max(2, min(16, os.cpu_count() or 2)))
    parser.add_argument("--only", default="", metavar="REGEX", help="parts whose name matches")
    parser.add_argument("--work", default="", help="directory for the logs (default: BUILD/gpu-test)")
    parser.add_argument("--log", default="", help="JSON file for the result")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    options.work = options.work or os.path.join(options.build, "gpu-test")
    os.makedirs(options.work, exist_ok=True)
    start = time.perf_counter()
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(run, part, options, start + options.seconds) for part in parts(options)]
        for done in concurrent.futures.as_completed(waiting):
            r = done.result()
            results.append(r)
            print("%-34s %4d passed %3d failed %3d skipped %6.1f s" % (r["name"], r["passed"], r["failed"], r["skipped"], r["seconds"]))
            if r["text"]:
                print("\n".join("    " + line[:220] for line in r["text"].split("\n")[:40]))
            sys.stdout.flush()
    total = {k: sum(r[k] for r in results) for k in ("passed", "failed", "skipped")}
    seconds = time.perf_counter() - start
    if options.log:
        with open(options.log, "w") as file:
            json.dump({**total, "seconds": round(seconds, 1), "parts": sorted(results, key=lambda r: r["name"])}, file, indent=1)
            file.write("\n")
    print("%.0f s; logs in %s" % (seconds, options.work))
    print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % total)
    sys.exit(total["failed"] > 0 or total["passed"] == 0)


if __name__ == "__main__":
    main()
