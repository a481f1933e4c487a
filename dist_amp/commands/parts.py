"""What a project is made of: core, and features, which are files that may be missing.

A feature is a file, or a folder, whose docstring has a line "Docs: PAGE"; a script in launch/ has
it in its first comments. Core is what the main job and every project's scripts need besides
features, and a feature brings along what else it needs: the files that it imports, or that a script
names. An import under `if present(...)` is of something that may be missing.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from dist_amp.errors import ConfigError

T = TypeVar("T")

CORE = [f"launch/{name}" for name in ("constraints.txt", "demo.sh", "setup.sh", "test.sh")]
CORE += [f"dist_amp/commands/{name}.py" for name in ("__main__", "adopt", "update")]
CORE += ["dist_amp/train.py"]


@dataclass(frozen=True)
class Feature:
    about: str
    docs: str  # the page about it
    files: list[str]


class Parts:
    """The files of a clone by their paths in a project, such as "dist_amp/optimizers/ema.py"."""

    def __init__(self, package: Path, launch: Path):
        modules = {f"dist_amp/{path.relative_to(package)}": path for path in package.rglob("*.py")}
        scripts = {f"launch/{path.name}": path for path in launch.glob("*.*")}
        self.files = dict(sorted({**modules, **scripts}.items()))
        self.features: dict[str, Feature] = {}
        for file, path in self.files.items():
            about, docs = description(path)
            if docs:
                start = file.removesuffix("__init__.py")  # a folder is one feature
                files = [other for other in self.files if other.startswith(start)]
                self.features[Path(start).stem] = Feature(about, docs, files)
        self.feature_of = {
            file: name for name, feature in self.features.items() for file in feature.files
        }
        self.core = self.with_needs(CORE)

    def feature_of_test(self, path: Path) -> str:
        """NAME of a file test_NAME.py or test_NAME_something.py, the longest there is; or ""."""
        names = [name for name in self.features if f"{path.stem}_".startswith(f"test_{name}_")]
        return max(names, key=len, default="")

    def named(self, word: str) -> list[str]:
        """The file of a script's name, or of a module's, which may be that of a command."""
        module = word.replace(".", "/")
        command = module.replace("dist_amp/", "dist_amp/commands/", 1)
        paths = (f"launch/{word}", f"{module}.py", f"{module}/__init__.py", f"{command}.py")
        return [path for path in paths if path in self.files and path != "dist_amp/__init__.py"]

    def named_in(self, text: str) -> set[str]:
        """The files of the scripts and modules that a script or config names."""
        words = re.findall(r"[\w.]+", text)
        return {file for word in words for file in self.named(word.strip("."))}

    def needs(self, file: str) -> set[str]:
        """The files that a file imports, in functions too, or that a script names."""
        path = self.files[file]
        if file.startswith("launch/"):
            return self.named_in(path.read_text(encoding="utf-8"))
        names = imports_of(path)
        found = [self.named(name) or self.named(name.rpartition(".")[0]) for name in names]
        return {needed for files in found for needed in files}

    def with_needs(self, files: Iterable[str]) -> set[str]:
        """These files with all that they need, but for features."""
        return closure(files, lambda file: self.needs(file) - self.feature_of.keys())

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Features with all that they need, in order."""

        def needs(name: str) -> set[str]:
            files = self.with_needs(self.features[name].files) - self.core
            needed = {other for file in files for other in self.needs(file)}
            return {self.feature_of[file] for file in needed if file in self.feature_of}

        found = closure(names, needs)
        return [name for name in self.features if name in found]

    def files_with(self, names: Iterable[str]) -> set[str]:
        """Core, these features and what they bring along."""
        own = [file for name in names for file in self.features[name].files]
        files = self.core | self.with_needs(own)
        parents = {f"{parent}/__init__.py" for file in files for parent in Path(file).parents}
        return files | parents & self.files.keys()


def closure(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """`start`, what follows on it, and so on."""
    found: set[T] = set()
    left = list(start)
    while left:
        if (item := left.pop()) not in found:
            found.add(item)
            left += following(item)
    return found


def parse(path: Path) -> ast.Module:
    """Errors: ConfigError if a file can't be read, or is not Python."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; fix the file") from None


def description(path: Path) -> tuple[str, str]:
    """(what it is, its page or "") by a file's docstring or first comments."""
    if path.suffix == ".py":
        text, end = ast.get_docstring(parse(path)) or "", "\n\n"
    else:
        comments = re.findall(r"(?m)^# (.*)", path.read_text(encoding="utf-8"))
        text, end = "\n".join(comments), r"\. |\n"
    docs = re.search(r"(?m)^Docs: (.+)$", text)
    about = " ".join(re.split(end, text, maxsplit=1)[0].split())
    return about.rstrip(".:"), docs[1] if docs else ""


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(imported(parse(path)))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a file imports, but under `if present(...)`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "present(" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imported(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)
