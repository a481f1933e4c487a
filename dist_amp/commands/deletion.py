"""Deleting optional features from a copy of the repository, by the table in features.toml.

A feature's files, entry lines and settings go first, then whatever only they used.
"""

import ast
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from dist_amp.commands.features import read_table, with_dependents

Lines = set[int]  # of a file, from 1


def delete(names: Iterable[str], root: Path) -> None:
    """Delete features, and what is built on them, from a copy of the repository.

    Errors: ValueError if the table does not fit the code.
    """
    table = read_table(root)
    rows = {name: table[name] for name in with_dependents(names, table)}
    used = names_in(root)
    for row in rows.values():
        for file in row["files"]:
            path = root / file
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)  # features may share a folder
    keys: set[str] = set()
    for row in rows.values():
        keys.update(row.get("settings", ()))
        for file, blocks in row.get("entries", {}).items():
            path = root / file
            if path.exists():
                path.write_text(without_blocks(path.read_text(), blocks, file))
    settings = root / "dist_amp/settings.py"
    settings.write_text(without_settings(settings.read_text(), keys))
    for path in (root / "configs").glob("*.toml"):
        text = without_keys(path.read_text(), keys)
        if not (root / "configs/schema.json").exists():
            text = text.removeprefix("#:schema schema.json\n")
        path.write_text(text)
    note_unread(rows, root)
    tidy(root / "dist_amp")
    while unused := definitions_without_users(root, used):
        for path, lines in unused.items():
            path.write_text(without_lines(path.read_text(), lines))
        tidy(root / "dist_amp")
    for folder in (root / "dist_amp").iterdir():  # an empty folder's docstring is no code
        if [path.name for path in folder.glob("*.py")] == ["__init__.py"]:
            shutil.rmtree(folder)


def note_unread(rows: Mapping[str, Mapping[str, Any]], root: Path) -> None:
    """Note the optional methods of a task that nothing reads without these features."""
    pairs = []
    for name, row in rows.items():
        for method in row.get("methods", ()):
            pairs.append(f"{method}:{name}")
    if pairs:
        lines = fill(" ".join(pairs), 95, initial_indent="    ", subsequent_indent="    ")
        path = root / "dist_amp/config/task_class.py"
        text = path.read_text()
        path.write_text(text.replace('UNREAD = ""', f'UNREAD = """\n{lines}\n"""'))


def without_blocks(text: str, blocks: Iterable[Any], file: str) -> str:
    for block in blocks:
        find = block
        replace = ""
        if isinstance(block, dict):
            find = block["find"]
            replace = block["replace"]
        if text.count(find) != 1:
            raise ValueError(
                f"features.toml: {find!r} is {text.count(find)} times in {file}, not once"
            )
        text = text.replace(find, replace)
    return text


def without_lines(text: str, numbers: Lines) -> str:
    kept = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if number not in numbers:
            kept.append(line)
    return "".join(kept)


def tidy(folder: Path) -> None:
    """Remove imports and variables that only deleted code used, sort the imports, and format."""
    ruff = [sys.executable, "-m", "ruff"]
    fix = ["check", "--select", "F401,I,RET504", "--fix", "--unsafe-fixes", "--exit-zero"]
    fix += ["--config", "lint.isort.split-on-trailing-comma = false"]  # few names left: one line
    for words in (fix, ["format"]):
        subprocess.run([*ruff, *words, "--quiet", "--no-cache", folder], check=True)


# --- settings


def without_keys(text: str, keys: set[str]) -> str:
    """A config file without these keys or sections, and the comments right above them."""
    lines = text.splitlines()
    section = ""
    cut: Lines = set()
    for number, line in enumerate(lines, start=1):
        if line.startswith("["):
            section = line.strip("[] ")
        name = section
        if "=" in line and not line.startswith(("#", " ")):
            name = f"{section}.{line.partition('=')[0].strip()}".strip(".")
        is_deleted = any(f"{name}.".startswith(f"{key}.") for key in keys)
        if is_deleted and line.strip() and not line.startswith("#"):
            cut.add(number)
            while lines[number - 2].startswith("#"):
                number -= 1
                cut.add(number)
    return without_lines(text, cut)


