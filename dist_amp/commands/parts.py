"""The parts of a project: core, and features, which are files that may be missing.

A feature is a file, or a folder, whose docstring has a line "Docs: PAGE"; in a script of launch/,
this is a comment. Its test is named after it. A file needs what it imports, except under
`if present(...)`; a script needs the files that its text mentions; a test needs its helpers.
Core is what the main job, its tests and every project's scripts need, except features.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CORE = [f"launch/{name}" for name in ("constraints.txt", "demo.sh", "setup.sh", "test.sh")]
CORE += [f"dist_amp/commands/{name}.py" for name in ("__main__", "adopt", "update")]
CORE += ["dist_amp/train.py", "tests/conftest.py"]
TESTS = ("tests", "tests.core", "tests.features")


class Feature(NamedTuple):
    about: str  # the first sentence of its docstring
    docs: str  # its page in docs/
    files: list[str]


class Parts:
    """The files of a clone by their paths in a project, such as "dist_amp/optimizers/ema.py"."""

    def __init__(self, package: Path, root: Path):
        places = [(package.parent, "dist_amp/**/*.py"), (root, "launch/*.*")]
        places += [(root, f"{folder.replace('.', '/')}/*.py") for folder in TESTS]
        paths = [(base, path) for base, pattern in places for path in sorted(base.glob(pattern))]
        self.files = {str(path.relative_to(base)): path for base, path in paths}
        self.named: dict[str, str] = {}  # {name of a module, command or script: its file}
        for file in self.files:
            name = re.sub(r"(/__init__)?\.py$", "", file).replace("/", ".")
            script = file.removeprefix("launch/")
            self.named |= {name: file, name.replace(".commands.", "."): file, script: file}
        self.features: dict[str, Feature] = {}
        for file, path in self.files.items():
            text = path.read_text(encoding="utf-8")
            if docs := re.search(r"(?m)^(?:# )?Docs: (.+)$", text):
                text = re.sub(r"(?m)^(#!.*\n|# ?)", "", text).strip('"')
                about = re.split(r"(?<=\w)\. |[.:]?\n\n|:\n", text)[0]
                start = file.removesuffix("__init__.py")  # a folder is one feature
                files = [other for other in self.files if other.startswith(start)]
                self.features[Path(start).stem] = Feature(" ".join(about.split()), docs[1], files)
        for file in self.files:
            test = file.removeprefix("tests/features/test_").replace(".py", "_")
            if names := [name for name in self.features if test.startswith(f"{name}_")]:
                self.features[max(names, key=len)].files.append(file)
        # {file of a feature: all files of that feature}
        self.unit = {file: each.files for each in self.features.values() for file in each.files}
        core = CORE + [file for file in self.files if file.startswith("tests/core/test_")]
        self.core = closure(core, lambda file: self.needs(file) - self.unit.keys())

    def named_in(self, text: str) -> set[str]:
        """The files of the modules, commands and scripts that a text mentions."""
        words = re.findall(r"\w[\w.]*\w", text)
        return {self.named[word] for word in words if word in self.named}

    def needs(self, file: str) -> set[str]:
        """The files that a file imports, also in functions, or that a script mentions."""
        path = self.files[file]
        if file.startswith("launch/"):
            return self.named_in(path.read_text(encoding="utf-8"))
        names = [*imports_of(path), *(".".join(each.parts) for each in Path(file).parents)]
        folders = TESTS if file.startswith("tests/") else ("",)
        return self.named_in(" ".join(f"{folder}.{name}" for folder in folders for name in names))

    def files_with(self, names: Iterable[str]) -> set[str]:
        """The files of core, and of these features with all that they need."""

        def needs(file: str) -> list[str]:
            files = self.needs(file) if file not in self.core else ()
            return [other for need in files for other in self.unit.get(need, [need])]

        start = [file for name in names for file in self.features[name].files]
        return self.core | closure(start, needs)

    def chosen(self, names: Iterable[str]) -> list[str]:
        files = self.files_with(names)
        return [name for name, feature in self.features.items() if feature.files[0] in files]


def closure(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """`start`, what follows from it, and so on: the transitive closure."""
    found: set[T] = set()
    left = list(start)
    while left:
        if (item := left.pop()) not in found:
            found.add(item)
            left += following(item)
    return found


@cache
def imports_of(path: Path) -> list[str]:
    return list(imported(ast.parse(path.read_text(encoding="utf-8"), str(path))))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a file imports, except under `if present(...)`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.If) and "present(" in ast.unparse(node.test):
            yield from imported(ast.Module(node.orelse, []))
        elif not isinstance(node, ast.expr):
            yield from imported(node)
