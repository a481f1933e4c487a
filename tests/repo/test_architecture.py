"""The budgets of what a reader follows and a process loads, and the one direction of imports.

`python tests/architecture.py` prints the budgets, which stand there, and the figures.
"""

import ast
import re
import sys
from graphlib import TopologicalSorter

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
)
IMPORTED_BY_NOTHING_ABOVE = {"sources", "tasks", "verify", "commands", "train"}

HEAVY = {  # package: the files that may import it
    "datasets": {"sources", "tasks"},
    "pyarrow": {"sources"},
    "fsspec": {"sources", "storage"},
    "tensorboard": {"telemetry"},
    "pydantic": {"config", "checkpoint.format", "sources.token_shards"},
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
    "commands.imagined": "tensors without memory, and a process group without ranks",
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


def test_imports_point_down_and_what_uses_the_training_is_imported_by_nothing_below_it():
    ends = IMPORTED_BY_NOTHING_ABOVE
    for name in files():
        for other in imports_of(name):
            above, below = unit_of(name), unit_of(other)
            assert ORDER.index(below) <= ORDER.index(above), f"{name} imports {other}"
            assert below not in ends or above in ends, f"{name} imports {other}"


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter({name: imports_of(name) for name in files()}).prepare()


def test_heavy_packages_are_imported_only_where_they_are_needed_and_none_at_the_top():
    at_the_top = set()
    for name, path in files().items():
        packages = {module.split(".")[0] for module in modules_imported(path)}
        for package in packages & HEAVY.keys():
            assert {name, unit_of(name)} & HEAVY[package], f"{name} imports {package}"
        if "." not in name:
            others = packages - {"dist_amp", "torch", *sys.stdlib_module_names}
            at_the_top |= {f"{name}: {package}" for package in others}
    assert at_the_top == {"files: filelock", "files: xxhash", "settings: annotated_types"}


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
    for name, path in files().items():
        assert name in PRIVATE or list(private_names_of_torch(path)) == [], name
