"""python -m dist_amp.new NAME [--with FEATURE,...] [--task FILE.py:Class]

Make a project of your own in the folder NAME: your package NAME with a task to start from, and
beside it dist_amp with the features that you choose, tests, configs and scripts. Without a choice
it trains by DDP and FSDP2, resumes and reports.

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
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

import dist_amp
from dist_amp.commands.parts import Parts
from dist_amp.commands.update import BRANCH, COMMITTER, git
from dist_amp.errors import ConfigError, Failure, nearest_name
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, command

DEFAULT = ("console", "demo", "explain", "launch", "watchdog")
OF_EACH_PROJECT = ("configs", "launch", "runs", "tests")  # folders
OF_THE_CLONE = ("bench", "clone", "docs", "engines")  # extras that no project needs


@command("; nothing was made")
def main(argv: Sequence[str]) -> None:
    root = shipped_folder()
    package = Path(dist_amp.__file__).parent
    parts = Parts(package, root)
    about = "\n".join(f"  {name:<25} {each.about}" for name, each in parts.features.items())
    parser = Parser("python -m dist_amp.new", __doc__, f"features:\n{about}")
    parser.add_argument("name", metavar="NAME", help="the new folder, named as your package")
    some = {"default": "", "metavar": "FEATURE,..."}
    parser.add_argument("--with", dest="added", help="features to add, or all", **some)
    parser.add_argument("--task", default="", metavar="FILE.py:Class", help="your task: copied")
    parser.add_argument("--like", default="", metavar="PYPROJECT.toml", help="for dist_amp update")
    parser.add_argument("--without", help="for dist_amp adopt", **some)
    options = parser.parse_args(argv)
    target = Path(options.name).expanduser()
    like = {"features": DEFAULT, "source": str(package.parent)}
    if options.like:
        like |= tomllib.loads(Path(options.like).read_text(encoding="utf-8"))["tool"]["dist_amp"]
    else:
        check_name(target)
    file, _, task = (options.task or f"{root}/template/NAME/task.py:Example").rpartition(":")
    path = Path(file).expanduser()
    code = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not re.search(rf"(?m)^class {re.escape(task)}\b", code):
        raise ConfigError(
            f"--task {options.task} must be FILE.py:Class, a class in a file that exists"
        )
    record = {
        "name": target.name,
        "version": dist_amp.__version__,
        "commit": commit_of(package.parent),
        "source": like["source"],
        "task": task,
        "features": choose(parts, like["features"], options),
    }
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            folder = Path(temporary, target.name)
            write_project(folder, root, parts, record, path)
            git(folder, "init", "--quiet", "--initial-branch=main")
            git(folder, "add", "--all")
            words = ["-c", "commit.gpgsign=false", "commit", "--quiet", "--no-verify"]
            git(folder, *COMMITTER, *words, "-m", f"Made by dist_amp {dist_amp.__version__}")
            git(folder, "branch", BRANCH)
            folder.rename(target)
    except OSError as error:
        raise Failure(f"new {target}: {error}; nothing was made") from error
    print(f"{target}: dist_amp with {', '.join(record['features'])}")
    print(f"next: cd {target} && bash launch/demo.sh")


def check_name(target: Path) -> None:
    """Errors: ConfigError for what exists, can't be a package's name, or is another module's."""
    name = target.name
    if target.exists():
        reason = "this exists"
    elif not (name.isascii() and name.isidentifier() and not keyword.iskeyword(name)):
        reason = "a package's name has letters, digits and _, and is no word of Python"
    elif name in OF_EACH_PROJECT or ((spec := find_spec(name)) and spec.origin):
        reason = f"{name} is the name of a module, or of a folder in each project"
    else:
        return
    raise ConfigError(f"new {target}: {reason}; use another name, such as my_project")


def choose(parts: Parts, present: Sequence[str], options: Namespace) -> list[str]:
    """The features that are present or added, less those to leave out, with all that they need."""
    added, left_out = (re.findall(r"[^\s,]+", text) for text in (options.added, options.without))
    for word in (*added, *left_out):
        if word not in (*parts.features, "all"):
            near = nearest_name(word, parts.features)
            hint = f"did you mean {near}?" if near else "dist_amp new --help lists them"
            raise ConfigError(f"there is no feature {word}; {hint}")
    selected = parts.features.keys() & {*present, *added} if "all" not in added else parts.features
    chosen = parts.chosen(name for name in selected if name not in left_out)
    for name in left_out:
        if name in chosen:
            users = [user for user in chosen if user != name and name in parts.chosen([user])]
            raise ConfigError(f"{name} is needed by {', '.join(users)}; leave that out, too")
    return chosen


def commit_of(folder: Path) -> str:
    """The commit that these files are of; "" outside of git, and if files differ from it."""
    if not (folder / ".git").exists() or git(folder, "status", "--porcelain"):
        return ""
    return git(folder, "rev-parse", "HEAD")


def write_project(
    folder: Path, root: Path, parts: Parts, record: dict[str, Any], task: Path
) -> None:
    """Write whole files of the clone, or of what pip installed, and the filled-in templates.

    record: for [tool.dist_amp]. task: the file with the user's task.
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
        if "target" not in tomllib.loads(text).get("task", {}):
            text += f'\n[task]\ntarget = "{name}.task:{record["task"]}"\n'
        (folder / "configs" / path.name).write_text(text, encoding="utf-8")
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    extras["test"][0] = f"{name}[hf,images,float8,plot]"
    extras = {extra: lines for extra, lines in extras.items() if extra not in OF_THE_CLONE}
    tools = pyproject[pyproject.index("[tool.pytest") : pyproject.index("[dependency-groups]")]
    features = [(feature, parts.features[feature]) for feature in record["features"]]
    words = {
        "name": name,
        "task": record["task"],
        "requirements": tomli_w.dumps({"dependencies": project["dependencies"]}),
        "extras": tomli_w.dumps(extras),
        "record": tomli_w.dumps(record),
        "tools": tools.replace(', "examples"]', "]").rstrip(),
        "features": "\n".join(f"- {name}, {each.docs}: {each.about}" for name, each in features),
    }
    for path in (root / "template").rglob("*.in"):
        file = str(path.relative_to(root / "template").with_suffix("")).replace("NAME", name)
        text = Template(path.read_text(encoding="utf-8")).substitute(words)
        (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
