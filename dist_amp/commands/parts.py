"""What the package is made of: core, and features, which are files that may be missing.

A feature is a file, or a folder, whose docstring has a line "Docs: ..."; it takes along what else
it imports. Core is what `import dist_amp.train` and its functions import besides features. An
import under `if present(...)` is of something that may be missing. A script in launch/ with a line
"# Docs: ..." is a feature too; it takes along the files of launch/ that it names.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ENTRY_POINTS = ("train", "commands.__main__", "commands.adopt", "commands.update")
EVERY_SCRIPT = ("constraints.txt", "demo.sh", "setup.sh", "test.sh")  # of launch/, in each project


@dataclass(frozen=True)
class Feature:
    """about: the first sentence of its docstring. docs: the page about it. files: its own."""

    name: str
    about: str
    docs: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """The files of a package's folder, by dotted names such as "optimizers.ema"."""

    folder: Path
    launch: Path = Path("launch")  # beside the folder

    @cached_property
    def files(self) -> dict[str, Path]:
        paths = sorted(self.folder.rglob("*.py"))
        return {".".join(p.relative_to(self.folder).with_suffix("").parts): p for p in paths}

    @cached_property
    def features(self) -> dict[str, Feature]:
        found = {}
        for module, path in self.files.items():
            about, docs = described(path)
            if docs:
                folder = module.removesuffix(".__init__")
                files = [name for name in self.files if name.startswith(f"{folder}.")]
                name = folder.rpartition(".")[2]
                found[name] = Feature(name, about, docs, tuple(files or [module]))
        return found

    @cached_property
    def scripts(self) -> dict[str, Feature]:
        """The features in launch/; their files are names there."""
        paths = sorted(self.folder.parent.joinpath(self.launch).glob("*.*"))
        optional = [path for path in paths if path.name not in EVERY_SCRIPT]
        found = {}
        for path in optional:
            about, docs = described(path)
            if docs:
                text = path.read_text(encoding="utf-8")
                files = [path.name]
                for other in optional:
                    if other != path and other.name in text and not described(other)[1]:
                        files.append(other.name)
                found[path.stem] = Feature(path.stem, about, docs, tuple(files))
        return found

    @cached_property
    def feature_of(self) -> dict[str, str]:
        return {file: name for name, each in self.features.items() for file in each.files}

    def feature_of_test(self, path: Path) -> str:
        """NAME of a file test_NAME.py or test_NAME_something.py, the longest there is; or ""."""
        names = [each for each in self.features if f"{path.stem}_".startswith(f"test_{each}_")]
        return max(names, key=len, default="")

    @cached_property
    def core(self) -> set[str]:
        """The files that every project has."""
        return self.reached(ENTRY_POINTS)

    def reached(self, modules: Iterable[str]) -> set[str]:
        """These files and what they import, one by the other, but for features."""
        return closure(modules, lambda module: self.imports(module) - self.feature_of.keys())

    def imports(self, module: str) -> set[str]:
        """The package's files that a file can't do without, in functions too."""
        found = set()
        for name in imports_of(self.files[module]):
            names = [name, name.rpartition(".")[0]]
            known = [each for each in names if each in self.files]
            known += [f"{each}.__init__" for each in names if f"{each}.__init__" in self.files]
            found.update(known[:1])
        return found

    def needs(self, name: str) -> set[str]:
        """The features that a feature imports, or a script names."""
        if name in self.scripts:
            launch = self.folder.parent.joinpath(self.launch)
            text = (launch / self.scripts[name].files[0]).read_text(encoding="utf-8")
            needed = {each for each, script in self.scripts.items() if script.files[0] in text}
            for file, feature in self.feature_of.items():
                if f"dist_amp.{file.removeprefix('commands.')}" in text:
                    needed.add(feature)
        else:
            files = self.reached(self.features[name].files) - self.core
            imports = {each for file in files for each in self.imports(file)}
            needed = {self.feature_of[each] for each in imports if each in self.feature_of}
        return needed - {name}

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Features with all that they need, in order."""
        chosen = closure(names, self.needs)
        return [name for name in (*self.features, *self.scripts) if name in chosen]

    def files_with(self, names: Iterable[str]) -> set[str]:
        """Core, these features and what they take along."""
        own = [
            file for name in names if name in self.features for file in self.features[name].files
        ]
        files = self.core | self.reached(own)
        folders = {file.rpartition(".")[0] for file in files}
        return files | {"__init__", *(f"{each}.__init__" for each in folders if each)}


def closure(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """`start`, what follows on it, and so on."""
    found: set[T] = set()
    left = list(start)
    while left:
        if (item := left.pop()) not in found:
            found.add(item)
            left += following(item)
    return found


@cache
def described(path: Path) -> tuple[str, str]:
    """(what it is, its page or "") by a file's docstring or first comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
        about = " ".join(" ".join(lines).partition("  ")[0].split())
    else:
        lines = [line[2:] for line in text.splitlines() if line.startswith("# ")]
        about = lines[0].partition(". ")[0] if lines else ""
    docs = next((line[6:] for line in lines if line.startswith("Docs: ")), "")
    return about.rstrip(".:"), docs


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(imported(ast.parse(path.read_text(encoding="utf-8"))))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a file imports from the package, but under `if present(...)`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "present(" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imported(other)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dist_amp"):
            prefix = (node.module or "").removeprefix("dist_amp").lstrip(".")
            yield from (f"{prefix}.{alias.name}".lstrip(".") for alias in node.names)
        else:
            yield from imported(node)
