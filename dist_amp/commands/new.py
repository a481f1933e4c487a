"""python -m dist_amp.new NAME [--with FEATURE,...] [--task FILE.py:Class] [--yes]

Make a project of your own in the folder NAME: your package NAME with a task to start from, and
beside it dist_amp with the features that you choose, tests, configs and scripts. Without a choice
it trains by DDP and FSDP2, resumes and reports. On a terminal without arguments it asks.

    dist_amp new my_project
    dist_amp new my_project --with ema,slurm --task my_file.py:MyTask
    dist_amp new my_project --with all
"""

import ast
import keyword
import shutil
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any

import tomli_w
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dist_amp
from dist_amp.commands.parts import Parts, closure, imports_of, parse
from dist_amp.commands.update import BRANCH, git, run_git, user_of
from dist_amp.config.features import METHODS, SETTINGS
from dist_amp.errors import ConfigError, Failure, nearest_name
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, command

DEFAULT = ("console", "demo", "explain", "launch", "watchdog")
# Imported names that differ from the distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
DISTRIBUTIONS |= {"mlflow": "mlflow-skinny"}
ALWAYS = {"torch", "tensorboard", "numpy"}  # torch imports the others
FOR_TESTS = {"pytest", "pytest-xdist", "ruff", "mypy"}
TEMPLATES = {
    "gitignore.in": ".gitignore",
    "init.py.in": "$name/__init__.py",
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "demo.toml.in": "configs/demo.toml",
    "test_task.py.in": "tests/test_own_task.py",
}


@command("; nothing was made")
def main(argv: Sequence[str]) -> None:
    root = shipped_folder()
    package = Path(dist_amp.__file__).parent
    parts = Parts(package, root / "launch")
    options = parse_options(argv, parts)
    target = Path(options.name).expanduser()
    like = {"features": DEFAULT}
    if options.like:
        like = tomllib.loads(Path(options.like).read_text(encoding="utf-8"))["tool"]["dist_amp"]
    else:
        check_name(target, root)
    file, task = find_task(options.task or f"{root}/template/example.py:Example")
    source, commit = source_of(package.parent)
    record = {
        "name": target.name,
        "version": dist_amp.__version__,
        "commit": commit,
        "source": like.get("source") or source,
        "task": task.name,
        "features": choose(parts, like["features"], options, task),
    }
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            folder = Path(temporary, target.name)
            write_project(folder, root, parts, record, file)
            git(folder, "init", "--quiet", "--initial-branch=main")
            git(folder, "add", "--all")
            words = ["-c", "commit.gpgsign=false", "commit", "--quiet", "--no-verify"]
            git(folder, *user_of(folder), *words, "-m", f"Made by dist_amp {dist_amp.__version__}")
            git(folder, "branch", BRANCH)
            folder.rename(target)
    except OSError as error:
        raise Failure(f"new {target}: {error}; nothing was made") from error
    if not options.like:
        print(f"{target}: dist_amp with {', '.join(record['features'])}")
        print(f"next: cd {target} && bash launch/demo.sh")


def parse_options(argv: Sequence[str], parts: Parts) -> Namespace:
    about = "\n".join(f"  {name:<25} {each.about}" for name, each in parts.features.items())
    parser = Parser("python -m dist_amp.new", __doc__, f"features:\n{about}")
    parser.add_argument("name", nargs="?", default="", help="the new folder, named as your package")
    some = {"default": "", "metavar": "FEATURE,..."}
    parser.add_argument("--with", dest="added", help="features to add, or all", **some)
    parser.add_argument("--task", default="", metavar="FILE.py:Class", help="your task: copied")
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    parser.add_argument("--like", default="", metavar="PYPROJECT.toml", help="for dist_amp update")
    parser.add_argument("--without", help="for dist_amp adopt", **some)
    options = parser.parse_args(argv)
    if not options.name and not options.yes and sys.stdin.isatty() and sys.stdout.isatty():
        options.name = input("name of your package: ").strip()
        print(about)
        options.added = input("features besides the main job, such as ema,compile: ")
        options.task = input("your task, as FILE.py:Class, or nothing for an example: ").strip()
    if not options.name:
        raise ConfigError("new: give the project a name, such as: dist_amp new my_project")
    return options


