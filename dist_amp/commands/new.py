"""python -m dist_amp.new NAME [--with FEATURE,...] [--task FILE.py:Class] [--yes]

Create a project of your own, a git repository in the folder NAME: your package NAME with an example
task, and beside it dist_amp with the features that you choose, tests, configs and scripts. Without
--with it trains with DDP and FSDP2, resumes and reports. On a terminal, without NAME, it asks.

    dist_amp new my_project
    dist_amp new my_project --with ema,slurm --task my_file.py:MyTask
    dist_amp new my_project --with all
"""

import keyword
import re
import shutil
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
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
from dist_amp.commands.parts import Parts, closure, imports_of
from dist_amp.commands.update import BRANCH, git, user_of
from dist_amp.config.features import METHODS, SETTINGS
from dist_amp.errors import ConfigError, Failure, nearest_name
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, command

DEFAULT = ("console", "demo", "explain", "launch", "watchdog")
# {module: the distribution that has it}, where the names differ.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
DISTRIBUTIONS |= {"mlflow": "mlflow-skinny"}
ALWAYS = {"torch", "tensorboard", "numpy"}  # torch imports tensorboard and numpy


@command("; nothing was made")
def main(argv: Sequence[str]) -> None:
    root = shipped_folder()
    package = Path(dist_amp.__file__).parent
    parts = Parts(package, root)
    options = parse_options(argv, parts)
    target = Path(options.name).expanduser()
    like = {"features": DEFAULT}
    if options.like:
        like = tomllib.loads(Path(options.like).read_text(encoding="utf-8"))["tool"]["dist_amp"]
    else:
        check_name(target, root)
    file, _, task = (options.task or f"{root}/template/NAME/task.py:Example").rpartition(":")
    path = Path(file).expanduser()
    code = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not re.search(rf"(?m)^class {re.escape(task)}\b", code):
        raise ConfigError(
            f"--task {options.task} must be FILE.py:Class, an existing file that defines the class"
        )
    source, commit = source_of(package.parent)
    try:
        record = {
            "name": target.name,
            "version": dist_amp.__version__,
            "commit": commit,
            "source": like.get("source") or source,
            "task": task,
            "features": choose(parts, like["features"], options, code),
        }
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            folder = Path(temporary, target.name)
            write_project(folder, root, parts, record, path)
            git(folder, "init", "--quiet", "--initial-branch=main")
            git(folder, "add", "--all")
            words = ["-c", "commit.gpgsign=false", "commit", "--quiet", "--no-verify"]
            git(folder, *user_of(folder), *words, "-m", f"Made by dist_amp {dist_amp.__version__}")
            git(folder, "branch", BRANCH)
            folder.rename(target)
    except SyntaxError as error:
        raise ConfigError(f"new {target}: {error}; fix this file") from None
    except OSError as error:
        raise Failure(f"new {target}: {error}; nothing was made") from error
    print(f"{target}: dist_amp with {', '.join(record['features'])}")
    print(f"next: cd {target} && bash launch/demo.sh")


def parse_options(argv: Sequence[str], parts: Parts) -> Namespace:
    about = "\n".join(f"  {name:<25} {each.about}" for name, each in parts.features.items())
    parser = Parser("python -m dist_amp.new", __doc__, f"features:\n{about}")
    parser.add_argument("name", nargs="?", default="", help="the new folder's and package's name")
    some = {"default": "", "metavar": "FEATURE,..."}
    parser.add_argument("--with", dest="added", help="features to add, or all", **some)
    parser.add_argument("--task", default="", metavar="FILE.py:Class", help="the task to copy")
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    parser.add_argument("--like", default="", metavar="PYPROJECT.toml", help="for dist_amp update")
    parser.add_argument("--without", help="features to leave out; for dist_amp adopt", **some)
    options = parser.parse_args(argv)
    if not options.name and not options.yes and sys.stdin.isatty() and sys.stdout.isatty():
        options.name = input("name of your package: ").strip()
        print(about)
        options.added = input("features besides the main job, such as ema,compile: ")
        options.task = input("your task, as FILE.py:Class (empty: an example): ").strip()
    if not options.name:
        raise ConfigError("new: give the project a name, such as: dist_amp new my_project")
    return options


def check_name(target: Path, root: Path) -> None:
    """Raises ConfigError if the folder exists, or its name is not a package name or is taken."""
    name = target.name
    places = [root / name, root / f"tests/{name}.py", root / f"tests/{name}"]
    if target.exists():
        reason = "it exists already"
    elif not (name.isascii() and name.isidentifier() and not keyword.iskeyword(name)):
        reason = "a package's name has letters, digits and _, and is not a keyword of Python"
    elif (
        name == "runs"
        or any(place.exists() for place in places)
        or ((spec := find_spec(name)) and spec.origin)
    ):
        reason = f"{name} is the name of a module, or of something in each project"
    else:
        return
    legal_name = re.sub(r"\W", "_", name).strip("_")
    raise ConfigError(f"new {target}: {reason}; use another name, such as my_{legal_name}")


