"""The house has floors: a file imports only what stands below it, and the core stays small."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dist_amp"
# What is done to each block, what is on the disk, and which checkpoint may be resumed from: the core stands on them,
# but need not be read with it.
FILES = {"blocks", "checkpoint_files", "checkpoint_writing", "resume", "interval", "metrics_files"}
FLOORS = {
    1: {"config", "runtime", "rendezvous", "failure", "precision", "fused", "optim", "task"},
    2: {"parallel", "data", "metrics", "checkpoint", *FILES},
    3: {"step"},
    4: {"run"},
    5: {"train"},
}
CORE = {name for names in FLOORS.values() for name in names}
# What stands beside the loop: the main job alone may use it, so that each can be deleted with its lines there.
BESIDE = {"checks", "provenance", "nonfinite", "numerics", "guards", "explain", "peaks", "profiling", "memory"}
OUTSIDE = {
    "config": {"tyro"},
    "data": {"torch", "datasets"},
    "metrics": {"torch"},
    "metrics_files": {"torch", "tensorboard"},
    "checkpoint": {"torch", "numpy"},
    "checkpoint_files": {"torch", "xxhash"},
    "run": {"torch", "tomli_w"},
}


def imports(path, with_types=False):
    """Dotted names that a file imports, those for type checkers alone left out."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not with_types:
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}" if node.module == "dist_amp" else node.module for alias in node.names
            )


def own_imports(name):
    """The files under dist_amp/ that a file imports: "config", "proof/compare"."""
    modules = {module.removeprefix("dist_amp.") for module in imports(PACKAGE / f"{name}.py") if "dist_amp." in module}
    paths = {module.replace(".", "/") for module in modules}
    return {f"{path}/__init__" if (PACKAGE / path).is_dir() else path for path in paths}


@pytest.mark.parametrize("name", sorted(CORE))
def test_a_file_of_the_core_imports_nothing_from_above(name):
    floor = next(number for number, names in FLOORS.items() if name in names)
    above = {other for number, names in FLOORS.items() if number > floor for other in names}
    assert not own_imports(name) & above
    allowed = CORE | BESIDE if name == "train" else CORE
    assert own_imports(name) <= allowed, "the core imports no task or command, and train alone what stands beside it"


def test_no_two_files_import_one_another():
    seen, path = set(), []

    def visit(name):
        assert name not in path, f"a circle: {' -> '.join([*path, name])}"
        if name not in seen:
            path.append(name)
            for other in own_imports(name):
                visit(other)
            seen.add(path.pop())

    for file in sorted(PACKAGE.rglob("[!_]*.py")):
        visit(str(file.relative_to(PACKAGE).with_suffix("")))


@pytest.mark.parametrize("name", sorted(CORE))
def test_only_the_files_that_should_import_other_packages(name):
    roots = {module.split(".")[0] for module in imports(PACKAGE / f"{name}.py")} - set(sys.stdlib_module_names)
    assert roots - {"dist_amp"} <= OUTSIDE.get(name, {"torch"})


def test_nothing_imports_the_main_job():
    for path in PACKAGE.rglob("*.py"):
        assert "dist_amp.train" not in set(imports(path, with_types=True)), path
