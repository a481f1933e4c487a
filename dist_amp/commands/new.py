"""python -m dist_amp.new NAME [--with FEATURE,...] [--without FEATURE,...] [--task FILE.py:Class]

Make a project of your own in the folder NAME: the package under that name, with its settings, tests
and scripts, and of the optional features only those that you choose; without a choice the smallest
that trains by DDP and FSDP2, resumes and reports. On a terminal without arguments it asks.

    dist_amp new my_project
    dist_amp new my_project --with ema,slurm --yes --task my_file.py:MyTask
    dist_amp new my_project --with all --without hf
"""

import ast
import keyword
import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dist_amp.commands.features import Table, choose, list_of, named, of_projects
from dist_amp.commands.project import Plan, make
from dist_amp.commands.project_tests import defined, imported
from dist_amp.errors import ConfigError, Failure
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, command

DEFAULT = ("console",)
FOLDERS = ("launch", "tests", "configs", "runs")  # of a project


@command("; nothing was made")
def main(argv: Sequence[str]) -> None:
    root = shipped_folder()
    table = of_projects(root)
    options = parse(argv, table)
    target = Path(os.path.expanduser(options.name))
    check_name(target, root)
    given = parse_task(options.task)
    wanted = named(options.wanted, table)
    left_out = named(options.without, table)
    task = None
    if given is not None:
        file, cls = given
        task = (file, cls.name)
        wanted += needed_by(cls, table, wanted, options.yes)
    present = [name for name in DEFAULT if name not in left_out]
    features = choose(table, present, wanted, left_out, options.yes)
    try:
        make(Plan(target.name, features, task), target, root)
    except OSError as error:
        raise Failure(f"new {target}: {error}; nothing was made") from error


def parse(argv: Sequence[str], table: Table) -> Namespace:
    parser = Parser("python -m dist_amp.new", __doc__, f"features:\n{list_of(table)}")
    parser.add_argument("name", nargs="?", default="", help="the new folder, named as the package")
    lists: dict[str, Any] = {"action": "append", "default": [], "metavar": "FEATURE,..."}
    parser.add_argument("--with", dest="wanted", help="optional features to add, or all", **lists)
    parser.add_argument("--without", help="optional features to leave out", **lists)
    parser.add_argument("--task", default="", metavar="FILE.py:Class", help="your task: copied")
    parser.add_argument("--yes", action="store_true", help="ask nothing; add what features need")
    options = parser.parse_args(argv)
    if not argv and sys.stdin.isatty() and sys.stdout.isatty():
        ask(options, table)
    if not options.name:
        raise ConfigError("new: give the project a name, such as: dist_amp new my_project")
    return options


def ask(options: Namespace, table: Table) -> None:
    """Complete the options on the terminal."""
    options.name = input("name of the new package: ").strip()
    print(list_of(table))
    options.wanted = [input("features besides the main job, such as ema,compile: ")]
    options.task = input("your task, as FILE.py:Class, or nothing for an example: ").strip()
    options.yes = True


def check_name(target: Path, root: Path) -> None:
    """Errors: ConfigError for a name or a folder that can't be the project's."""
    name = target.name
    if not re.fullmatch(r"[A-Za-z](\w*[A-Za-z0-9])?", name, re.ASCII) or keyword.iskeyword(name):
        usable = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789")
        raise ConfigError(
            f"new {target}: {name!r} can't be a package's name, which has letters, digits and _, "
            f"and begins with a letter; use one such as {usable.lower() or 'my_project'}"
        )
    spec = find_spec(name)
    taken = ""
    if name in FOLDERS:
        taken = "a folder of each project"
    elif (root / f"tests/{name}.py").is_file():
        taken = "a file of its tests"
    elif spec and spec.origin:
        taken = f"already a package: {spec.origin}"
    if taken:
        raise ConfigError(f"new {target}: {name} is {taken}; use another name")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"new {target}: this exists, and is not an empty folder; use another")
    if not target.parent.is_dir():
        raise ConfigError(f"new {target}: there is no folder {target.parent}; make it first")
    if shutil.which("git") is None:
        raise ConfigError("new: git is missing, which keeps the project's history; install it")


def parse_task(text: str) -> tuple[Path, ast.ClassDef] | None:
    """(file, class) of --task; None without one. Errors: ConfigError."""
    if not text:
        return None
    file, _, name = text.rpartition(":")
    path = Path(os.path.expanduser(file))
    if not path.is_file() or path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(f"--task {text} must be FILE.py:Class, with a file that exists")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--task {text}: {path} is not Python: {error}; fix it") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        has = ", ".join(classes) or "none"
        raise ConfigError(f"--task {text}: there is no class {name} in {path}, which has {has}")
    for module in imported([path]):
        if module and (path.parent / f"{module}.py").is_file():
            raise ConfigError(
                f"--task {text}: {path} imports {module}, which lies beside it; only one file is "
                "copied, so put both into one, or install it"
            )
    return path, classes[name]


def needed_by(cls: ast.ClassDef, table: Table, wanted: Sequence[str], yes: bool) -> list[str]:
    """The features that read the optional methods of the user's task; says which.

    Errors: ConfigError without `yes`, unless they are wanted anyway.
    """
    methods = {name for item in cls.body for name in defined(item)}
    needed = {}
    for feature, row in table.items():
        of_feature = methods.intersection(row.get("methods", ()))
        if of_feature and feature not in wanted and "all" not in wanted:
            needed[feature] = f"{' and '.join(sorted(of_feature))} by {feature}"
    if needed:
        said = f"{cls.name} has methods that features read: {', '.join(needed.values())}"
        if not yes:
            raise ConfigError(f"{said}; name them in --with, or give --yes")
        print(said)
    return list(needed)


if __name__ == "__main__":
    sys.exit(main())
