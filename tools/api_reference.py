"""The API reference of the book, from the comments of the two headers and the docstrings of the package.

Nothing is built or imported: headers are cut at blank lines outside of braces, Python is read with ast. A group of
declarations with the comment above it makes one entry; comments inside of a struct stay in its code.
"""

import ast
import inspect
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "tilewise"

# ---- headers ----------------------------------------------------------------------------------------------------------

SECTION = re.compile(r"^(?:/\*|//) -{2,} (\d+)\. (.*?) -{2,}(?: \*/)?$")
NAMES = (r"\b(tw_\w+)\(", r"^(?:typedef )?(?:struct|enum|class) (?:\[\[\w+\]\] )?(\w+)", r"typedef [^;]*\(\*(tw_\w+)\)", r"^#define (TW_\w+)",
         r"^typedef struct (\w+) \w+;")


def prose(comment: str) -> str:
  """A comment as Markdown: what is indented in it, or begins like code, is code; the rest are paragraphs."""
  blocks: list[tuple[bool, list[str]]] = []
  for line in comment.splitlines():
    code = line.startswith("  ") and bool(line.strip())
    if not line.strip():
      blocks.append((False, []))
    elif blocks and blocks[-1][0] == code and blocks[-1][1]:
      blocks[-1][1].append(line)
    else:
      blocks.append((code, [line]))
  text = []
  for code, lines in blocks:
    if lines and code:
      text.append("```text\n" + textwrap.dedent("\n".join(lines)) + "\n```")
    elif lines:
      text.append(escaped(" ".join(line.strip() for line in lines)))
  return "\n\n".join(text)


def escaped(text: str) -> str:
  """Text in which `*`, `_` and `<` mean themselves; what is in backquotes stays."""
  parts = text.split("`")
  return "`".join(part if n % 2 else re.sub(r"([*_\[\]])", r"\\\1", part).replace("<", "&lt;") for n, part in enumerate(parts))


def comment_and_code(group: list[str]) -> tuple[str, list[str]]:
  """The comment at the head of a group without its marks, and the rest."""
  text: list[str] = []
  while group and group[0].startswith(("/*", "//")):
    if group[0].startswith("//"):
      text.append(group.pop(0)[2:].removeprefix(" "))
      continue
    while group:
      line = group.pop(0)
      text.append(re.sub(r"^(/\*| \*(?!/)) ?", "", line).removesuffix("*/").rstrip())
      if line.rstrip().endswith("*/"):
        break
  return "\n".join(text), group


def groups(lines: list[str]) -> list[list[str]]:
  """Runs of lines between blank ones, where no brace or comment is open."""
  found: list[list[str]] = [[]]
  depth = 0
  in_comment = False
  for line in lines:
    if not line.strip() and depth == 0 and not in_comment:
      found.append([])
      continue
    found[-1].append(line)
    if line.startswith("/*"):
      in_comment = True
    if in_comment:
      in_comment = not line.rstrip().endswith("*/")
    else:
      bare = re.sub(r"//.*|/\*.*?\*/", "", line)
      depth += bare.count("{") - bare.count("}")
  return [group for group in found if group]


def without_bodies(code: list[str]) -> list[str]:
  """Signatures in place of functions at the top level, and classes up to their private part."""
  text = "\n".join(code)
  if re.match(r"(template .*\n)?(class|struct|enum)", text):
    return without_member_bodies(re.sub(r"\n+ (?:private|protected):.*?\n\};", "\n};", text, flags=re.DOTALL)).splitlines()
  kept: list[str] = []
  inside = False
  for line in code:
    if inside:
      inside = line != "}" and not line.startswith("}")
    elif re.match(r"(inline|template|constexpr|\[\[)", line) or kept and kept[-1].endswith((",", ">")):
      if line.endswith("{"):
        line, inside = line[:-1].rstrip() + ";", True
      elif re.search(r"\) \{.*\}$", line):
        line = re.sub(r" \{.*\}$", ";", line)
      kept.append(line.replace(" = [];", ";"))
    else:
      kept.append(line)
  return kept


def closing(text: str, at: int) -> int:
  """The place after the bracket that closes the one at `at`; strings with brackets do not occur in the header."""
  depth = 0
  for n in range(at, len(text)):
    depth += (text[n] in "({[") - (text[n] in ")}]")
    if depth == 0:
      return n + 1
  return len(text)


