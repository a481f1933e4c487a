"""The budgets of what a reader follows and a process loads, and the one direction of imports.

`python tests/architecture.py` prints the budgets, which stand there, and the figures.
"""

import ast
import re
import sys

import pytest
from architecture import BUDGETS, figures, files, imports_of, modules_imported, unit_of
from torch.distributed.fsdp import FSDPModule

# Lower ones first; a file imports from its own folder, or from what stands before it.
ORDER = (
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
)
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
    "distributed.process_group": "c10d's time-outs, abort and store",
    "optimizers.ema": "arithmetic on lists of tensors",
    "parallel": "the norms of a list of tensors",
    "precision": "the kernel that updates the loss scale",
    "supervise.rank_reports": "c10d's record of collectives",
    "verify.findings": "the base class of dropout",
    "verify.reference": "the base class of dropout",
}


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="before torch 2.13 this project's code gives unused parameters their gradients",
)
def test_no_limit_is_exceeded_and_no_limit_is_below_its_budget():
    now = figures()
    assert now.keys() == BUDGETS.keys()
    assert {name: now[name] for name, (_, limit) in BUDGETS.items() if now[name] > limit} == {}
    assert [name for name, (budget, limit) in BUDGETS.items() if limit < budget] == []


# ---- imports ----


def imports():
    """(a file, a file that it imports)"""
    return {(name, other) for name in files() for other in imports_of(name)}


def test_imports_point_down():
    rank = ORDER.index
    assert [pair for pair in imports() if rank(unit_of(pair[1])) > rank(unit_of(pair[0]))] == []


def test_what_uses_the_training_is_imported_by_nothing_below_it():
    ends = IMPORTED_BY_NOTHING_ABOVE
    assert [
        pair for pair in imports() if unit_of(pair[1]) in ends and unit_of(pair[0]) not in ends
    ] == []


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


def packages_of(path):
    return {module.split(".")[0] for module in modules_imported(path)}


def test_heavy_packages_are_imported_only_where_they_are_needed():
    elsewhere = {
        (name, package)
        for name, path in files().items()
        for package in packages_of(path) & set(HEAVY)
        if name not in HEAVY[package] and unit_of(name) not in HEAVY[package]
    }
    assert elsewhere == set()


def test_files_at_the_top_import_torch_and_the_standard_library():
    allowed = {"dist_amp", "torch", *sys.stdlib_module_names}
    top = {name: path for name, path in files().items() if "." not in name}
    more = {
        (name, package) for name, path in top.items() for package in packages_of(path) - allowed
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
    others = {name: path for name, path in files().items() if name not in PRIVATE}
    assert {
        name: found for name, path in others.items() if (found := [*private_names_of_torch(path)])
    } == {}
