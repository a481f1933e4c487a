"""The budgets of what a reader follows and a process loads, and the one direction of imports.

`python tests/architecture.py` prints the figures.
"""

import ast
import re
import sys

import architecture
import pytest
from architecture import ROOT, Size, files, imports_of, modules_imported, unit_of
from torch.distributed.fsdp import FSDPModule

from dist_amp.commands.parts import Package

# Lower ones first; a file imports from its own folder, or from what stands before it.
ORDER = [
    "__init__",
    "errors",
    "settings",
    "files",
    "distributed",
    "clock",
    "world",
    "config",
    "task",
    "loading",
    "optimizers",
    "precision",
    "optim",
    "scaling",
    "parallel",
    "data",
    "telemetry",
    "step",
    "bit_exact",
    "storage",
    "checkpoint",
    "run",
    "diagnostics",
    "supervise",
    "record",
    "train",
    "sources",
    "tasks",
    "verify",
    "commands",
    "bench",
]
IMPORTED_BY_NOTHING_ABOVE = {"sources", "tasks", "verify", "commands", "train"}

HEAVY = {  # package: the files that may import it
    "datasets": {"sources", "tasks"},
    "pyarrow": {"sources"},
    "fsspec": {"sources", "storage"},
    "tensorboard": {"telemetry"},
    "pydantic": {"config"},
    "transformers": {"tasks", "sources"},
    "tokenizers": {"sources"},
    "peft": {"tasks"},
    "pynvml": {"telemetry.health"},
    "sklearn": {"sources"},
}

# torch's tree functions and dispatch modes have no other name, and libraries rely on them.
AS_GOOD_AS_PUBLIC = ("torch.utils._pytree", "torch.utils._python_dispatch")

# One file per thing of torch that has no public name: guarded, with a public fallback, but for the
# kernels that torch's own GradScaler and clip_grad_norm_ call.
PRIVATE = {
    "checkpoint.allow_list": "DCP's memory formats, allow-listed for the unpickler",
    "commands.simulation": "tensors without memory, and a process group without ranks",
    "diagnostics.trace": "the sequence numbers of the autograd graph",
    "diagnostics.profiling": "the allocator's history and snapshot",
    "distributed.flight_recorder": "c10d's record of collectives",
    "distributed.process_group": "c10d's time-outs, abort and store",
    "optimizers.ema": "arithmetic on lists of tensors",
    "parallel": "the norms of a list of tensors",
    "precision": "the kernel that updates the loss scale",
    "verify.findings": "the base class of dropout",
    "verify.reference": "the base class of dropout",
}


def fits(size, lines, files):
    return size.lines <= lines and size.files <= files


# ---- budgets ----

# Not met since strangers' faults were fixed. The limits stay as they are: strict, so that the mark
# goes as soon as one is met again.
unmet = pytest.mark.xfail(strict=True, reason="this budget is not met; `architecture.py` prints it")


@pytest.fixture(scope="module")
def step_sizes():
    return architecture.step_sizes()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="before torch 2.13 this project's code gives unused parameters their gradients",
)
@pytest.mark.parametrize("strategy", architecture.STRATEGIES)
def test_a_steady_step_executes_at_most_400_lines_in_9_files(step_sizes, strategy):
    assert fits(step_sizes[strategy], lines=400, files=9), step_sizes[strategy]


# The goal is 1,600 lines in 40 files; this is the limit of today, which only rises for a check of
# what would be wrong in silence (tensors of the task, hooks and writes in forward, secrets).
@unmet
def test_what_runs_until_the_first_backward_does_not_grow():
    size = architecture.start_size("fsdp")  # which takes the longest way
    assert fits(size, lines=3650, files=56), size


def test_importing_the_step_loads_at_most_4350_lines_in_30_files():  # the budget is 4,000
    size, _ = architecture.import_closures("dist_amp.step", "dist_amp.train")
    assert fits(size, lines=4350, files=30), size


def test_importing_the_main_job_loads_at_most_8500_lines_in_56_files():  # the budget is 7,500
    _, size = architecture.import_closures("dist_amp.step", "dist_amp.train")
    assert fits(size, lines=8500, files=56), size


@unmet
def test_core_has_at_most_8000_lines():
    package = Package(ROOT / "dist_amp")
    files = package.reached(["train"])
    assert sum(architecture.line_count(package.files[name]) for name in files) <= 8000


def test_the_package_does_not_grow():
    # The budget is 21,000 lines in 130 files. This is what stood last: it is lowered, never raised.
    assert fits(architecture.package_size(), lines=31856, files=172), architecture.package_size()


def test_no_two_folders_import_each_other():
    assert architecture.mutual_imports() == []


# ---- the measures themselves ----


def test_a_function_counts_whole_and_once(tmp_path):
    file = tmp_path / "counted.py"
    file.write_text(
        "def outer():\n    def inner():\n        return 1\n    return inner\n\n\nx = 1\n"
    )
    assert architecture.size_of({(str(file), 1)}) == Size(4, 1)
    assert architecture.size_of({(str(file), 1), (str(file), 2)}) == Size(4, 1)
    assert architecture.size_of({(str(file), 2), (str(file), 7)}) == Size(2, 1)


# ---- imports ----


def test_imports_point_down():
    upward = {
        (name, other)
        for name in files()
        for other in imports_of(name)
        if ORDER.index(unit_of(other)) > ORDER.index(unit_of(name))
    }
    assert upward == set()


def test_what_uses_the_training_is_imported_by_nothing_below_it():
    ends = {
        (name, other)
        for name in files()
        for other in imports_of(name)
        if unit_of(other) in IMPORTED_BY_NOTHING_ABOVE
        and unit_of(name) not in IMPORTED_BY_NOTHING_ABOVE
    }
    assert ends == set()


def test_no_files_import_each_other_in_a_circle():
    done = set()
    path = []

    def visit(name):
        assert name not in path, f"a cycle: {' -> '.join([*path, name])}"
        if name in done:
            return
        path.append(name)
        for other in imports_of(name):
            visit(other)
        done.add(path.pop())

    for name in files():
        visit(name)


def test_heavy_packages_are_imported_only_where_they_are_needed():
    elsewhere = {
        (name, package)
        for name, path in files().items()
        for package in {module.split(".")[0] for module in modules_imported(path)} & set(HEAVY)
        if name not in HEAVY[package] and unit_of(name) not in HEAVY[package]
    }
    assert elsewhere == set()


def test_files_at_the_top_import_torch_and_the_standard_library():
    allowed = {"dist_amp", "torch", *sys.stdlib_module_names}
    more = {
        (name, module)
        for name, path in files().items()
        for module in {module.split(".")[0] for module in modules_imported(path)} - allowed
        if "." not in name
    }
    allowed_more = {("files", "filelock"), ("files", "xxhash"), ("settings", "annotated_types")}
    assert more == allowed_more


def test_each_folder_says_its_purpose_in_one_docstring():
    for name, path in files().items():
        if name.endswith(".__init__"):
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), name
            assert len(tree.body) == 1, f"{name} holds code"


def private_names_of_torch(path):
    """The dotted names of torch with a leading underscore that a file uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            is_private = re.match(r"(torch|dist)\b", name) and re.search(r"\._[a-zA-Z]", name)
            if is_private and not name.startswith(AS_GOOD_AS_PUBLIC):
                yield name


def test_private_names_of_torch_are_used_in_the_listed_files_only():
    elsewhere = {
        (name, private)
        for name, path in files().items()
        if name not in PRIVATE
        for private in private_names_of_torch(path)
    }
    assert elsewhere == set()
