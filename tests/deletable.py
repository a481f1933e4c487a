"""python tests/deletable.py [FEATURE ...]: delete optional features in a copy, and run it.

features.toml names each feature's files and entry lines. Without a name all of them are deleted.
Prints the lines that are left. Options: --keep FOLDER leaves the copy there.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COPIED = ("dist_amp", "pyproject.toml", "configs")

TASK = '''
import torch.nn.functional as F
import torch
from torch import nn


class Curve:
    """Fit a smooth function. Batch: x [B, 8], y [B]."""

    def build_model(self):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(*layers, nn.Linear(8, 1))

    def blocks(self, model):
        return list(model)[:2]

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(64, 8, generator=generator)
        return [{"x": row, "y": row.sum().sin()} for row in x]

    def loss_sum(self, model, batch):
        return F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"], reduction="sum")

    def weight(self, batch):
        return len(batch["y"])
'''


def features() -> dict[str, dict[str, Any]]:
    return tomllib.loads((ROOT / "features.toml").read_text())


def with_dependents(names: Iterable[str]) -> list[str]:
    """The features and those that are built on them."""
    table = features()
    names = set(names)
    while (
        more := {name for name, row in table.items() if names & set(row.get("needs", ()))} - names
    ):
        names |= more
    return sorted(names)


def delete(names: Iterable[str], root: Path) -> None:
    """Delete features, and what is built on them, from a copy of the repository."""
    table = features()
    rows = [table[name] for name in with_dependents(names)]
    for row in rows:
        for file in row["files"]:
            path = root / file
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # features may share a folder
    for row in rows:
        for file, blocks in row.get("entries", {}).items():
            path = root / file
            if path.exists():
                path.write_text(without(path.read_text(), blocks, file))
    keys = {key for row in rows for key in row.get("settings", ())}
    settings = root / "dist_amp/settings.py"
    settings.write_text(without_settings(settings.read_text(), keys))
    for path in (root / "configs").glob("*.toml"):
        path.write_text(without_keys(path.read_text(), keys))
    while unused := definitions_without_users(root):
        for path, lines in unused.items():
            path.write_text(without_lines(path.read_text(), lines))
        tidy(root)
    for folder in (root / "dist_amp").iterdir():  # an empty folder's docstring is no code
        if folder.is_dir() and [path.name for path in folder.glob("*.py")] == ["__init__.py"]:
            shutil.rmtree(folder)


def without(text: str, blocks: Iterable[Any], file: str) -> str:
    for block in blocks:
        find, replace = (block, "") if isinstance(block, str) else (block["find"], block["replace"])
        if text.count(find) != 1:
            raise ValueError(
                f"features.toml: {find!r} is {text.count(find)} times in {file}, not once"
            )
        text = text.replace(find, replace)
    return text


def without_keys(text: str, keys: set[str]) -> str:
    """A config file without these keys or sections, and the comments right above them."""
    lines = text.splitlines()
    section = ""
    cut: set[int] = set()
    for number, line in enumerate(lines, start=1):
        if line.startswith("["):
            section = line.strip("[] ")
        name = section
        if "=" in line and not line.startswith(("#", " ")):
            name = f"{section}.{line.partition('=')[0].strip()}".strip(".")
        is_deleted = any(f"{name}.".startswith(f"{key}.") for key in keys)
        if is_deleted and line.strip() and not line.startswith("#"):
            cut.add(number)
            while lines[number - 2].startswith("#"):
                number -= 1
                cut.add(number)
    return without_lines(text, cut)


def is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign)


def without_settings(text: str, keys: set[str]) -> str:
    """settings.py without these keys, such as optim.ema, or sections, such as compile."""
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    cut: set[int] = set()

    def cut_key(key: str) -> None:
        *sections, last = key.split(".")
        owner = "Config"
        for section in sections:
            owner = type_of(owner, section)
        node = classes[owner]
        inherited = [classes[base.id].body for base in node.bases if isinstance(base, ast.Name)]
        body = sum(inherited, node.body)
        for index, field in enumerate(body):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == last:
                end = field.end_lineno or field.lineno
                following = body[index + 1 : index + 2]
                if following and isinstance(following[0], ast.Expr):  # its docstring
                    end = following[0].end_lineno or end
                cut.update(range(field.lineno, end + 1))
                return
        raise ValueError(f"features.toml: there is no setting {key}")

    def type_of(owner: str, section: str) -> str:
        for field in classes[owner].body:
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == section:
                return ast.unparse(field.annotation)
        raise ValueError(f"features.toml: there is no section {section}")

    for key in keys:
        cut_key(key)
    for section in [item.target.id for item in classes["Config"].body if is_field(item)]:
        node = classes.get(type_of("Config", section))
        if node and all(item.lineno in cut for item in node.body if is_field(item)):
            cut_key(section)
            cut.update(range(node.decorator_list[0].lineno, (node.end_lineno or 0) + 1))
    return without_lines(text, cut)


def tidy(root: Path) -> None:
    """Remove imports that only deleted definitions used."""
    ruff = [sys.executable, "-m", "ruff"]
    fix = ["check", "--select", "F401", "--fix", "--quiet"]
    for words in (fix, ["format", "--quiet"]):
        subprocess.run([*ruff, *words, "--config", ROOT / "pyproject.toml", root / "dist_amp"])


def without_lines(text: str, numbers: set[int]) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for number, line in enumerate(lines, start=1) if number not in numbers)


def definitions_without_users(root: Path) -> dict[Path, set[int]]:
    """{file: lines} of the functions, classes and constants that only deleted code used."""
    now, before = names_in(root), names_in(ROOT)
    unused: dict[Path, set[int]] = {}
    for path in (root / "dist_amp").rglob("*.py"):
        for name, uses, lines in definitions(path.read_text()):
            if now[name] == uses < before[name] and not name.startswith("__"):
                unused.setdefault(path, set()).update(lines)
    return unused


def names_in(root: Path) -> Counter[str]:
    """How often the package defines, imports or uses each name."""
    texts = [path.read_text() for path in (root / "dist_amp").rglob("*.py")]
    return sum(map(names_of, texts), Counter())


@cache
def names_of(text: str) -> Counter[str]:
    names: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        for attribute in ("id", "attr", "name"):
            names[getattr(node, attribute, "")] += 1
    return names


@cache
def definitions(text: str) -> list[tuple[str, int, range]]:
    """Of functions, classes and constants: the name, how often the definition itself has it, and
    its lines with decorators and comments.

    Methods of a class with bases are left out: a library may call them.
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    holders = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.bases]
    found = []
    for node in [child for holder in (tree, *holders) for child in holder.body]:
        name = ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        first = min([node.lineno, *(line.lineno for line in getattr(node, "decorator_list", []))])
        while lines[first - 2].lstrip().startswith("#"):
            first -= 1
        uses = names_of(ast.unparse(node))[name]  # more than 1 if it calls itself
        found.append((name, uses, range(first, (node.end_lineno or first) + 1)))
    return found


