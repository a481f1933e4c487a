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
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from dist_amp.commands.deletion import delete, names_of
from dist_amp.commands.features import read_table

ROOT = Path(__file__).parent.parent
COPIED = ("dist_amp", "pyproject.toml", "configs", "features.toml")

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
    return read_table(ROOT)


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
