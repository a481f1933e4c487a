"""The tests of a project: those of ours that need nothing but what it has.

Files: those that features.toml lists as every project's, and those of the chosen features. What
imports, sets or names something that the project lacks is left out, and what used that; and tests
that are slow, need a GPU, or whose features under [tests] were not chosen.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dist_amp.commands.deletion import names_of, span_with_comments, without_lines
from dist_amp.commands.features import package_of

MARKS = {"pytest.mark.slow", "pytest.mark.gpu", "pytest.mark.engine"}  # of tests that stay here
# What a project's tests may import besides what its package does.
ALWAYS = {"pytest", "torch", "tensorboard", "dist_amp", *sys.stdlib_module_names}
Needs = Mapping[str, Mapping[str, Any]]  # {file: {test, or "file" for all: [features]}}


def copy_tests(root: Path, folder: Path, features: set[str], settings: set[str]) -> None:
    """From the repository to a project that still has our package's name. settings: deleted."""
    table = tomllib.loads((root / "features.toml").read_text(encoding="utf-8"))
    needs = table["tests"]
    files = ["tests/conftest.py", *needs.pop("every_project")]
    for name in sorted(features):
        files += table[name].get("tests", ())
    tests = Tests(root, folder, features, settings, needs)
    (folder / "tests").mkdir()
    for file in files:
        tests.copy(Path(file).stem)


@dataclass
class Tests:
    root: Path
    folder: Path
    features: set[str]
    settings: set[str]
    needs: Needs
    texts: dict[str, str] = field(default_factory=dict)

    def copy(self, name: str) -> None:
        """A test file, and what it imports of tests/."""
        target = self.folder / f"tests/{name}.py"
        text = self.text_of(name)
        if target.exists() or (name.startswith("test_") and "\ndef test_" not in text):
            return
        target.write_text(text)
        nodes = list(ast.walk(ast.parse(text)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for here, (module, _) in bound(node):
                    if self.is_helper(module) and here in used:
                        self.copy(module)

    def is_helper(self, module: str) -> bool:
        return bool(module) and (self.root / f"tests/{module}.py").is_file()

    def text_of(self, name: str) -> str:
        """What is left of a test file or helper."""
        if name not in self.texts:
            file = f"tests/{name}.py"
            text = (self.root / file).read_text()
            missing = set()
            for test, features in self.needs.get(file, {}).items():
                if not self.features.issuperset(features):
                    missing.add(test)
            if "file" in missing or is_marked(text):
                text = ""
            self.texts[name] = self.without(text, missing)
            if name.startswith("test_"):
                self.texts[name] = without_unused(self.texts[name], text)
        return self.texts[name]

    def without(self, text: str, missing: set[str]) -> str:
        """Without the statements that define or use what is missing."""
        body = ast.parse(text).body
        lines = text.splitlines()
        gone: set[int] = set()
        before = -1
        while before != len(gone):
            before = len(gone)
            for node in body:
                if self.lacks(node, missing):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        missing |= {name for name, real in bound(node) if self.is_missing(*real)}
                    else:
                        missing |= defined(node)
                        gone |= span_with_comments(node, lines)
        return without_lines(text, gone)

    def lacks(self, node: ast.stmt, missing: set[str]) -> bool:
        """Whether a statement defines, uses, imports or names what is not there."""
        if defined(node) & missing:
            return True
        for mark in getattr(node, "decorator_list", ()):
            if ast.unparse(mark) in MARKS:
                return True
        for part in ast.walk(node):
            is_gone = False
            if isinstance(part, ast.Import | ast.ImportFrom):
                is_gone = any(self.is_missing(*real) for _, real in bound(part))
            elif isinstance(part, ast.Name):
                is_gone = part.id in missing
            elif isinstance(part, ast.arg):  # a fixture
                is_gone = part.arg in missing
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                is_gone = self.is_named(part.value)
            if is_gone:
                return True
        return False

    def is_missing(self, module: str, name: str) -> bool:
        """Whether the project lacks a module, or this name in it."""
        if self.is_helper(module):
            return bool(name) and name not in names_of(self.text_of(module))
        top = module.partition(".")[0]
        if top != "dist_amp":
            return top not in self.allowed
        if f"{module}.{name}" in self.modules:
            return False
        if module not in self.modules:
            return True
        text = self.modules[module].read_text()
        return bool(name) and name not in names_of(text)

    @cached_property
    def modules(self) -> dict[str, Path]:
        return modules_of(self.folder)

    @cached_property
    def ours(self) -> dict[str, Path]:
        return modules_of(package_of(self.root).parent)

    @cached_property
    def allowed(self) -> set[str]:
        """The top-level modules that the project's tests can import."""
        return {*ALWAYS, *imported(self.modules.values())}

    def is_named(self, text: str) -> bool:
        """Whether a text names a deleted setting, or a module that is missing."""
        if self.settings.intersection(re.findall(r"[\w.]+", text)):
            return True
        for module in re.findall(r"dist_amp(?:\.\w+)+", text):
            if module in self.ours and module not in self.modules:
                return True
        return False


def modules_of(root: Path) -> dict[str, Path]:
    """{"dist_amp.checkpoint.saver": its file}; commands also as "dist_amp.export"."""
    modules = {}
    for path in (root / "dist_amp").rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        modules[name] = path
        modules[name.replace(".commands.", ".")] = path
    return modules


def imported(paths: Iterable[Path]) -> Iterator[str]:
    """The top-level modules that files import, in functions too."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for _, (module, _) in bound(node):
                    yield module.partition(".")[0]


def bound(node: ast.Import | ast.ImportFrom) -> list[tuple[str, tuple[str, str]]]:
    """(the name here, (module, name there or "")) of what a statement imports."""
    names = []
    for alias in node.names:
        real = (alias.name, "")
        if isinstance(node, ast.ImportFrom):
            real = (node.module or "", alias.name)
        names.append((alias.asname or alias.name, real))
    return names


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = getattr(node, "targets", [])
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names = set()
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                names.add(part.id)
    return names


def is_marked(text: str) -> bool:
    """Whether all tests of a file stay here."""
    for node in ast.parse(text).body:
        if "pytestmark" in defined(node):
            return any(ast.unparse(part) in MARKS for part in ast.walk(node))
    return False


def without_unused(text: str, before: str) -> str:
    """Without definitions that only removed tests used."""
    used = Counter(re.findall(r"\w+", before))
    while True:
        words = Counter(re.findall(r"\w+", text))
        lines = text.splitlines()
        unused: set[int] = set()
        for node in ast.parse(text).body:
            decorators = [ast.unparse(item) for item in getattr(node, "decorator_list", ())]
            if "autouse" in " ".join(decorators):
                continue
            source = lines[node.lineno - 1 : node.end_lineno]
            own = re.findall(r"\w+", "\n".join(source))
            for name in defined(node):
                is_unused = words[name] == own.count(name) < used[name]
                if is_unused and not name.startswith("test_"):
                    unused |= span_with_comments(node, lines)
        if not unused:
            return text
        text = without_lines(text, unused)
