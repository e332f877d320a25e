#!/usr/bin/env python3
"""Relative links in Markdown files: the file must exist, and so must the heading after a `#`. Paths in backquotes that name
a folder of this project (`src/cpu/forward.cpp`) must exist too. Prints dead ones; exit status 1 then."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = {".git", ".venv", "node_modules", "demo"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:src|include|tests|tools|docs|examples|bench|cmake|python)/[\w./-]+)`")


def anchors(text: str) -> set[str]:
  """Names that headings get: lower case, punctuation gone, spaces as hyphens, repeated ones numbered."""
  names, seen = set(), {}
  for heading in HEADING.findall(FENCE.sub("", text)):
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    count = seen.get(name, 0)
    seen[name] = count + 1
    names.add(f"{name}-{count}" if count else name)
  return names


def dead_links(page: pathlib.Path) -> list[str]:
  text = page.read_text(encoding="utf-8")
  prose = FENCE.sub(lambda fence: "\n" * fence.group().count("\n"), text)
  dead = []

  def report(position: int, what: str) -> None:
    dead.append(f"{page.relative_to(ROOT)}:{prose.count(chr(10), 0, position) + 1}: {what}")

  for match in LINK.finditer(prose):
    target = match.group(1)
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
      continue
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
      report(match.start(), f"{target}: no such file")
    elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8")):
      report(match.start(), f"{target}: no such heading")
  for match in PATH.finditer(prose):
    if not (ROOT / match.group(1)).exists():
      report(match.start(), f"{match.group(1)}: no such file")
  return dead


def main() -> int:
  pages = [page for page in sorted(ROOT.rglob("*.md"))
           if not any(part in SKIPPED or part.startswith("build") for part in page.relative_to(ROOT).parts)]
  dead = [line for page in pages for line in dead_links(page)]
  print("\n".join(dead) if dead else f"{len(pages)} pages, no dead link")
  return 1 if dead else 0


if __name__ == "__main__":
  sys.exit(main())
