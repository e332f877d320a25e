#!/usr/bin/env python3
"""`./dev docs`: the Markdown pages as a small book, with mkdocs, into build-docs/site.

Pages keep their places. Links to sources, which the book does not hold, become plain code; links between pages that lead nowhere
stop the build.

    tools/build_docs.py [--out build-docs]
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
# The order of the book; a page that is not named here stands at the end, so that none is lost.
BOOK = [
  ("Start", ["index.md", "docs/story.md", "docs/memory.md", "docs/masks.md"]),
  ("The contract", ["docs/semantics.md", "docs/math.md", "docs/glossary.md"]),
  ("Python", sorted(f"docs/integrations/{page.name}" for page in (ROOT / "docs/integrations").glob("*.md"))),
  ("C and C++", ["docs/api_c.md", "docs/api_cpp.md", "examples/cli/README.md", "examples/ladder/README.md"]),
  ("Inside", ["docs/architecture.md", "docs/performance.md", "docs/testing.md"]),
]


def titled(path: pathlib.Path) -> str:
  match = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
  return match.group(1).replace("`", "") if match else path.stem


def for_the_book(text: str, place: pathlib.PurePosixPath, pages: set[str]) -> str:
  """Links that lead out of the book lose their arrow."""
  fences = []
  text = FENCE.sub(lambda fence: fences.append(fence.group()) or f"\0{len(fences) - 1}\0", text)

  def link(match: re.Match) -> str:
    words, target = match.groups()
    if re.match(r"[a-z][a-z0-9+.-]*:|#", target):
      return match.group()
    name, _, anchor = target.partition("#")
    path = os.path.normpath(os.path.join(str(place.parent), name))
    if path == "README.md":
      path = "index.md"
    if path in pages:
      relative = os.path.relpath(path, str(place.parent))
      return f"[{words}]({relative}{'#' + anchor if anchor else ''})"
    return words if "`" in words or " " in words else f"`{words}`"

  text = LINK.sub(link, text)
  return re.sub(r"\0(\d+)\0", lambda number: fences[int(number.group(1))], text)


def header_page(path: str, title: str) -> str:
  """A header is its own reference: the comments are the documentation."""
  return f"# {title}\n\n`{path}`, as it is.\n\n```{'cpp' if path.endswith('hpp') else 'c'}\n{(ROOT / path).read_text(encoding='utf-8')}```\n"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build-docs")
  arguments = parser.parse_args()
  pages_at, site = arguments.out / "pages", arguments.out / "site"
  shutil.rmtree(pages_at, ignore_errors=True)
  sources = {"index.md": ROOT / "README.md"}
  for pattern in ("docs/**/*.md", "examples/*/README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
    sources.update({str(page.relative_to(ROOT)): page for page in sorted(ROOT.glob(pattern))})
  pages = {*sources, "docs/api_c.md", "docs/api_cpp.md"}
  for name, source in sources.items():
    to = pages_at / name
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(for_the_book(source.read_text(encoding="utf-8"), pathlib.PurePosixPath(name), pages), encoding="utf-8")
  (pages_at / "docs/api_c.md").write_text(header_page("include/tilewise/tilewise.h", "The C interface"), encoding="utf-8")
  (pages_at / "docs/api_cpp.md").write_text(header_page("include/tilewise/tilewise.hpp", "The C++ interface"), encoding="utf-8")
  shutil.copytree(ROOT / "docs/figures", pages_at / "docs/figures", dirs_exist_ok=True)

  named = {page for _, chapter in BOOK for page in chapter}
  chapters = [*BOOK, ("More", sorted(pages - named))]
  title = lambda page: "Tilewise" if page == "index.md" else titled(pages_at / page)  # noqa: E731
  config = {"site_name": "Tilewise", "docs_dir": str(pages_at.resolve()), "site_dir": str(site.resolve()),
      "theme": {"name": "readthedocs"}, "use_directory_urls": False,
            "validation": {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn",
                "absolute_links": "warn"}, "nav": {"not_found": "warn"}},
            "nav": [{name: [{title(page): page} for page in chapter if page in pages]} for name, chapter in chapters]}
  (arguments.out / "mkdocs.yml").write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
  return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--clean", "-f",
      str(arguments.out / "mkdocs.yml")]).returncode


if __name__ == "__main__":
  sys.exit(main())