def without_settings(text: str, keys: set[str]) -> str:
    """settings.py without these keys, such as optim.ema, or sections, such as compile."""
    classes = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
    cut: Lines = set()
    for key in keys:
        cut |= setting_lines(classes, key)
    sections = {}
    for name, field in settings_of(classes["Config"]).items():
        sections[ast.unparse(field.annotation)] = name
    emptied = []
    for name, owner in classes.items():
        settings = settings_of(owner).values()
        if settings and all(field.lineno in cut for field in settings):
            emptied.append(f"({name}):")
            cut |= span(owner)
            if name in sections:
                cut |= setting_lines(classes, sections[name])
    text = without_lines(text, cut)
    for base in emptied:
        text = text.replace(base, ":")
    return text


def settings_of(owner: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    """{name: a dataclass's field}."""
    fields = {}
    for item in owner.body:
        if isinstance(item, ast.AnnAssign):
            fields[ast.unparse(item.target)] = item
    return fields


def setting_lines(classes: Mapping[str, ast.ClassDef], key: str) -> Lines:
    """The lines of a setting or section, with its docstring."""
    *sections, last = key.split(".")
    owner = classes["Config"]
    try:
        for section in sections:
            owner = classes[ast.unparse(settings_of(owner)[section].annotation)]
        if last not in settings_of(owner):  # inherited
            owner = classes[ast.unparse(owner.bases[0])]
        field = settings_of(owner)[last]
    except LookupError:
        raise ValueError(f"features.toml: there is no setting {key}") from None
    lines = span(field)
    for item in owner.body[owner.body.index(field) + 1 :][:1]:
        if isinstance(item, ast.Expr):  # its docstring
            lines |= span(item)
    return lines


def span(node: ast.stmt) -> Lines:
    """The lines of a statement, with its decorators."""
    first = node.lineno
    for decorator in getattr(node, "decorator_list", []):
        first = min(first, decorator.lineno)
    last = node.end_lineno or first
    return set(range(first, last + 1))


# --- definitions that nothing uses any more


def definitions_without_users(root: Path, before: Counter[str]) -> dict[Path, Lines]:
    """{file: lines} of functions, classes and constants that only deleted code used.

    before: how often each name was used then.
    """
    now = names_in(root)
    unused: dict[Path, Lines] = {}
    for path in (root / "dist_amp").rglob("*.py"):
        for name, uses, lines in definitions(path.read_text()):
            if now[name] == uses < before[name] and not name.startswith("__"):
                unused[path] = unused.get(path, set()) | lines
    return unused


def names_in(root: Path) -> Counter[str]:
    """How often the package defines, imports or uses each name."""
    names: Counter[str] = Counter()
    for path in (root / "dist_amp").rglob("*.py"):
        names.update(names_of(path.read_text()))
    return names


@cache
def names_of(text: str) -> Counter[str]:
    names: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        for attribute in ("id", "attr", "name"):
            name = getattr(node, attribute, "")
            names[name] += 1
    return names


@cache
def definitions(text: str) -> list[tuple[str, int, Lines]]:
    """Of functions, classes and constants: the name, how often the definition itself has it, and
    its lines with decorators and comments.

    Methods of a class with bases are left out: a library may call them.
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    nodes = list(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.bases:
            nodes += node.body
    found = []
    for node in nodes:
        name = ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        own = span_with_comments(node, lines)
        uses = names_of(ast.unparse(node))[name]  # more than 1 if it calls itself
        found.append((name, uses, own))
    return found


def span_with_comments(node: ast.stmt, lines: list[str]) -> Lines:
    """The lines of a statement, and of the comments right above it."""
    own = span(node)
    while lines[min(own) - 2].lstrip().startswith("#"):
        own.add(min(own) - 1)
    return own
