"""The layout: a small core at the top, folders named after their jobs, and imports that point one way."""

import ast
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dist_amp"
MOST_FILES, MOST_LINES = 12, 1800  # of the core: what a user reads before trusting it

# Lower floors first; a file imports only from its own floor or below.
FLOORS = [
    {"errors", "settings", "runtime", "config", "fast", "optimizers", "sources"},
    {"world", "task", "precision", "optim"},
    {"parallel", "data"},
    {"telemetry", "checkpoint"},
    {"run"},
    {"step"},
    {"diagnostics", "supervise"},
    {"train"},
    {"verify", "bench", "commands", "tasks"},
]
# These stand on `world`, and `world` on other files of their folders.
ON_THE_WORLD = {
    "config.auto",
    "runtime.batch_statistics",
    "runtime.initial_weights",
    "runtime.meta",
    "config.load",
    "config.task_class",
    "config.validate",
    "runtime.run_folder",
    "fast.compile",
}
# These read a whole run, and train.py alone names them.
ON_THE_RUN = {"telemetry.mfu", "telemetry.summary"}
# These look into a graph, a trace or a checkpoint's pickle once something has gone wrong or was asked for by a setting.
NOT_IN_A_STEP = {"diagnostics.nonfinite", "diagnostics.profiling", "diagnostics.replay", "checkpoint.reader"}
BESIDE_TRAINING = ("fast", "verify", "bench", "commands", "tasks")
HEAVY = {
    "datasets": {"sources", "tasks", "supervise.preflight", "bench.data", "bench.data_kinds"},
    "pyarrow": {"sources"},
    "fsspec": {"sources"},
    "tensorboard": {"telemetry.writers", "telemetry.tensorboard_view"},
    "tyro": {"config.parse"},
    "matplotlib": {"bench"},
    "accelerate": {"bench"},
    "lightning_fabric": {"bench"},
    "transformers": {"tasks", "sources", "checkpoint.pretrained", "bench.pretrained"},
    "tokenizers": {"sources"},
    "peft": {"tasks"},
    "pynvml": {"telemetry.health"},
    "sklearn": {"sources.labelled_images"},
}


def files():
    """{"checkpoint.format": path}: every file of the package by its dotted name."""
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


FILES = files()


def imports(path):
    """The dotted names that a file imports, in functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("dist_amp.")
                yield f"dist_amp.{inner}" if inner in FILES else node.module


def own_imports(name):
    """The files of the package that a file imports."""
    modules = {module.removeprefix("dist_amp.") for module in imports(FILES[name]) if module.startswith("dist_amp.")}
    return {module if module in FILES else f"{module}.__init__" for module in modules} - {name}


def floor_of(name):
    if name in ON_THE_WORLD:
        return 1
    if name in ON_THE_RUN:
        return 6
    top = name.split(".")[0]
    return next((number for number, names in enumerate(FLOORS) if top in names), 0)


def test_the_core_has_at_most_twelve_files_and_1800_lines():
    lines = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")}
    assert len(lines) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES, lines


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_point_down(name):
    above = {other: floor_of(other) for other in own_imports(name) if floor_of(other) > floor_of(name)}
    assert not above, f"{name} is on floor {floor_of(name)}"


def test_no_two_files_import_one_another():
    seen, path = set(), []

    def visit(name):
        assert name not in path, f"a cycle: {' -> '.join([*path, name])}"
        if name not in seen:
            path.append(name)
            for other in own_imports(name):
                visit(other)
            seen.add(path.pop())

    for name in FILES:
        visit(name)


@pytest.mark.parametrize("package", sorted(HEAVY))
def test_a_heavy_package_is_imported_where_it_is_needed_alone(package):
    users = {name for name, path in FILES.items() if any(re.match(rf"{package}\b", module) for module in imports(path))}
    assert all(any(name == user or name.startswith(f"{user}.") for user in HEAVY[package]) for name in users), users


@pytest.mark.parametrize("name", sorted(name for name in FILES if "." not in name))
def test_the_core_imports_torch_and_the_standard_library(name):
    roots = {module.split(".")[0] for module in imports(FILES[name])} - set(sys.stdlib_module_names)
    assert roots <= {"dist_amp", "torch"}


def test_nothing_imports_the_main_job():
    assert [name for name in FILES if "train" in own_imports(name)] == []


def private_names_of_torch(path):
    """The dotted names of torch with a leading underscore that a file uses, in imports and attribute chains."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            if re.match(r"(torch|dist)\b", name) and re.search(r"\._[a-zA-Z]", name):
                yield name


@pytest.mark.parametrize("name", sorted(name for name in FILES if not name.startswith(BESIDE_TRAINING)))
def test_private_names_of_torch_are_used_in_fast_alone(name):
    assert name in NOT_IN_A_STEP or not set(private_names_of_torch(FILES[name]))
