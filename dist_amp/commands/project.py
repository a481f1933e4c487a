"""What a project is made of: a copy of the repository without some features, renamed."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w

import dist_amp
from dist_amp.commands.base import git, initialise
from dist_amp.commands.deletion import delete, tidy
from dist_amp.commands.features import package_of, read_table
from dist_amp.commands.project_tests import copy_tests, imported
from dist_amp.distributed.signals import ignore_stop_signals
from dist_amp.errors import ConfigError

DEFAULT_TARGET = "dist_amp.tasks.causal_lm:CausalLM"
EXAMPLE = "template/example.py"
# Imported names that differ from the distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
ALWAYS = {"torch", "tensorboard"}  # torch imports the second
SUFFIXES = {".py", ".sh", ".sbatch", ".yaml", ".toml", ".md", ""}
IGNORED = ".venv/\nruns/\n__pycache__/\n*.egg-info/\n.*_cache/\n"


@dataclass(frozen=True)
class Plan:
    """What to make. name: the package's. task: (file, class) of the user's."""

    name: str
    features: tuple[str, ...]
    task: tuple[Path, str] | None = None


def make(plan: Plan, target: Path, root: Path) -> None:
    """Make the project and say so; its folder appears when it is complete."""
    parent = target.resolve().parent
    with tempfile.TemporaryDirectory(prefix=f".{plan.name}.", dir=parent) as temporary:
        folder = Path(temporary, plan.name)
        fill(folder, plan, root)
        initialise(folder, plan.features)
        ignore_stop_signals((signal.SIGINT, signal.SIGTERM))  # from here on something was made
        os.replace(folder, target)
    lines = [len(path.read_text().splitlines()) for path in (target / plan.name).rglob("*.py")]
    print(
        f"{target}: {sum(lines):,} lines in {len(lines)} files, with "
        f"{', '.join(plan.features) or 'no optional feature'}; next: cd {target} && "
        "bash launch/demo.sh"
    )


def fill(folder: Path, plan: Plan, root: Path) -> None:
    """Write all files of a project. root: the repository."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package_of(root), folder / "dist_amp", ignore=ignored)
    for name in ("launch", "configs"):
        shutil.copytree(root / name, folder / name)
    for name in ("Dockerfile", "features.toml", "pyproject.toml"):
        shutil.copy(root / name, folder)
    table = read_table(root)
    left_out = set(table) - set(plan.features)
    delete(left_out, folder)
    settings: set[str] = set()
    for name in left_out:
        settings.update(table[name].get("settings", ()))
    copy_tests(root, folder, set(plan.features), settings)
    rename(folder, plan.name)
    for name in ("tests", plan.name):
        tidy(folder / name)
    target = place_task(folder, plan, root)
    write_texts(folder, plan, root, target)
    schema = folder / "configs/schema.json"
    if schema.exists():  # a project with the command for it, of the settings that are left
        command = [sys.executable, "-m", f"{plan.name}.schema"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        schema.write_text(done.stdout, encoding="utf-8")
    (folder / "features.toml").unlink()


# --- what belongs to the project


def place_task(folder: Path, plan: Plan, root: Path) -> str:
    """Copy the task that is trained by default, as it is; returns its target."""
    default = renamed(DEFAULT_TARGET, plan.name)
    tasks = folder / plan.name / "tasks"
    if plan.task is None and (tasks / "causal_lm.py").exists():
        return default
    file, name = plan.task or (root / EXAMPLE, "Example")
    if (tasks / file.name).exists():
        raise ConfigError(f"--task {file}: the project has a tasks/{file.name}; rename yours")
    tasks.mkdir(exist_ok=True)
    for source in (package_of(root) / "tasks/__init__.py", file):
        text = source.read_text(encoding="utf-8")
        (tasks / source.name).write_text(renamed(text, plan.name), encoding="utf-8")
    target = f"{plan.name}.tasks.{file.stem}:{name}"
    settings = folder / plan.name / "settings.py"
    settings.write_text(settings.read_text().replace(default, target))
    return target


def rename(folder: Path, name: str) -> None:
    (folder / "dist_amp").rename(folder / name)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in SUFFIXES:
            path.write_text(renamed(path.read_text(encoding="utf-8"), name), encoding="utf-8")


def renamed(text: str, name: str) -> str:
    return text.replace("dist_amp", name).replace("DIST_AMP", name.upper())


# --- its pyproject.toml and README.md


def write_texts(folder: Path, plan: Plan, root: Path, target: str) -> None:
    ours = (folder / "pyproject.toml").read_text(encoding="utf-8")
    requirements, extras = requirements_of(folder, plan.name, tomllib.loads(ours)["project"])
    module, _, task = target.partition(":")
    file = module.replace(".", "/") + ".py"
    rows = read_table(root)
    folders = []
    for path, what in layout(folder, plan.name):
        folders.append(f"| {path}/ | {what} |")
    chosen = []
    for name in plan.features:
        line = f"- {name}: {rows[name]['about']}; {rows[name]['docs']}"
        settings = rows[name].get("settings", ())
        if settings:
            line += f" (`{'`, `'.join(settings)}`)"
        chosen.append(line)
    words = {
        "NAME_": f"{plan.name.upper()}_",
        "NAME": plan.name,
        "VERSION": dist_amp.__version__,
        "COMMIT": commit_of(root),
        "TASK": target,
        "REQUIREMENTS": tomli_w.dumps({"dependencies": requirements}),
        "EXTRAS": tomli_w.dumps(extras),
        "FEATURES": tomli_w.dumps({"features": plan.features}),
        "TARGET": f"`{task}` in {file}",
        "MODEL_FILE": f"[{file}]({file})",
        "LAYOUT": "\n".join(folders),
        "CHOSEN": "\n".join(chosen),
    }
    pattern = re.compile("|".join(words))
    tools = ours[ours.index("[tool.pytest.ini_options]") :].replace(', "examples"]', "]")
    for name, end in (("pyproject.toml", tools), ("README.md", "")):
        text = (root / f"template/{name}.in").read_text(encoding="utf-8")
        text = pattern.sub(lambda match: words[match.group()], text)
        (folder / name).write_text(text + end, encoding="utf-8")
    (folder / ".gitignore").write_text(IGNORED)


def requirements_of(
    folder: Path, name: str, project: dict[str, Any]
) -> tuple[list[str], dict[str, list[str]]]:
    """(dependencies, extras) of ours that the project's code imports."""
    used = set(ALWAYS)
    for path in (folder / name, folder / "launch"):
        for module in imported(path.rglob("*.py")):
            used.add(DISTRIBUTIONS.get(module, module).replace("_", "-"))
    requirements = [line for line in project["dependencies"] if distribution(line) in used]
    extras = {}
    of_tests = []
    for extra, lines in project["optional-dependencies"].items():
        if extra == "test":
            of_tests = lines
        elif extra not in ("bench", "engines") and used & set(map(distribution, lines)):
            extras[extra] = lines
    first, *others = of_tests  # dist_amp[hf,...], and what tests alone need
    listed = re.findall(r"\w+", first)
    shared = [extra for extra in extras if extra in listed]
    if shared:
        others.insert(0, f"{name}[{','.join(shared)}]")
    extras["test"] = others
    return requirements, extras


def distribution(requirement: str) -> str:
    return re.split(r"[<>=\[ ]", requirement)[0]


def layout(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """(folder of the package, its docstring)."""
    for path in sorted((folder / name).glob("*/__init__.py")):
        about = ast.get_docstring(ast.parse(path.read_text())) or ""
        yield f"{name}/{path.parent.name}", about
    yield "configs", "One file of settings per way of running."
    yield "launch", "Scripts that start training."
    yield "tests", "Tests of what is here."


def commit_of(root: Path) -> str:
    """The commit of the clone, or of what pip installed; "" if unknown."""
    if (root / ".git").exists():
        return git(root, "rev-parse", "HEAD")
    if package_of(root).parent != root:
        origin = metadata.distribution("dist_amp").read_text("direct_url.json") or "{}"
        return str(json.loads(origin).get("vcs_info", {}).get("commit_id", ""))
    return ""
