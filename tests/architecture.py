"""python tests/architecture.py: print what a reader must follow and a process must load.

The figures of the budgets that tests/repo/test_architecture.py keeps. Lines are counted as they
stand in the files, with docstrings and comments.
"""

import ast
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dist_amp"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Size:
    lines: int
    files: int


# ---- the package as text ----


@cache
def files() -> dict[str, Path]:
    """{"checkpoint.format": path}: every file of the package by its dotted name."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def package_size() -> Size:
    return Size(sum(line_count(path) for path in files().values()), len(files()))


@cache
def modules_imported(path: Path) -> frozenset[str]:
    """The dotted names that a file imports, in functions and for type checkers too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("dist_amp.")
                modules.add(f"dist_amp.{inner}" if inner in files() else node.module or "")
    return frozenset(modules)


@cache
def imports_of(name: str) -> set[str]:
    """The files of the package that a file imports."""
    prefix = "dist_amp."
    inside = {
        m.removeprefix(prefix) for m in modules_imported(files()[name]) if m.startswith(prefix)
    }
    return {m if m in files() else f"{m}.__init__" for m in inside} - {name}


def unit_of(name: str) -> str:
    """The folder of a file, or the file itself if it lies at the top."""
    return name.split(".")[0]


def mutual_imports() -> list[tuple[str, str]]:
    """Pairs of folders, or files at the top, that import each other."""
    arrows = {(unit_of(a), unit_of(b)) for a in files() for b in imports_of(a)}
    return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


# ---- what a process loads ----


@cache
def import_closures(*modules: str) -> tuple[Size, ...]:
    """The files of the package that one process has loaded after `import module`, one by one."""
    code = "import importlib, sys\nfor module in sys.argv[1:]:\n    importlib.import_module(module)"
    code += "\n    print(*[name for name in sys.modules if name.startswith('dist_amp')])"
    lines = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    sizes = []
    for names in map(str.split, lines):
        keys = {name.removeprefix("dist_amp").removeprefix(".") or "__init__" for name in names}
        paths = {files().get(key) or files()[f"{key}.__init__"] for key in keys}
        sizes.append(Size(sum(map(line_count, paths)), len(paths)))
    return tuple(sizes)


# ---- what a process executes ----


class Executed:
    """Records the package's functions that this thread enters."""

    def __init__(self) -> None:
        self.entered: set[tuple[str, int]] = set()  # file, first line

    def profile(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            self.entered.add((code.co_filename, code.co_firstlineno))

    def __enter__(self) -> "Executed":
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def size(self) -> Size:
        return size_of(self.entered)


def size_of(entered: set[tuple[str, int]]) -> Size:
    """The lines of the functions that begin there, each once; class bodies and modules are none."""
    lines: set[tuple[str, int]] = set()
    for file, first in entered:
        lines.update((file, line) for line in _functions(file).get(first, ()))
    return Size(len(lines), len({file for file, _ in lines}))


@cache
def _functions(file: str) -> dict[int, range]:
    """{first line, that of a decorator if it has one: its lines} of each function in a file."""
    spans = {}
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, FUNCTIONS):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(d.lineno for d in decorators)])
            spans.setdefault(first, range(first, (node.end_lineno or first) + 1))
    return spans


def executed_by_a_step(world: Any, *words: str) -> set[tuple[str, int]]:
    """What the seventh step of a run enters; call it on every rank."""
    from tiny import Tiny, make_run

    from dist_amp.step import train_step

    run = make_run(world, Tiny(), "--train.accumulation_steps", 2, *words)
    for _ in range(6):
        train_step(run, next(run.data))
    micro_batches = next(run.data)
    gc.collect()  # what earlier runs of this process left is not this step's
    gc.disable()
    with Executed() as executed:
        train_step(run, micro_batches)
    gc.enable()
    return executed.entered


STRATEGIES = {
    "single": (1, ("--parallel.strategy", "single")),
    "ddp": (2, ("--parallel.strategy", "ddp")),
    "fsdp": (2, ("--parallel.strategy", "fsdp")),
}


def step_sizes() -> dict[str, Size]:
    from ranks import on_ranks

    sizes = {}
    for strategy, (ranks, words) in STRATEGIES.items():
        entered = set().union(*on_ranks(ranks, executed_by_a_step, *words))
        sizes[strategy] = size_of(entered)
    return sizes


class FirstBackward(BaseException):
    """Ends a run as its first backward begins."""


def record_start(output: str, argv: list[str]) -> None:
    """Write what the command line enters until the first backward: for a process that ends here."""
    import torch

    def stop(*_: Any, **__: Any) -> None:
        sys.setprofile(None)
        Path(output).write_text(json.dumps(sorted(executed.entered)))
        os._exit(0)  # a run that fails would write its report

    executed = Executed()
    torch.Tensor.backward = stop  # type: ignore[method-assign]
    sys.setprofile(executed.profile)
    threading.setprofile(None)  # type: ignore[arg-type]
    from dist_amp.train import main

    sys.exit(main(argv))


def start_size(strategy: str) -> Size:
    """What the main job executes from the command line to its first backward, on any rank.

    The task is a user's file, so that the sources of the example tasks do not count.
    """
    ranks, words = STRATEGIES[strategy]
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        argv = [*words, "--task.target", "tests/tiny.py:Tiny", "--run.dir", f"{folder}/run"]
        argv += ["--run.device", "cpu", "--use_amp", "false"]  # the same on any machine
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            if ranks == 1:
                environment = dict(os.environ)
            command = [sys.executable, __file__, "--start", f"{folder}/{rank}.json", *argv]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-3))
        for process in processes:
            process.wait(timeout=300)
        entered = set()
        for rank in range(ranks):
            rows = json.loads(Path(f"{folder}/{rank}.json").read_text())
            entered |= {(file, line) for file, line in rows}
    return size_of(entered)


# ---- the table ----


def main() -> None:
    def show(what: str, size: Size) -> None:
        print(f"{what:42}{size.lines:7,} lines in {size.files} files")

    for strategy, size in step_sizes().items():
        show(f"executed by a steady step, {strategy}", size)
    for strategy in STRATEGIES:
        show(f"executed until the first backward, {strategy}", start_size(strategy))
    modules = ("dist_amp.step", "dist_amp.train")
    for module, size in zip(modules, import_closures(*modules), strict=True):
        show(f"loaded by `import {module}`", size)
    show("the package", package_size())
    print(f"{'folders that import each other':42}{mutual_imports()}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--start"]:
        record_start(sys.argv[2], sys.argv[3:])
    else:
        main()
