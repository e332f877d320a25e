#!/usr/bin/env python3
"""Counts the tests in a JUnit file of CTest or pytest and prints "PASSED FAILED SKIPPED".

A CTest entry that runs a GoogleTest program counts as the cases which that program's summary states; every other entry, and
every case of pytest, counts as one. An entry that failed counts as at least one failure: a program may crash before its summary.
"""

import re
import sys
import xml.etree.ElementTree as tree

PASSED, SKIPPED = (re.compile(rf"^\[ *{word} *\] (\d+) tests?\b", re.MULTILINE) for word in ("PASSED", "SKIPPED"))
FAILED_NAME = re.compile(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", re.MULTILINE)  # said once or twice, by gtest_brief


def of_case(case: tree.Element) -> tuple[int, int, int]:
  bad = case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail"
  output = case.findtext("system-out") or ""
  if PASSED.search(output):
    passed, skipped = (sum(int(n) for n in word.findall(output)) for word in (PASSED, SKIPPED))
    return passed, max(len(set(FAILED_NAME.findall(output))), int(bad)), skipped
  if bad:
    return 0, 1, 0
  if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
    return 0, 0, 1
  return 1, 0, 0


def main() -> None:
  counts = [of_case(case) for case in tree.parse(sys.argv[1]).iter("testcase")]
  print(*(sum(column) for column in zip(*counts)) if counts else (0, 0, 0))


if __name__ == "__main__":
  main()
