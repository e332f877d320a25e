#!/usr/bin/env python3
"""Reads the machine code of the sm_90a kernels and fails if it is not the pipeline that the source describes.

    tools/check_sm90_code.py [--show] OBJECT...     object files of nvcc, with machine code for sm_90a

The compiler may break the pipeline and still be correct: it may put a wait behind every product (its notes C7510 to C7517),
keep registers in local memory, or move the wait for O above the exponentials, whose time it should hide. All of that shows
in the order of a few instructions. Needs no GPU and no tool of the CUDA toolkit: an instruction is 16 bytes, its operation
the lowest 12 bits.
"""

import argparse
import re
import struct
import sys

EM_CUDA = 190
# Operations of sm_90a, read off kernels of one instruction each.
PRODUCTS = {0x9F0: "product", 0xDF0: "product"}  # HGMMA: A in shared memory, A in registers
WARPGROUP, MUFU, LOCAL = 0x9C5, 0x308, {0x983: "LDL", 0x387: "STL", 0x987: "STL"}
UTMALDG, UTMASTG = 0x5B4, 0x3B5


def kernels(data):
    """(name, code) of every kernel in the ELF files for the GPU inside an object file."""
    at = -1
    while (at := data.find(b"\x7fELF\x02\x01", at + 1)) >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] != EM_CUDA:
            continue
        elf = data[at:]
        table, (count, names) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<HH", elf, 60)
        sections = [struct.unpack_from("<IIQQQQ", elf, table + 64 * n) for n in range(count)]
        for name, _, _, _, offset, size in sections:
            start = sections[names][4] + name
            text = elf[start : elf.index(b"\0", start)].decode()
            if text.startswith(".text."):
                yield text[6:], elf[offset : offset + size]


def events(code):
    """The products, fences, waits and special functions as text, runs counted: "fence product:8 wait0 mufu:32 ..."; and counts."""
    runs, counts = [], {"LDL": 0, "STL": 0, "UTMALDG": 0, "UTMASTG": 0}
    for first, second in struct.iter_unpack("<QQ", code):
        operation = first & 0xFFF
        if operation in PRODUCTS:
            event = "product"
        elif operation == MUFU:
            event = "mufu"
        elif operation == WARPGROUP:  # a wait for all but so many groups, or the fence in front of a product
            event = "wait%d" % (second >> 8 & 7) if first >> 47 & 1 else "fence"
        else:
            for known, name in {**LOCAL, UTMALDG: "UTMALDG", UTMASTG: "UTMASTG"}.items():
                counts[name] += operation == known
            continue
        if runs and runs[-1][0] == event:
            runs[-1][1] += 1
        else:
            runs.append([event, 1])
    return " ".join("%s:%d" % tuple(run) for run in runs), counts


# First tile, two kinds of step inside a tile and the one across tiles, last product; then what no longer overlaps anything.
STEP = r"fence:1 product:(\d+) fence:1 product:(\d+) wait1:1 mufu:(\d+) wait0:1 "
PIPELINE = re.compile(
    r"fence:1 product:(\d+) wait0:1 mufu:(\d+) " + r"(?:mufu:\d+ )?".join([STEP] * 3) + r"(?:mufu:\d+ )?fence:1 product:(\d+) wait0:1( mufu:\d+)*"
)


def faults(code):
    text, counts = events(code)
    found = ["%d %s: registers are kept in local memory" % (counts[name], name) for name in ("LDL", "STL") if counts[name]]
    if counts["UTMALDG"] < 4:
        found.append("%d UTMALDG: Q, K and twice V are loaded by the copy engine" % counts["UTMALDG"])
    if counts["UTMASTG"] < 1:
        found.append("no UTMASTG: O is stored by the copy engine")
    match = PIPELINE.fullmatch(text)
    if not match:
        return found + ["not the pipeline: " + text]
    n = [int(group) for group in match.groups()[:-1]]
    qk, pv = n[0], n[-1]
    if any(n[i] != qk or n[i + 1] != pv for i in (2, 5, 8)):
        found.append("steps differ in their products: " + text)
    if any(n[i] < 8 * pv for i in (1, 4, 7, 10)):  # a tile of 16 pv keys is 8 pv exponentials a thread
        found.append("exponentials behind the wait for O: " + text)
    return found


def backward_faults(code):
    text, counts = events(code)
    found = ["%d %s: registers are kept in local memory" % (counts[name], name) for name in ("LDL", "STL") if counts[name]]
    if counts["UTMALDG"] < 4:
        found.append("%d UTMALDG: Q, K, V and dO are loaded by the copy engine" % counts["UTMALDG"])
    runs = re.findall(r"product:(\d+) (\w+):", text)
    if not runs or min(int(count) for count, _ in runs) < 4 or any(follows not in ("wait0", "fence") for _, follows in runs):
        found.append("products are not issued together: " + text)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the order of instructions of every kernel")
    parser.add_argument("objects", nargs="+")
    options = parser.parse_args()
    checked, bad = 0, 0
    for path in options.objects:
        with open(path, "rb") as file:
            data = file.read()
        for name, code in kernels(data):
            if "forward_sm90_kernel" in name:
                check = faults
            elif "backward_sm90_kernel" in name:
                check = backward_faults
            else:
                continue
            checked += 1
            if options.show:
                print(name, *events(code))
            for fault in check(code):
                bad += 1
                print("%s: %s" % (name, fault))
    print("%d kernels checked, %d faults" % (checked, bad))
    sys.exit(bad > 0 or checked == 0)


if __name__ == "__main__":
    main()
