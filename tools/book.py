"""What mkdocs needs to make the book from a tree that also reads well without it (hooks of mkdocs.yml).

Pages of docs/ link to sources, examples and Markdown outside of docs/ by relative paths, as a git host wants it. Here each
such file becomes a page of its own, so that the same links work in the book: Markdown as it is, sources as one block of
code, folders as lists. Three pages are written from the sources: the API reference (api_reference.py).
"""

import os
import pathlib
import posixpath
import re
import sys

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))
import api_reference  # noqa: E402  (mkdocs does not put a hook's folder on the path)

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))")
PART = re.compile(r"^<!-- (?:begin .*|end) -->\n", re.MULTILINE)  # of tools/readme.py; a table must not follow a comment
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[ ]*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".c": "c", ".h": "cpp", ".cpp": "cpp", ".hpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".py": "python", ".json": "json",
             ".def": "cpp", ".txt": "text", ".cmake": "cmake", ".toml": "toml", ".npy": None}
PICTURES = {".svg", ".png"}
IN_NAV = ("examples/ladder/README.md", "examples/cli/README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # of Markdown outside of docs/
LONGEST = 200_000  # characters of a source that is shown

_origin: dict[str, pathlib.Path] = {}  # page of the book -> the file that it came from
_parts: dict[str, str] = {}            # the same for text that was written here


def page_of(path: pathlib.Path) -> str:
  """The page of the book that shows a file of the tree."""
  name = path.relative_to(ROOT).as_posix()
  if path.is_dir():
    return f"source/{name}/index.md"
  if path.is_relative_to(DOCS):
    return path.relative_to(DOCS).as_posix()
  return f"tree/{name}" if path.suffix == ".md" else f"source/{name}.md"


def target_of(origin: pathlib.Path, link: str) -> pathlib.Path | None:
  """The file or folder of the tree that a link leads to; None for addresses elsewhere, and for what is not there."""
  if re.match(r"[a-z][a-z0-9+.-]*:|/", link):
    return None
  path = (origin.parent / link).resolve()
  return path if path.is_relative_to(ROOT) and path.exists() else None


def outside_code(text: str, change) -> str:
  """The text with `change` done to it everywhere but in fenced code."""
  done, last = [], 0
  for fence in FENCE.finditer(text):
    done += [change(text[last:fence.start()]), fence.group()]
    last = fence.end()
  return "".join([*done, change(text[last:])])


def links_of(text: str) -> list[str]:
  found: list[str] = []
  outside_code(text, lambda part: found.extend(match.group(2) for match in LINK.finditer(part)) or part)
  return found


def shown(path: pathlib.Path) -> str:
  """A file or folder that is no Markdown, as a page."""
  name = path.relative_to(ROOT).as_posix()
  if path.is_dir():
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "__pycache__")))
    return f"# `{name}/`\n\n" + "".join(f"- `{entry.name}{'/' if entry.is_dir() else ''}`\n" for entry in entries)
  language = LANGUAGES.get(path.suffix, "text")
  if language is None or path.stat().st_size > LONGEST:
    return f"# `{name}`\n\n{path.stat().st_size:,} bytes; not shown here.\n"
  return f"# `{name}`\n\n````{language}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def on_files(files: Files, config) -> Files:
  _origin.clear()
  _parts.clear()
  for name, text in api_reference.pages().items():
    _parts[name] = text
    _origin[name] = DOCS / name
    files.append(File.generated(config, name, content=text))
  waiting = []
  for file in files.documentation_pages():
    if file.src_uri not in _parts:
      _origin[file.src_uri] = pathlib.Path(file.abs_src_path)
      waiting.append(file.src_uri)
  for name in IN_NAV:
    path = ROOT / name
    waiting.append(page_of(path))
    _origin[page_of(path)] = path
    files.append(File.generated(config, page_of(path), content=path.read_text(encoding="utf-8")))
  while waiting:  # pages lead to pages
    origin = _origin[waiting.pop()]
    if origin.suffix != ".md":
      continue
    for link in links_of(origin.read_text(encoding="utf-8")):
      path = target_of(origin, link)
      if path is None or page_of(path) in _origin or (path.is_relative_to(DOCS) and path.is_file()):
        continue
      name = page_of(path)
      _origin[name] = path
      if path.suffix in PICTURES:
        continue
      content = path.read_text(encoding="utf-8") if path.suffix == ".md" else shown(path)
      files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
      waiting.append(name)
  return files


def on_page_markdown(markdown: str, page, config, files) -> str:
  """Relative links between files of the tree become links between pages of the book."""
  origin = _origin[page.file.src_uri]
  here = posixpath.dirname(page.file.src_uri)

  def moved(match: re.Match) -> str:
    path = target_of(origin, match.group(2))
    if path is None or path.suffix in PICTURES or page_of(path) not in _origin:
      return match.group()
    return match.group(1) + posixpath.relpath(page_of(path), here or ".") + match.group(3)

  if page.file.src_uri.startswith("source/") or page.file.src_uri in _parts:
    return markdown
  return outside_code(PART.sub("", markdown), lambda part: LINK.sub(moved, part))


def on_post_build(config) -> None:
  size = sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(config.site_dir) for name in names)
  print(f"book: {len(_origin)} pages, {size / 2**20:.1f} MiB, in {config.site_dir}")