def check_name(target: Path, root: Path) -> None:
    """Errors: ConfigError for what exists, can't be a package's name, or is another module's."""
    name = target.name
    if target.exists():
        raise ConfigError(f"new {target}: this exists; use another name, or remove it")
    is_name = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    if not is_name:
        raise ConfigError(
            f"new {target}: a package's name has letters, digits and _, and is no word of Python; "
            f"use one such as my_{name.replace('-', '_').lower().strip('_')}"
        )
    spec = find_spec(name)
    places = [root / name, root / f"tests/{name}.py", root / f"tests/{name}"]
    if name == "runs" or (spec and spec.origin) or any(place.exists() for place in places):
        raise ConfigError(
            f"new {target}: {name} is the name of a module, or of something in each project; use "
            f"another, such as my_{name}"
        )


def find_task(text: str) -> tuple[Path, ast.ClassDef]:
    """(file, class) of --task."""
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    for node in parse(path).body if path.is_file() else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return path, node
    raise ConfigError(f"--task {text} must be FILE.py:Class, a class in a file that exists")


def choose(
    parts: Parts, present: Sequence[str], options: Namespace, task: ast.ClassDef
) -> list[str]:
    """The features that are present or added, less those to leave out, with all that they need."""
    known = list(parts.features)
    added = [word.strip() for word in options.added.split(",") if word.strip()]
    left_out = [word.strip() for word in options.without.split(",") if word.strip()]
    for word in (*added, *left_out):
        if word not in (*known, "all"):
            near = nearest_name(word, known)
            hint = f"did you mean {near}?" if near else "dist_amp new --help lists them"
            raise ConfigError(f"there is no feature {word}; {hint}")
    methods = {node.name for node in task.body if isinstance(node, ast.FunctionDef)}
    added += [feature.rpartition(".")[2] for method, feature in METHODS if method in methods]
    selected = known if "all" in added else [*present, *added]
    selected = [name for name in known if name in selected and name not in left_out]
    chosen = parts.chosen(selected)
    for name in left_out:
        if users := [user for user in selected if name in parts.chosen([user])]:
            raise ConfigError(f"{name} is needed by {', '.join(users)}; leave that out, too")
    if more := [name for name in chosen if name not in selected]:
        print(f"with {', '.join(more)}, needed by the others")
    return chosen


def source_of(root: Path) -> tuple[str, str]:
    """Where these files are: the clone's remote if it has this commit, or else this folder; and the
    commit, "" if there is none or files differ from it.
    """
    if not (root / ".git").exists():
        return str(root), ""
    url = run_git(root, "remote", "get-url", "origin").stdout.strip()
    is_there = run_git(root, "branch", "--remotes", "--contains", "HEAD").stdout
    is_clean = not git(root, "status", "--porcelain")
    commit = git(root, "rev-parse", "HEAD") if is_clean else ""
    return url if url and is_there else str(root), commit


