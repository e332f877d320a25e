#!/usr/bin/env python3
"""No kernel spills registers, but for those in spills.txt, and these no more than it says; no C75xx warning of ptxas.

    spill_test.py BUILD/src/cuda [--write]     reads the *.ptxas files that tools/nvcc_log.py left; --write: a new spills.txt

A line of spills.txt is: architecture, bytes (stores and loads together), kernel. Architectures that it does not name are
not judged: their numbers differ with every compiler. A kernel listed that spills no longer must go from the list.
"""

import os
import re
import subprocess
import sys

LIST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spills.txt")
ENTRY = re.compile(
    r"Compiling entry function '(\S+)' for '(\S+)'(?:(?!Compiling entry).)*?(\d+) bytes spill stores, (\d+) bytes spill loads", re.S
)


def readable(names):
    """forward_sm80_kernel<(Element)2, (ForwardKind)0, 128, false>"""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = []
    for name in text.rstrip("\n").split("\n"):
        name = re.sub(r"\b(tilewise|cuda|\(anonymous namespace\))::", "", name)
        short.append(re.sub(r"^void ", "", name[: name.rfind("(")]))
    return short


def main():
    spills, warnings, kernels = {}, [], 0
    for folder, _, files in os.walk(sys.argv[1]):
        for file in files:
            if file.endswith(".ptxas"):
                text = open(os.path.join(folder, file), errors="replace").read()
                warnings += re.findall(r".*\bC75\d\d\b.*", text)
                found = ENTRY.findall(text)
                kernels += len(found)
                for name, (_, arch, stores, loads) in zip(readable([e[0] for e in found]) if found else [], found):
                    spills[arch, name] = int(stores) + int(loads)
    if kernels == 0:
        sys.exit("no *.ptxas files with kernels in %s: built without tools/nvcc_log.py?" % sys.argv[1])
    lines = ["%s %d %s" % (arch, count, name) for (arch, name), count in sorted(spills.items()) if count]
    if "--write" in sys.argv:
        with open(LIST, "w") as file:
            file.write("".join(line + "\n" for line in lines))
        return
    allowed = {}
    for line in open(LIST):
        if line.strip() and not line.startswith("#"):
            arch, count, name = line.rstrip("\n").split(" ", 2)
            allowed[arch, name] = int(count)
    judged = {arch for arch, _ in allowed}
    bad = ["C75xx: " + w for w in warnings]
    for key, count in sorted(spills.items()):
        if key[0] in judged and count > allowed.get(key, 0):
            bad.append("%s %s spills %d bytes, %d allowed" % (*key, count, allowed.get(key, 0)))
        if count == 0 and key in allowed:
            bad.append("%s %s spills no longer: take it from spills.txt" % key)
    print("%d kernels, %d of them spill; %d complaints" % (len(spills), len(lines), len(bad)))
    sys.exit("\n".join(bad) if bad else 0)


if __name__ == "__main__":
    main()