def choose(parts: Parts, present: Sequence[str], options: Namespace, code: str) -> list[str]:
    """The project's features: those present, those to add and those that use a method which the
    task in `code` defines, without those to leave out; and all that they need. Raises ConfigError.
    """
    added, left_out = (re.findall(r"[^\s,]+", text) for text in (options.added, options.without))
    for word in (*added, *left_out):
        if word not in (*parts.features, "all"):
            near = nearest_name(word, parts.features)
            hint = f"did you mean {near}?" if near else "dist_amp new --help lists them"
            raise ConfigError(f"there is no feature {word}; {hint}")
    added += [name.rpartition(".")[2] for method, name in METHODS if f" def {method}(" in code]
    selected = parts.features.keys() & {*present, *added} if "all" not in added else parts.features
    chosen = parts.chosen(name for name in selected if name not in left_out)
    for name in left_out:
        if name in chosen:
            users = [user for user in chosen if user != name and name in parts.chosen([user])]
            raise ConfigError(f"{name} is needed by {', '.join(users)}; leave that out, too")
    return chosen


def source_of(root: Path) -> tuple[str, str]:
    """Returns (source, commit) of this clone. source: its remote, if that has the commit; else its
    folder. commit: "" without git, or with uncommitted changes.
    """
    if not (root / ".git").exists() or git(root, "status", "--porcelain"):
        return str(root), ""
    url = git(root, "config", "--default=", "remote.origin.url")
    is_there = git(root, "branch", "--remotes", "--contains", "HEAD")
    return url if url and is_there else str(root), git(root, "rev-parse", "HEAD")


def write_project(
    folder: Path, root: Path, parts: Parts, record: dict[str, Any], task: Path
) -> None:
    """Copy files of the clone, or of what pip installed, and write the filled-in templates.

    record: becomes [tool.dist_amp] of pyproject.toml. task: the file with the user's task.
    """
    name = record["name"]
    files = {file: parts.files[file] for file in parts.files_with(record["features"])}
    files |= {file: root / file for file in ("Dockerfile", "configs/schema.json")}
    files[f"{name}/task.py"] = task
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
    dependencies, extras = requirements(files, task, tomllib.loads(pyproject)["project"])
    tools = pyproject[pyproject.index("[tool.pytest") : pyproject.index("[dependency-groups]")]
    features = [(feature, parts.features[feature]) for feature in record["features"]]
    words = {
        "name": name,
        "task": record["task"],
        "requirements": tomli_w.dumps({"dependencies": dependencies}),
        "extras": tomli_w.dumps(extras),
        "record": tomli_w.dumps(record),
        "tools": tools.replace(', "examples"]', "]").rstrip(),
        "features": "\n".join(f"- {name}, {each.docs}: {each.about}" for name, each in features),
    }
    for path in (root / "template").rglob("*.in"):
        file = str(path.relative_to(root / "template").with_suffix("")).replace("NAME", name)
        text = Template(path.read_text(encoding="utf-8")).substitute(words)
        (folder / file).write_text(text, encoding="utf-8")
    # Pin what the project needs, directly or not.
    needed = needed_by([*dependencies, *chain(*extras.values())])
    pins = (root / "launch/constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = ["# What pyproject.toml requires, in the versions that dist_amp was tested with."]
    lines += [line for line in pins if line[0] != "#" and distribution(line) in needed]
    (folder / "launch/constraints.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def is_usable(config: str, parts: Parts, files: Iterable[str]) -> bool:
    """Whether `files` has what a config needs: what it mentions, and features that it turns on."""
    needed = parts.named_in(config)
    sections = tomllib.loads(config)
    for key, core_values, feature in SETTINGS:
        section, name = key.split(".")
        if sections.get(section, {}).get(name, core_values[0]) not in core_values:
            needed.add(f"dist_amp/{feature.replace('.', '/')}.py")
    return needed.issubset(files)


def requirements(
    files: dict[str, Path], task: Path, declared: dict[str, Any]
) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the (dependencies, extras) that a project's files and task import."""
    code = [path for file, path in files.items() if re.match(r"(?!tests/).*\.py$", file)]
    used = ALWAYS.union(*(distributions(imports_of(path)) for path in code))
    optional = declared["optional-dependencies"]
    known = map(distribution, [*declared["dependencies"], *chain(*optional.values())])
    dependencies = [line for line in declared["dependencies"] if distribution(line) in used]
    dependencies += sorted(distributions(imports_of(task)).difference(known))
    extras = {
        extra: lines
        for extra, lines in optional.items()
        if extra not in ("test", "bench") and used & set(map(distribution, lines))
    }
    for_tests, *tools = optional["test"]  # first dist_amp[hf,...], then pytest and others
    more = [extras.get(extra, []) for extra in sorted(Requirement(for_tests).extras)]
    return dependencies, {**extras, "test": [*tools, *chain(*more)]}


def distributions(imports: Iterable[str]) -> set[str]:
    """The distributions that provide these modules, except dist_amp and the standard library."""
    modules = {name.partition(".")[0] for name in imports}
    modules -= {"dist_amp", *sys.stdlib_module_names}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in modules}


def distribution(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def needed_by(requirements: Iterable[str]) -> set[str]:
    """The names of these and of all their dependencies that are installed here."""

    def needs(line: str) -> Iterator[str]:
        user = Requirement(line)
        with suppress(metadata.PackageNotFoundError):
            for need in map(Requirement, metadata.requires(user.name) or ()):
                extras = [{"extra": extra} for extra in ("", *user.extras)]
                if need.marker is None or any(map(need.marker.evaluate, extras)):
                    yield str(need)

    return {distribution(line) for line in closure(requirements, needs)}


if __name__ == "__main__":
    sys.exit(main())
