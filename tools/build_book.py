#!/usr/bin/env python3
"""Builds the book from docs/ (mkdocs.yml) and checks it: mkdocs strictly, then every address in the pages that it wrote.

    tools/build_book.py [--out build-docs]      exit status 1 if something is wrong, 77 (skipped) without mkdocs
"""

import argparse
import html.parser
import importlib.util
import os
import pathlib
import subprocess
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77


class Page(html.parser.HTMLParser):
  """The addresses in a page, and the anchors that it has."""

  def __init__(self, path: pathlib.Path):
    super().__init__()
    self.addresses: list[str] = []
    self.anchors: set[str] = set()
    self.feed(path.read_text(encoding="utf-8"))

  def handle_starttag(self, tag, attributes):
    for name, value in attributes:
      if name == "id" or (name == "name" and tag == "a"):
        self.anchors.add(value)
      elif name in ("href", "src") and value:
        self.addresses.append(value)


def dead_addresses(site: pathlib.Path) -> list[str]:
  pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
  dead = []
  for path, page in pages.items():
    if path.name == "404.html":  # its addresses are the server's
      continue
    for address in page.addresses:
      parts = urllib.parse.urlsplit(address)
      if parts.scheme or parts.netloc:
        if parts.scheme in ("http", "https") and address.endswith((".js", ".css", ".woff2")):
          dead.append(f"{path.relative_to(site)}: {address} is fetched from elsewhere")
        continue
      target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
      if target.is_dir():
        target /= "index.html"
      anchor = urllib.parse.unquote(parts.fragment)
      if not target.exists():
        dead.append(f"{path.relative_to(site)}: {address}: no such file")
      elif anchor and target in pages and anchor not in pages[target].anchors and not anchor.startswith("__"):
        dead.append(f"{path.relative_to(site)}: {address}: no such heading")
  return dead


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build-docs")
  out = parser.parse_args().out.resolve()
  lacking = [name for name in ("mkdocs", "material") if importlib.util.find_spec(name) is None]
  if lacking:
    print(f"SKIPPED: no {' and '.join(lacking)} in {sys.executable}; ./dev docs installs what tools/requirements-docs.txt lists")
    return SKIPPED
  # Not --quiet: mkdocs would then not count the warnings that --strict fails for.
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "-f", str(ROOT / "mkdocs.yml"), "-d", str(out)]
  built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
  if built.returncode != 0:
    print("\n".join(line for line in (built.stdout + built.stderr).splitlines() if not line.startswith("INFO")))
    return 1
  print("\n".join(line for line in built.stdout.splitlines() if line.startswith("book:")))
  sys.path.insert(0, str(ROOT / "tools"))
  import api_reference

  dead = dead_addresses(out) + [f"reference lacks {name}" for name in api_reference.missing()]
  print("\n".join(dead) if dead else f"{out / 'index.html'}: no dead address")
  return 1 if dead else 0


if __name__ == "__main__":
  sys.exit(main())
