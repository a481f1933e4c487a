"""The files of a project that `dist_amp new` makes: whole files of this repository, and those from
template/ in which the project's name, features and dependencies are filled in.
"""

import ast
import json
import shutil
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

import tomli_w
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dist_amp
from dist_amp.commands.base import git
from dist_amp.commands.parts import EVERY_SCRIPT, Package, closure
from dist_amp.config.features import SETTINGS

# Imported names that differ from the distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
DISTRIBUTIONS |= {"mlflow": "mlflow-skinny"}
ALWAYS = {"torch", "tensorboard", "numpy"}  # torch imports the others
FOR_TESTS = {"pytest", "pytest-xdist", "ruff", "mypy"}
IGNORED = ".venv/\nruns/\n__pycache__/\n*.egg-info/\n.*_cache/\n"


@dataclass(frozen=True)
class Project:
    """root: the repository's other folders, as files.shipped_folder() says. file: the task's."""

    name: str
    root: Path
    package: Package
    features: list[str]
    file: Path
    task: str

    def record(self, source: str) -> dict[str, Any]:
        """[tool.dist_amp] of its pyproject.toml."""
        return {
            "version": dist_amp.__version__,
            "commit": commit_of(self.package.folder.parent),
            "source": source,
            "task": self.task,
            "features": self.features,
        }

    def write(self, folder: Path, source: str) -> None:
        own = folder / self.name
        for path in (own, folder / "tests", folder / "configs", folder / "launch"):
            path.mkdir(parents=True)
        for module in self.modules:
            copy(self.package.files[module], self.package.folder.parent, folder)
        copy(self.package.folder / "py.typed", self.package.folder.parent, folder)
        scripts = [
            self.package.scripts[each].files for each in self.features if self.is_script(each)
        ]
        for name in {*EVERY_SCRIPT, *(name for files in scripts for name in files)}:
            copy(self.root / "launch" / name, self.root, folder)
        for path in self.tests():
            copy(path, self.root, folder)
        copy(self.root / "Dockerfile", self.root, folder)
        (folder / ".gitignore").write_text(IGNORED)
        (own / "__init__.py").write_text(f'"""{self.name}: a task that dist_amp trains."""\n')
        shutil.copy(self.file, own / "task.py")
        self.write_configs(folder)
        self.write_texts(folder, source)

    @property
    def modules(self) -> set[str]:
        return self.package.files_with(self.features)

    def is_script(self, feature: str) -> bool:
        return feature in self.package.scripts

    def tests(self) -> set[Path]:
        """The tests of core and of the features, with the helpers that they import."""
        tests = self.root / "tests"
        start = [tests / "conftest.py", *(tests / "core").glob("test_*.py")]
        for path in (tests / "features").glob("test_*.py"):
            if self.package.feature_of_test(path) in self.features:
                start.append(path)

        def helpers(path: Path) -> list[Path]:
            names = [f"{name}.py" for name in modules_imported(path)]
            beside = [folder / name for folder in (tests, tests / "features") for name in names]
            return [each for each in beside if each.exists()]

        return closure(start, helpers)

    # --- configs

    def write_configs(self, folder: Path) -> None:
        """Those whose settings and modules are there; they train the project's task, unless they
        name another.
        """
        shutil.copy(self.root / "configs/schema.json", folder / "configs")
        for path in (self.root / "configs").glob("*.toml"):
            text = path.read_text(encoding="utf-8")
            if path.name != "demo.toml" and self.can_use(text):
                if "target" not in tomllib.loads(text).get("task", {}):
                    text += f'\n[task]\ntarget = "{self.name}.task:{self.task}"\n'
                (folder / "configs" / path.name).write_text(text, encoding="utf-8")

    def can_use(self, config: str) -> bool:
        """Whether the project has all that a config's text names."""
        for module in self.package.files.keys() - self.modules:
            if f"dist_amp.{module.removeprefix('commands.')}" in config:
                return False
        sections = tomllib.loads(config)
        for key, free, feature in SETTINGS:
            section, name = key.split(".")
            value = sections.get(section, {}).get(name, free[0])
            if value not in free and feature not in self.modules:
                return False
        return True

    # --- pyproject.toml, README.md and the others of template/

    def write_texts(self, folder: Path, source: str) -> None:
        ours = (self.root / "pyproject.toml").read_text(encoding="utf-8")
        requirements, extras = self.requirements(folder, tomllib.loads(ours)["project"])
        about = self.package.features | self.package.scripts
        words = {
            "name": self.name,
            "task": self.task,
            "requirements": tomli_w.dumps({"dependencies": requirements}),
            "extras": tomli_w.dumps(extras),
            "record": tomli_w.dumps(self.record(source)),
            "features": "\n".join(
                f"| {name} | {about[name].about.replace('|', ', ')} | {about[name].docs} |"
                for name in self.features
            ),
        }
        for template, file in (
            ("pyproject.toml.in", "pyproject.toml"),
            ("README.md.in", "README.md"),
            ("demo.toml.in", "configs/demo.toml"),
            ("test_task.py.in", "tests/test_own_task.py"),
        ):
            text = (self.root / "template" / template).read_text(encoding="utf-8")
            (folder / file).write_text(Template(text).substitute(words), encoding="utf-8")
        tools = ours[ours.index("[tool.pytest.ini_options]") : ours.index("[dependency-groups]")]
        with (folder / "pyproject.toml").open("a") as file_:
            file_.write(tools.replace(', "examples"]', "]").rstrip() + "\n")
        pins = (self.root / "launch/constraints.txt").read_text(encoding="utf-8")
        needed = needed_by([*requirements, *(line for lines in extras.values() for line in lines)])
        lines = ["# The versions that dist_amp was tested with, of what pyproject.toml requires."]
        for line in pins.splitlines():
            if not line.startswith("#") and distribution(line) in needed:
                lines.append(line)
        (folder / "launch/constraints.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def requirements(
        self, folder: Path, ours: dict[str, Any]
    ) -> tuple[list[str], dict[str, list[str]]]:
        """(dependencies, extras) of this repository's that the project's code imports."""
        used = ALWAYS | imported(path for path in folder.rglob("*.py") if "tests" not in path.parts)
        dependencies = [line for line in ours["dependencies"] if distribution(line) in used]
        every = [ours["dependencies"], *ours["optional-dependencies"].values()]
        of_task = imported([folder / self.name / "task.py"])
        of_task -= {distribution(line) for lines in every for line in lines}
        dependencies += sorted(of_task - {"dist-amp", canonicalize_name(self.name)})
        extras = {}
        for extra, lines in ours["optional-dependencies"].items():
            if extra not in ("test", "bench", "engines") and used & set(map(distribution, lines)):
                extras[extra] = lines
        first, *for_tests = ours["optional-dependencies"]["test"]  # dist_amp[hf,...], and others
        shared = [extra for extra in extras if extra in Requirement(first).extras]
        tests = [f"{self.name}[{','.join(shared)}]"] if shared else []
        tests += [line for line in for_tests if distribution(line) in used | FOR_TESTS]
        return dependencies, {**extras, "test": tests}


