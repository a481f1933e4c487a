"""python -m dist_amp.new NAME [--with FEATURE,...] [--without FEATURE,...] [--task FILE.py:Class]

Make a project of your own in the folder NAME: your package NAME with a task to start from, and
beside it dist_amp with the features that you choose, tests, configs and scripts. Without a choice
it trains by DDP and FSDP2, resumes and reports. On a terminal without arguments it asks.

    dist_amp new my_project
    dist_amp new my_project --with ema,slurm --task my_file.py:MyTask
    dist_amp new my_project --with all --without hf_causal_lm
"""

import ast
import keyword
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dist_amp
from dist_amp.commands.base import BRANCH, git, message, run_git, user_of
from dist_amp.commands.parts import Package
from dist_amp.commands.project import Project
from dist_amp.config.features import METHODS
from dist_amp.distributed.signals import ignore_stop_signals
from dist_amp.errors import ConfigError, Failure, nearest_name
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, command

DEFAULT = ("console", "demo", "explain", "launch", "watchdog")
FOLDERS = ("configs", "dist_amp", "launch", "runs", "tests")  # of each project


@command("; nothing was made")
def main(argv: Sequence[str]) -> None:
    root = shipped_folder()
    package = Package(Path(dist_amp.__file__).parent, root / "launch")
    options = parse(argv, package)
    target = Path(options.name).expanduser()
    like = tomllib.loads(Path(options.like).read_text())["tool"]["dist_amp"] if options.like else {}
    check_folder(target)
    if not like:
        check_name(target, root)
    file, task = parse_task(options.task or f"{root}/template/example.py:Example")
    features = choose(
        package,
        [name for name in like.get("features", DEFAULT) if name in known(package)],
        named([*options.wanted, *read_by_methods(task)], package),
        named(options.without, package),
    )
    project = Project(target.name, root, package, features, file, task.name)
    try:
        lines = make(project, target, like.get("source") or source_of(package.folder.parent))
    except OSError as error:
        raise Failure(f"new {target}: {error}; nothing was made") from error
    if not like:
        print(
            f"{target}: {lines:,} lines of dist_amp with {', '.join(features) or 'no feature'}; "
            f"next: cd {target} && bash launch/demo.sh"
        )


def parse(argv: Sequence[str], package: Package) -> Namespace:
    parser = Parser("python -m dist_amp.new", __doc__, f"features:\n{list_of(package)}")
    parser.add_argument("name", nargs="?", default="", help="the new folder, named as your package")
    lists: dict[str, Any] = {"action": "append", "default": [], "metavar": "FEATURE,..."}
    parser.add_argument("--with", dest="wanted", help="optional features to add, or all", **lists)
    parser.add_argument("--without", help="optional features to leave out", **lists)
    parser.add_argument("--task", default="", metavar="FILE.py:Class", help="your task: copied")
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    parser.add_argument(
        "--like", default="", metavar="PYPROJECT.toml", help="the features of a project, for update"
    )
    options = parser.parse_args(argv)
    if not options.name and not options.yes and sys.stdin.isatty() and sys.stdout.isatty():
        options.name = input("name of your package: ").strip()
        print(list_of(package))
        options.wanted.append(input("features besides the main job, such as ema,compile: "))
        options.task = input("your task, as FILE.py:Class, or nothing for an example: ").strip()
    if not options.name:
        raise ConfigError("new: give the project a name, such as: dist_amp new my_project")
    return options


# --- what can be made


def check_folder(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"new {target}: this exists, and is not an empty folder; use another")
    if not target.parent.is_dir():
        raise ConfigError(f"new {target}: there is no folder {target.parent}; make it first")
    if shutil.which("git") is None:
        raise ConfigError("new: git is missing, which keeps the project's history; install it")


def check_name(target: Path, root: Path) -> None:
    """Errors: ConfigError for a name that can't be a package's, or is another module's."""
    name = target.name
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name[0] == "_":
        usable = name.replace("-", "_").lower()
        usable = f"{usable}_project" if keyword.iskeyword(usable) else usable
        usable = usable if usable.isidentifier() else "my_project"
        raise ConfigError(
            f"new {target}: {name!r} can't be a package's name, which has letters, digits and _, "
            f"and begins with a letter; use one such as {usable}"
        )
    spec = find_spec(name)
    taken = ""
    if name in FOLDERS:
        taken = "a folder of each project"
    elif (root / f"tests/{name}.py").exists() or (root / f"tests/{name}").exists():
        taken = "a module of its tests"
    elif spec and spec.origin:
        taken = f"already a module: {spec.origin}"
    if taken:
        raise ConfigError(f"new {target}: {name} is {taken}; use another name")


