"""The fallbacks for names that torch does not document: each is removed, and the code runs without it."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_blocks import COMPILED, INDUCTOR, InParts
from tiny import Tiny, make_run, take_steps

from dist_amp.errors import ConfigError
from dist_amp.fast import compile as fast_compile
from dist_amp.fast.process_group import all_reduce_sum, reduce_options, shared_store
from dist_amp.world import World

# ---- the default process group ----


def sums(world, without_methods):
    """[rank, 1] summed over all ranks, in place."""
    tensor = torch.tensor([float(world.rank), 1.0])
    with pytest.MonkeyPatch.context() as patch:
        if without_methods:
            patch.setattr(dist, "group", type("group", (), {"WORLD": object()}))
        all_reduce_sum(tensor, reduce_options())
    return tensor.tolist()


@pytest.mark.parametrize("without_methods", [False, True])
def test_a_tensor_is_summed_over_all_ranks_also_by_dist_all_reduce(without_methods):
    assert on_ranks(2, sums, without_methods) == [[1.0, 2.0]] * 2


def key_of_the_other(world):
    store = shared_store()
    store.set(f"test_fast/{world.rank}", str(world.rank))
    return store.get(f"test_fast/{1 - world.rank}").decode()


def test_all_ranks_share_one_store():
    assert on_ranks(2, key_of_the_other) == ["1", "0"]


ABORT = """
import torch.distributed as dist
from dist_amp.fast.process_group import abort_process_groups
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if {remove}:
    del dist.distributed_c10d._abort_process_group
abort_process_groups()
print("aborted", dist.is_initialized())
"""


@pytest.mark.parametrize("remove", [False, True])
def test_process_groups_are_aborted_also_without_the_private_function(remove):
    done = subprocess.run([sys.executable, "-c", ABORT.format(remove=remove)], capture_output=True, text=True)
    assert done.stdout == f"aborted {remove}\n", done.stderr


# ---- the compiler ----


@pytest.fixture
def without(monkeypatch):
    """without("name", ...): torch lacks these private names."""
    torch.compiler.reset()
    real = fast_compile.private

    def remove(*names):
        monkeypatch.setattr(
            fast_compile, "private", lambda path, default: default if path.endswith(names) else real(path, default)
        )

    return remove


ERRORS = ("BackendCompilerFailed", "TorchRuntimeError", "TorchDynamoException", "FailOnRecompileLimitHit")


def test_a_private_name_that_is_missing_gives_the_fallback():
    assert fast_compile.private("torch.no_such_module.name", 1) == 1
    assert fast_compile.private("torch.compiler.no_such_name", 2) == 2
    assert fast_compile.private("torch.compiler.reset", 3) is torch.compiler.reset


def test_blocks_compile_without_any_private_name(without, capsys):
    without("")
    take_steps(make_run(World(), Tiny(), *COMPILED), 2)
    take_steps(make_run(World(), InParts(), *COMPILED), 2)
    assert "warning" not in capsys.readouterr().err, "graph breaks are allowed from the start"


def test_without_torchs_error_types_its_errors_are_shown_as_they_are(without):
    without(*ERRORS)
    run = make_run(World(), InParts(), *COMPILED, "--compile.fullgraph", "true")
    with pytest.raises(RuntimeError, match="Data-dependent branching"):
        take_steps(run, 1)


def test_a_missing_compiler_is_found_without_torchs_own_check(without, monkeypatch):
    without("get_cpp_compiler", "InvalidCxxCompiler")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"inductor needs a C\+\+ compiler on a CPU"):
        make_run(World(), Tiny(), *INDUCTOR)


@pytest.mark.parametrize(("found", "missing"), [(None, "Triton on a GPU"), ("triton", "")])
def test_triton_is_found_without_torchs_own_check(without, monkeypatch, found, missing):
    without("has_triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert fast_compile._missing_compiler(torch.device("cuda", 0)) == missing