def copy(path: Path, root: Path, folder: Path) -> None:
    target = folder / path.relative_to(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def imported(paths: Iterable[Path]) -> set[str]:
    """The distributions that files import, in functions too, but for Python's own modules."""
    found = {name for path in paths for name in modules_imported(path)}
    return {
        canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in found - sys.stdlib_module_names
    }


def modules_imported(path: Path) -> set[str]:
    """The top-level modules that a file imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        found |= {name.partition(".")[0] for name in names}
    return found


def distribution(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def needed_by(requirements: Iterable[str]) -> set[str]:
    """Names of what these need, directly or not, as far as it is installed here."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        each = left.pop()
        for extra in ("", *each.extras):
            key = (canonicalize_name(each.name), extra)
            if key in found:
                continue
            found.add(key)
            needs: Iterable[str] = ()
            with suppress(metadata.PackageNotFoundError):
                needs = metadata.requires(each.name) or ()
            for need in map(Requirement, needs):
                if need.marker is None or need.marker.evaluate({"extra": extra}):
                    left.append(need)
    return {name for name, _ in found}


def commit_of(root: Path) -> str:
    """The commit of the clone, or of what pip installed; "" if unknown, or if files differ."""
    if (root / ".git").exists():
        return "" if git(root, "status", "--porcelain") else git(root, "rev-parse", "HEAD")
    try:
        origin = metadata.distribution("dist_amp").read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        return ""
    return str(json.loads(origin).get("vcs_info", {}).get("commit_id", ""))