def write_project(
    folder: Path, root: Path, parts: Parts, record: dict[str, Any], task: Path
) -> None:
    """Whole files of the clone, or of what pip installed, and the filled-in templates.

    record: for [tool.dist_amp]. task: the file with the user's task.
    """
    name, features = record["name"], record["features"]
    files = {file: parts.files[file] for file in parts.files_with(features)}
    files |= {file: root / file for file in ("Dockerfile", "configs/schema.json")}
    files[f"{name}/task.py"] = task
    for path in tests_of(root / "tests", parts, features):
        files[f"tests/{path.relative_to(root / 'tests')}"] = path
    for file, path in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / file)
    for path in (root / "configs").glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        if path.name != "demo.toml" and is_usable(text, parts, files):
            if "target" not in tomllib.loads(text).get("task", {}):
                text += f'\n[task]\ntarget = "{name}.task:{record["task"]}"\n'
            (folder / "configs" / path.name).write_text(text, encoding="utf-8")
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    dependencies, extras = requirements(folder, task, tomllib.loads(pyproject)["project"])
    tools = pyproject[pyproject.index("[tool.pytest") : pyproject.index("[dependency-groups]")]
    words = {
        "name": name,
        "task": record["task"],
        "requirements": tomli_w.dumps({"dependencies": dependencies}),
        "extras": tomli_w.dumps(extras),
        "record": tomli_w.dumps(record),
        "tools": tools.replace(', "examples"]', "]").rstrip(),
        "features": "\n".join(
            f"- {feature}, {parts.features[feature].docs}: {parts.features[feature].about}"
            for feature in features
        ),
    }
    for template, file in TEMPLATES.items():
        text = (root / "template" / template).read_text(encoding="utf-8")
        target = folder / Template(file).substitute(words)
        target.write_text(Template(text).substitute(words), encoding="utf-8")
    needed = needed_by([*dependencies, *chain(*extras.values())])
    pins = (root / "launch/constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = ["# The versions that dist_amp was tested with, of what pyproject.toml requires."]
    lines += [line for line in pins if line[0] != "#" and distribution(line) in needed]
    (folder / "launch/constraints.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def tests_of(tests: Path, parts: Parts, features: Sequence[str]) -> set[Path]:
    """The tests of core and of the features, with the helpers that they import."""
    start = [tests / "conftest.py", *(tests / "core").glob("test_*.py")]
    for path in (tests / "features").glob("test_*.py"):
        if parts.feature_of_test(path) in features:
            start.append(path)

    def helpers(path: Path) -> list[Path]:
        names = {f"{name.partition('.')[0]}.py" for name in imports_of(path)}
        beside = [folder / name for folder in (tests, tests / "features") for name in names]
        return [path for path in beside if path.exists()]

    return closure(start, helpers)


def is_usable(config: str, parts: Parts, files: Iterable[str]) -> bool:
    """Whether these files have all that a config's text and settings name."""
    named = parts.named_in(config)
    sections = tomllib.loads(config)
    for key, free, feature in SETTINGS:
        section, name = key.split(".")
        if sections.get(section, {}).get(name, free[0]) not in free:
            named.add(f"dist_amp/{feature.replace('.', '/')}.py")
    return named.issubset(files)


def requirements(
    folder: Path, task: Path, ours: dict[str, Any]
) -> tuple[list[str], dict[str, list[str]]]:
    """(dependencies, extras) of this package's that a project's code imports."""
    paths = [path for path in folder.rglob("*.py") if "tests" not in path.parts]
    used = ALWAYS.union(*(distributions(imports_of(path)) for path in paths))
    optional = ours["optional-dependencies"]
    extras = {
        extra: lines
        for extra, lines in optional.items()
        if extra not in ("test", "bench") and used & set(map(distribution, lines))
    }
    first, *for_tests = optional["test"]  # dist_amp[hf,...], and others
    tests = [line for line in for_tests if distribution(line) in used | FOR_TESTS]
    tests += [
        line for extra in extras if extra in Requirement(first).extras for line in extras[extra]
    ]
    known = map(distribution, [*ours["dependencies"], *chain(*optional.values())])
    of_task = sorted(distributions(imports_of(task)).difference(known))
    dependencies = [line for line in ours["dependencies"] if distribution(line) in used]
    return [*dependencies, *of_task], {**extras, "test": tests}


def distributions(imports: Iterable[str]) -> set[str]:
    """The distributions of modules' dotted names, but for dist_amp and Python's own."""
    modules = {name.partition(".")[0] for name in imports}
    modules -= {"dist_amp", *sys.stdlib_module_names}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in modules}


def distribution(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def needed_by(requirements: Iterable[str]) -> set[str]:
    """Names of what these need, directly or not, as far as it is installed here."""

    def needs(line: str) -> list[str]:
        user = Requirement(line)
        found = []
        with suppress(metadata.PackageNotFoundError):
            for need in metadata.requires(user.name) or ():
                marker = Requirement(need).marker
                extras = ("", *user.extras)
                if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                    found.append(need)
        return found

    return {distribution(line) for line in closure(requirements, needs)}


if __name__ == "__main__":
    sys.exit(main())