def parse_task(text: str) -> tuple[Path, ast.ClassDef]:
    """(file, class) of --task. Errors: ConfigError."""
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"--task {text} must be FILE.py:Class, with a file that exists")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--task {text}: {path} is not Python: {error}; fix it") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        has = ", ".join(classes) or "none"
        raise ConfigError(f"--task {text}: there is no class {name} in {path}, which has {has}")
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for module in names:
            if (path.parent / f"{module}.py").is_file():
                raise ConfigError(
                    f"--task {text}: {path} imports {module}, which lies beside it; only one file "
                    "is copied, so put both into one, or install it"
                )
    return path, classes[name]


# --- the features


def known(package: Package) -> list[str]:
    return [*package.features, *package.scripts]


def list_of(package: Package) -> str:
    """The features, one line each."""
    rows = {name: each.about for name, each in (package.features | package.scripts).items()}
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {about}" for name, about in rows.items())


def named(lists: Sequence[str], package: Package) -> list[str]:
    """The features in comma-separated lists. Errors: ConfigError for one that does not exist."""
    found = [word.strip() for word in ",".join(lists).split(",") if word.strip()]
    for word in found:
        if word not in (*known(package), "all"):
            near = nearest_name(word, known(package))
            hint = f"did you mean {near}?" if near else "dist_amp new --help lists them"
            raise ConfigError(f"there is no feature {word}; {hint}")
    return found


def read_by_methods(task: ast.ClassDef) -> list[str]:
    """The features without which a method of the task would be read by nothing."""
    bodies = [node.name for node in task.body if isinstance(node, ast.FunctionDef)]
    return [feature.rpartition(".")[2] for method, feature in METHODS if method in bodies]


def choose(
    package: Package, present: Sequence[str], wanted: Sequence[str], left_out: Sequence[str]
) -> list[str]:
    """`present` and `wanted` with what they need, less `left_out` and what needs it; says so.

    Errors: ConfigError if one that is wanted needs one that is left out.
    """
    if "all" in wanted:
        present, wanted = known(package), []
    blocked = {
        name: [other for other in left_out if other in package.chosen([name])]
        for name in (*present, *wanted)
    }
    for name in wanted:
        if blocked[name]:
            needs = ", ".join(blocked[name])
            raise ConfigError(f"{name} needs {needs}, which is to be left out; drop one of the two")
    asked = [name for name in (*present, *wanted) if not blocked[name]]
    chosen = package.chosen(asked)
    if added := [name for name in chosen if name not in asked]:
        print(f"with {', '.join(added)}, needed by the others")
    if gone := [name for name in present if blocked[name] and name not in left_out]:
        print(f"without {', '.join(gone)}, which need {', '.join(left_out)}")
    return chosen


# --- the project


def source_of(root: Path) -> str:
    """Where others find these files: the clone's remote if it has this commit, or this folder."""
    url = run_git(root, "remote", "get-url", "origin").stdout.strip()
    is_there = run_git(root, "branch", "--remotes", "--contains", "HEAD").stdout
    return url if (root / ".git").exists() and url and is_there else str(root)


def make(project: Project, target: Path, source: str) -> int:
    """Make the project, whose folder appears when it is complete; returns the package's lines."""
    parent = target.resolve().parent
    with tempfile.TemporaryDirectory(prefix=f".{project.name}.", dir=parent) as temporary:
        folder = Path(temporary, project.name)
        project.write(folder, source)
        git(folder, "init", "--quiet", "--initial-branch=main")
        git(folder, "add", "--all")
        words = ["-c", "commit.gpgsign=false", "commit", "--quiet", "--no-verify", "--message"]
        git(folder, *user_of(folder), *words, message(project.record(source)))
        git(folder, "branch", BRANCH)
        ignore_stop_signals((signal.SIGINT, signal.SIGTERM))  # from here on something was made
        os.replace(folder, target)
    paths = (target / "dist_amp").rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


if __name__ == "__main__":
    sys.exit(main())
