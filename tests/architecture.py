"""python tests/architecture.py: print the budgets of what a reader must follow and a process must
load, and what stands.

Lines are counted as they stand in the files, with docstrings and comments.
"""

import ast
import gc
import importlib
import json
import os
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dist_amp"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# {measure: (budget, limit)}. A budget is the goal, and no change raises it. A limit is what stood
# last where the budget is not met; a change may only lower it.
BUDGETS = {
    "lines executed by a steady step, single": (300, 300),
    "lines executed by a steady step, ddp": (330, 330),
    "lines executed by a steady step, fsdp": (360, 366),
    "files with lines executed by a steady step": (9, 9),
    "lines executed until the first backward, fsdp": (1_600, 3_517),
    "lines loaded by `import dist_amp.step`": (4_000, 4_087),
    "lines loaded by `import dist_amp.train`": (7_500, 7_662),
    "lines of core, with what it imports in functions": (8_000, 9_341),
    "lines of the package": (21_000, 25_780),
    "files of the package": (130, 164),
    "lines of the tests": (24_000, 26_880),
    "words of the docs": (13_000, 13_000),
    "settings": (75, 75),
}


# ---- the package as text ----


@cache
def files() -> dict[str, Path]:
    """{"checkpoint.format": path}: every file of the package by its dotted name."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}


def line_count(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


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
    prefix = "dist_amp."
    inside = {
        m.removeprefix(prefix) for m in modules_imported(files()[name]) if m.startswith(prefix)
    }
    return {m if m in files() else f"{m}.__init__" for m in inside} - {name}


def unit_of(name: str) -> str:
    """The folder of a file, or the file itself if it lies at the top."""
    return name.split(".")[0]


# ---- what a process executes ----


class Executed:
    """Records the package's functions that this thread enters."""

    def __init__(self) -> None:
        self.entered: set[tuple[str, int]] = set()  # file, first line

    def profile(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            self.entered.add((code.co_filename, code.co_firstlineno))


def lines_of(entered: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """The lines of the functions that begin there, each once; class bodies and modules are none."""
    lines: set[tuple[str, int]] = set()
    for file, first in entered:
        lines.update((file, line) for line in _functions(file).get(first, ()))
    return lines


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
    from tiny import Tiny, make_run, take_steps

    from dist_amp.step import train_step

    run = make_run(world, Tiny(), "--train.accumulation_steps", 2, *words)
    take_steps(run, 6)
    micro_batches = next(run.data)
    gc.collect()  # what earlier runs of this process left is not this step's
    gc.disable()
    executed = Executed()
    sys.setprofile(executed.profile)
    train_step(run, micro_batches)
    sys.setprofile(None)
    gc.enable()
    return executed.entered


def record_start(argv: list[str]) -> None:
    """Write what the command line enters until the first backward, and end this process."""
    import torch

    def stop(*_: Any, **__: Any) -> None:
        sys.setprofile(None)
        Path(f"{os.environ['RANK']}.json").write_text(json.dumps(sorted(executed.entered)))
        os._exit(0)  # a run that fails would write its report

    executed = Executed()
    torch.Tensor.backward = stop  # type: ignore[method-assign]
    sys.setprofile(executed.profile)
    threading.setprofile(None)  # type: ignore[arg-type]
    from dist_amp.train import main

    sys.exit(main(argv))


def print_loaded(modules: list[str]) -> None:
    """For each module, the lines of the package's files that are loaded once it is imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dist_amp"]:
        del sys.modules[name]
    for module in modules:
        importlib.import_module(module)
        loaded = {name for name in sys.modules if name.startswith("dist_amp.")}
        names = {name.removeprefix("dist_amp.") for name in loaded}
        print(line_count({files().get(name) or files()[f"{name}.__init__"] for name in names}))


# ---- the figures ----


def figures() -> dict[str, int]:
    """What stands, by the measures of BUDGETS."""
    sys.path.insert(0, str(ROOT))
    from forked import Launch
    from ranks import on_ranks

    from dist_amp.commands.parts import Parts, closure
    from dist_amp.config.load import load_config
    from dist_amp.config.text import flat, to_toml

    found = {}
    names_of_files = set()
    for strategy, ranks in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        words = ("--parallel.strategy", strategy)
        lines = lines_of(set().union(*on_ranks(ranks, executed_by_a_step, *words)))
        found[f"lines executed by a steady step, {strategy}"] = len(lines)
        names_of_files = max(names_of_files, {file for file, _ in lines}, key=len)
    found["files with lines executed by a steady step"] = len(names_of_files)

    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(Path(folder))
        # A user's file, so that the sources of the tasks do not count.
        words = ["--task.target", f"{ROOT}/tests/tiny.py:Tiny", "--run.dir", "run"]
        words += ["--run.device", "cpu", "--use_amp", "false"]  # the same on any machine
        launch.each(2, "--start", "--parallel.strategy", "fsdp", *words, module="architecture")
        ranks_of = [json.loads(path.read_text()) for path in Path(folder).glob("?.json")]
        entered = {tuple(place) for places in ranks_of for place in places}
        modules = ("dist_amp.step", "dist_amp.train")
        loaded = launch.module("architecture", "--loaded", *modules).stdout.split()
    found["lines executed until the first backward, fsdp"] = len(lines_of(entered))
    for module, lines in zip(modules, loaded, strict=True):
        found[f"lines loaded by `import {module}`"] = int(lines)

    parts = Parts(PACKAGE, ROOT)
    core = closure(["dist_amp/train.py"], lambda file: parts.needs(file) - parts.unit.keys())
    paths = [parts.files[file] for file in core if not file.endswith("__init__.py")]
    found["lines of core, with what it imports in functions"] = line_count(paths)
    found["lines of the package"] = line_count(files().values())
    found["files of the package"] = len(files())
    found["lines of the tests"] = line_count((ROOT / "tests").rglob("*.py"))
    docs = (ROOT / "docs").glob("*.md")
    found["words of the docs"] = sum(len(page.read_text().split()) for page in docs)
    keys = flat(to_toml(load_config([], environ={})))
    found["settings"] = sum(not key.startswith("task.args.") for key in keys)  # those are a task's
    return found


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        record_start(sys.argv[2:])
    elif sys.argv[1:2] == ["--loaded"]:
        print_loaded(sys.argv[2:])
    else:
        print(f"{'measure':50}{'budget':>8}{'limit':>8}{'now':>8}")
        for measure, now in figures().items():
            budget, limit = BUDGETS[measure]
            print(f"{measure:50}{budget:8,}{limit:8,}{now:8,}")


if __name__ == "__main__":
    main()
