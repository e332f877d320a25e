#!/usr/bin/env python3
"""Reads the machine code of the sm_90a kernels and fails if it is not the pipeline that the source describes.

    tools/check_sm90_code.py [--show] OBJECT...     object files of nvcc, with machine code for sm_90a

The compiler may break the pipeline and still be correct: it may put a wait behind every product (its notes C7510 to C7517),
keep registers in local memory, or move the wait for O above the exponentials, whose time it should hide. All of that shows
in the order of a few instructions. Needs no GPU and no tool of the CUDA toolkit: an instruction is 16 bytes, its operation
the lowest 12 bits.
"""

import argparse
import struct
import sys

EM_CUDA = 190
# Operations of sm_90a, read off kernels of one instruction each.
PRODUCTS = {0x9F0, 0xDF0}  # HGMMA: A in shared memory, A in registers
WARPGROUP, MUFU, LOCAL = 0x9C5, 0x308, {0x983: "LDL", 0x387: "STL", 0x987: "STL"}
UTMALDG, UTMASTG, R2UR = 0x5B4, 0x3B5, 0x2CA


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


def segments(code):
    """[marker, products, special functions, moves to uniform registers] from one fence or wait to the next; and counts of some
    other instructions."""
    found, counts = [["start", 0, 0, 0]], {"LDL": 0, "STL": 0, "UTMALDG": 0, "UTMASTG": 0}
    names = {**LOCAL, UTMALDG: "UTMALDG", UTMASTG: "UTMASTG"}
    for first, second in struct.iter_unpack("<QQ", code):
        operation = first & 0xFFF
        if operation in PRODUCTS:
            found[-1][1] += 1
        elif operation == MUFU:
            found[-1][2] += 1
        elif operation == R2UR:
            found[-1][3] += 1
        elif operation == WARPGROUP:  # a wait for all but so many groups, or the fence in front of a product
            found.append(["wait%d" % (second >> 8 & 7) if first >> 47 & 1 else "fence", 0, 0, 0])
        elif operation in names:
            counts[names[operation]] += 1
    return found, counts


def read(code, loaded):
    """Segments, counts, segments as text, and what is wrong with any kernel here; loaded: what the copy engine brings."""
    found, counts = segments(code)
    bad = ["%d %s: registers are kept in local memory" % (counts[n], n) for n in ("LDL", "STL") if counts[n]]
    if counts["UTMALDG"] < 4:
        bad.append("%d UTMALDG: %s are loaded by the copy engine" % (counts["UTMALDG"], loaded))
    return found, counts, " ".join("%s:%d:%d" % tuple(segment[:3]) for segment in found), bad


def faults(name, code):
    # First tile; the steps inside a tile, without and with a mask (ScoreKind::kGeneral and kBias: one for both; kWhole: no mask), and the one
    # across tiles; last product.
    steps = 3 if "ScoreKindE0" in name else 2
    pipeline = ["start", "fence", "wait0"] + ["fence", "fence", "wait1", "wait0"] * steps + ["fence", "wait0"]
    found, counts, text, bad = read(code, "Q, K and twice V")
    d256 = "Sm90ShapeE6E" in name  # its threads write O
    if (counts["UTMASTG"] < 1) != d256:
        bad.append("%d UTMASTG: O is stored by %s" % (counts["UTMASTG"], "threads" if d256 else "the copy engine"))
    if [segment[0] for segment in found] != pipeline:
        return bad + ["not the pipeline (marker:products:exponentials): " + text]
    qk, pv = found[1][1], found[-2][1]
    if [segment[1] for segment in found] != [0, qk, 0] + [qk, pv, 0, 0] * steps + [pv, 0] or 0 in (qk, pv):
        bad.append("not the products of the pipeline: " + text)
    # A tile of 16 pv keys is 8 pv exponentials a thread.
    if any(found[n][2] < 8 * pv for n in [2] + [5 + 4 * k for k in range(steps)]):
        bad.append("exponentials behind the wait for O: " + text)
    # Two for each product once the compiler takes stage numbers for different from thread to thread: 2 % of the time.
    moves = [(segment[3], segment[1]) for segment in found[3:-2] if segment[1]]
    if any(2 * r2ur > products for r2ur, products in moves):
        bad.append("descriptors are moved to uniform registers, (moves, products): %s" % moves)
    return bad


def backward_faults(_, code):
    found, _, text, bad = read(code, "Q, K, V and dO")
    followers = [(segment[1], after[0]) for segment, after in zip(found, found[1:] + [["end", 0, 0, 0]]) if segment[1]]
    if not followers or any(products < 4 or after not in ("wait0", "fence") for products, after in followers):
        bad.append("products are not issued together: " + text)
    return bad


def passes_faults(_, code):
    """Above head dim 128: dK and dV, and dq. In their loops several products are under way, and a wait for some of them comes first."""
    found, _, text, bad = read(code, "Q, K, V and dO")
    followers = [(segment[1], after[0]) for segment, after in zip(found, found[1:] + [["end", 0, 0, 0]]) if segment[1]]
    if not followers or any(products < 4 or not after.startswith(("wait", "fence")) for products, after in followers):
        bad.append("products are not issued together: " + text)
    if not any(after in ("wait1", "wait2") for _, after in followers):
        bad.append("every wait is for all products: " + text)
    moves = [(segment[3], segment[1]) for segment in found if segment[1] and segment[3] > 4 and 2 * segment[3] > segment[1]]
    if moves:
        bad.append("descriptors are moved to uniform registers, (moves, products): %s" % moves)
    return bad


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
            elif "backward_sm90_key_kernel" in name or "backward_sm90_query_kernel" in name:
                check = passes_faults
            else:
                continue
            checked += 1
            if options.show:
                print(name, *segments(code))
            for fault in check(name, code):
                bad += 1
                print("%s: %s" % (name, fault))
    print("%d kernels checked, %d faults" % (checked, bad))
    sys.exit(bad > 0 or checked == 0)


if __name__ == "__main__":
    main()