def without_member_bodies(text: str) -> str:
  """A class whose member functions end after their parameters: initialisers and bodies go."""
  out, n, depth = "", 0, 0
  while n < len(text):
    if text.startswith("//", n):
      end = text.find("\n", n)
      out, n = out + text[n:end], end
      continue
    if text[n] == "(" and depth == 1:
      end = closing(text, n)
      qualifiers = re.compile(r"(?:\s*(?:const|noexcept)\b)*").match(text, end).end()
      out, n = out + text[n:qualifiers], qualifiers
      after = re.compile(r"\s*").match(text, n).end()
      if text[after] == ":":  # a(x), b{y} {
        while text[after] not in "({":
          after += 1
        while text[after] in "({" and text[after - 1] != " ":
          after = closing(text, after)
          while text[after] not in "({":
            after += 1
      if text[after] == "{":
        out, n = out + ";", closing(text, after)
      continue
    depth += (text[n] == "{") - (text[n] == "}")
    out += text[n]
    n += 1
  return out


def names(code: list[str]) -> list[str]:
  found: list[str] = []
  bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", "\n".join(code), flags=re.DOTALL).splitlines()
  depth = 0
  for line in bare:
    if depth == 0:
      for pattern in NAMES:
        found += [name for name in re.findall(pattern, line) if name not in found]
      match = re.match(r"inline (?:constexpr )?[\w:<>]+ (\w+)(?:\(|;| =)", line)
      if match and match.group(1) not in found:
        found.append(match.group(1))
    depth += line.count("{") - line.count("}")
  return found


def header(path: pathlib.Path, title: str, intro: str, language: str) -> str:
  lines = path.read_text(encoding="utf-8").splitlines()
  begin = next(n for n, line in enumerate(lines) if SECTION.match(line))
  end = max(n for n, line in enumerate(lines) if line.startswith(("#ifdef __cplusplus", "}  // namespace tilewise")))
  text = [f"# {title}", intro]
  skipping = False
  entries: list[str] = []
  for group in groups(lines[begin:end]):
    match = SECTION.match(group[0])
    if match:
      text += entries + [f"## {match.group(1)} {match.group(2)}"]
      entries = []
      group = group[1:]
    if any(line.startswith("namespace detail") for line in group) or skipping:
      skipping = not any(line.startswith("}  // namespace detail") for line in group)
      continue
    comment, code = comment_and_code(group)
    if not code:
      entries.append(prose(comment))
      continue
    code = without_bodies(code) if language == "cpp" else [line.removeprefix("TW_API ") for line in code]
    called = names(code)
    if called:
      entries.append("### " + ", ".join(f"`{name}`" for name in called[:4]) + (", ..." if len(called) > 4 else ""))
    if comment:
      entries.append(prose(comment))
    entries.append(f"```{language}\n" + "\n".join(code) + "\n```")
  return "\n\n".join(text + entries) + "\n"


# ---- Python -----------------------------------------------------------------------------------------------------------


def docstring(text: str) -> str:
  """A docstring with Args, Returns, Raises and examples, as Markdown."""
  out: list[str] = []
  lines = inspect.cleandoc(text).splitlines()
  n = 0
  while n < len(lines):
    line = lines[n]
    heading = re.fullmatch(r"(Args|Returns|Raises):", line)
    if line.startswith(">>>"):
      example = []
      while n < len(lines) and lines[n].strip():
        example.append(lines[n])
        n += 1
      out.append("```pycon\n" + "\n".join(example) + "\n```")
      continue
    if heading:
      n += 1
      body = []
      while n < len(lines) and (not lines[n].strip() or lines[n].startswith(" ")):
        body.append(lines[n])
        n += 1
      out.append(f"**{heading.group(1)}**")
      out.append(arguments("\n".join(body)) if heading.group(1) != "Returns" else escaped(" ".join(" ".join(body).split())))
      continue
    paragraph = []
    while n < len(lines) and lines[n].strip() and not lines[n].startswith(">>>"):
      paragraph.append(lines[n])
      n += 1
    if paragraph:
      indented = all(part.startswith("  ") for part in paragraph)
      out.append("```text\n" + textwrap.dedent("\n".join(paragraph)) + "\n```" if indented else escaped(" ".join(paragraph)))
    else:
      n += 1
  return "\n\n".join(out)


def arguments(body: str) -> str:
  """`name, name: text` with indented continuation lines, as a list."""
  items: list[str] = []
  for line in textwrap.dedent(body).splitlines():
    if not line.strip():
      continue
    if line.startswith(" ") and items:
      items[-1] += " " + line.strip()
    else:
      items.append(line.strip())
  text = []
  for item in items:
    match = re.match(r"([\w, ]+?)( \(.*?\))?: (.*)", item)
    text.append(f"- `{match.group(1)}`{match.group(2) or ''}: {escaped(match.group(3))}" if match else f"- {escaped(item)}")
  return "\n".join(text)


