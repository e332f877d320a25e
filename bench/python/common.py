"""What the Python benchmarks share: functions timed in turns, the machine, JSON output."""

import argparse
import json
import os
import platform
import sys
import time

import torch

import tilewise

RESULTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "results")


def parser(description, output):
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--output", default=os.path.join(RESULTS, output), help="JSON file (default: %(default)s)")
    p.add_argument("--quick", action="store_true", help="few sizes and repetitions: a smoke test, not a measurement")
    return p


def machine():
    return {
        "cpu": tilewise.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "tilewise": tilewise.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "load_average": os.getloadavg(),
    }


SETTLE = 0.01  # seconds


def interleaved(functions, seconds, least=5):
    """Seconds of every timed call: {name: [..]}.

    The functions take turns, in alternating order, so that noise hits all alike. A turn begins with untimed calls for
    SETTLE seconds: the threads of an OpenMP library spin for some milliseconds after their work, on the cores that
    whoever comes next would need. Then follow timed calls for as long.
    """
    for function in functions.values():
        function()
    times = {name: [] for name in functions}
    order = list(functions.items())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < least:
        for name, function in order:
            settled = time.perf_counter() + SETTLE
            while time.perf_counter() < settled:
                function()
            turn = time.perf_counter() + SETTLE
            while True:
                start = time.perf_counter()
                function()
                stop = time.perf_counter()
                times[name].append(stop - start)
                if stop >= turn:
                    break
        order.reverse()
    return times


def write(path, report):
    with open(path, "w") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    print("wrote", path, file=sys.stderr)