def copy_without(names: Iterable[str], root: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    (root / "curve.py").write_text(TASK)
    delete(names, root)


def unknown_names(root: Path) -> str:
    """What ruff says of names that are not defined, or imported and not used; "" if nothing."""
    command = [sys.executable, "-m", "ruff", "check", "dist_amp", "--select", "F", "--quiet"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout


def missing_imports(root: Path) -> list[str]:
    """Imports of a file of the package that was deleted, or of a name that it does not have."""
    texts = {path: path.read_text() for path in (root / "dist_amp").rglob("*.py")}
    missing = []
    for path, text in texts.items():
        for module, name in imports_of(text):
            folder = root.joinpath(*module.split("."))
            has = names_of(texts.get(folder.with_suffix(".py"), ""))
            if not has[name] and folder / f"{name}.py" not in texts:
                missing.append(f"{path.relative_to(root)}: {module}.{name}")
    return missing


@cache
def imports_of(text: str) -> list[tuple[str, str]]:
    """(module, name) of what it imports from the package."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    pairs = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    return [pair for pair in pairs if pair[0].startswith("dist_amp.")]


def check_imports(root: Path) -> None:
    """Import every file that is left, except the commands' entry points."""
    paths = [path.relative_to(root) for path in (root / "dist_amp").rglob("*.py")]
    modules = [".".join(path.with_suffix("").parts) for path in paths]
    entry_points = ("__init__", "__main__", "bench")
    lines = [f"import {name}" for name in modules if not name.endswith(entry_points)]
    command = [sys.executable, "-c", "\n".join(lines)]
    subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=True)


def train(root: Path, strategy: str, dtype: str) -> dict[str, Any]:
    """Train 4 steps on two ranks, resume for 4 more; returns the summary of the run."""
    run = root / f"runs/{strategy}"
    words = ["--task.target", "curve.py:Curve", "--run.dir", str(run), "--run.device", "cpu"]
    words += ["--parallel.strategy", strategy, "--precision.dtype", dtype]
    words += ["--train.micro_batch_size", "4", "--train.accumulation_steps", "2"]
    words += ["--checkpoint.every", "2", "--eval.every", "4", "--metrics.log_every", "2"]
    for steps in ("4", "8"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += ["-m", "dist_amp.train", *words, "--train.steps", steps]
        command += ["--run.allow_config_change", "true"]
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        job = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
        )
        if job.returncode:
            raise AssertionError(f"{strategy}, {steps} steps:\n{job.stdout}\n{job.stderr}")
    return json.loads((run / "summary.json").read_text())


def check(root: Path, strategy: str, dtype: str) -> None:
    """The main job still trains, saves, resumes, and reports every rank to TensorBoard."""
    summary = train(root, strategy, dtype)
    assert summary["steps"] == 8
    assert summary["resumed_from_step"] == 4
    assert summary["stopped_by"] == "completed"
    run = root / f"runs/{strategy}"
    assert sorted(path.name for path in (run / "tensorboard").iterdir()) == [
        "rank00000",
        "rank00001",
    ]
    assert all(any(rank.iterdir()) for rank in (run / "tensorboard").iterdir())
    assert (run / "checkpoints/step_00000008").is_dir()


def lines_left(root: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in (root / "dist_amp").rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features", nargs="*")
    parser.add_argument("--keep")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(arguments.keep or temporary)
        root.mkdir(exist_ok=True)
        copy_without(arguments.features or features(), root)
        print(f"{lines_left(root):,} lines are left")
        sizes = sorted(
            (len(path.read_text().splitlines()), str(path.relative_to(root)))
            for path in (root / "dist_amp").rglob("*.py")
        )
        if not arguments.features:
            print(*(f"{lines:6} {path}" for lines, path in sizes), sep="\n")
        print(unknown_names(root), end="")
        for strategy, dtype in (("ddp", "bf16"), ("fsdp", "bf16")):
            check(root, strategy, dtype)
            print(f"{strategy}: trains, saves, resumes and reports")


if __name__ == "__main__":
    main()