def module_file(name: str) -> pathlib.Path:
  path = PACKAGE.joinpath(*name.split("."))
  return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definitions(path: pathlib.Path) -> dict[str, ast.AST]:
  tree = ast.parse(path.read_text(encoding="utf-8"))
  found = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
  for node in tree.body:  # `name = Class()`: an object that stands for its class
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and getattr(getattr(node.value, "func", None), "id", "") in found:
      found[node.targets[0].id] = found[node.value.func.id]
  return found


def exported(module: str, documented: bool = True) -> list[tuple[str, ast.AST]]:
  """Functions and classes that `__all__` of a module of the package names, in its order, from the file that defines them;
  those with a docstring, or those without."""
  path = module_file(module) if module else PACKAGE / "__init__.py"
  tree = ast.parse(path.read_text(encoding="utf-8"))
  order: list[str] = []
  sources: dict[str, pathlib.Path] = {}
  for node in tree.body:
    if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
      base = module.split(".") if module and path.name == "__init__.py" else module.split(".")[:-1] if module else []
      for name in node.names:
        sources[name.asname or name.name] = module_file(".".join([*base, node.module]))
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
      order = [element.value for element in node.value.elts]
  here = definitions(path)
  order = order or [name for name in here if not name.startswith("_")]
  found = []
  for name in order:
    node = here.get(name) or (definitions(sources[name]).get(name) if name in sources else None)
    if node is not None and bool(ast.get_docstring(node)) == documented:
      found.append((name, node))
  return found


def entry(name: str, node: ast.AST, level: int) -> str:
  if isinstance(node, ast.ClassDef):
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    init = next((child for child in methods if child.name == "__init__"), None)
    text = [f"{'#' * level} `{name}`", docstring(ast.get_docstring(node))]
    if init is not None and name[0].isupper() and ast.get_docstring(init):
      text.append(docstring(ast.get_docstring(init)))
    for method in methods:
      if not method.name.startswith("_") and ast.get_docstring(method):
        text += [f"**`{method.name}({signature(method)})`**", docstring(ast.get_docstring(method))]
    return "\n\n".join(text)
  return "\n\n".join([f"{'#' * level} `{name}`", f"```python\n{name}({signature(node)})\n```", docstring(ast.get_docstring(node))])


def signature(node: ast.FunctionDef) -> str:
  return re.sub(r"^self(, )?", "", ast.unparse(node.args))


def python() -> str:
  text = ["# Python", "From the docstrings of the package; `help(tilewise.attention)` shows the same.", "## tilewise"]
  text += [entry(name, node, 3) for name, node in exported("")]
  for module, about in (("torch", "sdpa"), ("compat", ""), ("integrations.transformers", "")):
    tree = ast.parse(module_file(module).read_text(encoding="utf-8"))
    text += [f"## tilewise.{module}", docstring(ast.get_docstring(tree) or "")]
    text += [entry(name, node, 3) for name, node in exported(module) if not about or name == about]
  return "\n\n".join(text) + "\n"


def pages() -> dict[str, str]:
  include = ROOT / "include" / "tilewise"
  return {
      "api/c.md": header(include / "tilewise.h", "C",
                         "From `include/tilewise/tilewise.h`. Every function is thread-safe; none prints, aborts, or writes anything when it "
                         "returns an error. The caller owns all memory.", "c"),
      "api/cpp.md": header(include / "tilewise.hpp", "C++",
                           "From `include/tilewise/tilewise.hpp`, a header over the C interface; all names are in namespace `tilewise`. Whatever "
                           "fails throws `tilewise::Error`. The fields are documented on the page of the [C interface](c.md).", "cpp"),
      "api/python.md": python(),
  }


def missing() -> list[str]:
  """What the headers declare or the package exports, and the reference does not show."""
  shown = pages()
  c = set(re.findall(r"\b(tw_\w+)\(", (ROOT / "include/tilewise/tilewise.h").read_text(encoding="utf-8").replace("TW_API", "")))
  found = [f"api/c.md: {name}" for name in sorted(c) if not re.search(rf"^### .*`{name}`|^[\w* ]*\b{name}\(", shown["api/c.md"], re.MULTILINE)]
  return found + [f"api/python.md: {name} has no docstring" for name, _ in exported("", documented=False)]
