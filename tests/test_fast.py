"""The fallbacks for names that torch does not document: each is removed, and the code runs without
it.
"""

import subprocess
import sys

import pytest
import torch
from test_blocks import COMPILED, INDUCTOR, InParts
from tiny import Tiny, make_run, take_steps

from dist_amp.errors import ConfigError
from dist_amp.scaling import compile as fast_compile
from dist_amp.world import World

ABORT = """
import torch.distributed as dist
from dist_amp.distributed.process_group import abort_process_groups
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if {remove}:
    del dist.distributed_c10d._abort_process_group
abort_process_groups()
print("aborted", dist.is_initialized())
"""


@pytest.mark.parametrize("remove", [False, True])
def test_process_groups_are_aborted_also_without_the_private_function(remove):
    done = subprocess.run(
        [sys.executable, "-c", ABORT.format(remove=remove)], capture_output=True, text=True
    )
    assert done.stdout == f"aborted {remove}\n", done.stderr


# ---- the compiler ----


@pytest.fixture
def without(monkeypatch):
    """without("name", ...): torch lacks these private names."""
    torch.compiler.reset()
    real = fast_compile.private

    def remove(*names):
        monkeypatch.setattr(
            fast_compile,
            "private",
            lambda path, default: default if path.endswith(names) else real(path, default),
        )

    return remove


def test_blocks_compile_without_any_private_name(without, capsys):
    without("")
    take_steps(make_run(World(), Tiny(), *COMPILED), 2)
    take_steps(make_run(World(), InParts(), *COMPILED), 2)
    assert "warning" not in capsys.readouterr().err, "graph breaks are allowed from the start"


def test_a_missing_compiler_is_found_without_torchs_own_check(without, monkeypatch):
    without("get_cpp_compiler", "InvalidCxxCompiler")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile.mode=default needs a C\+\+ compiler on a CPU"):
        make_run(World(), Tiny(), *INDUCTOR)


@pytest.mark.parametrize(("found", "missing"), [(None, "Triton on a GPU"), ("triton", "")])
def test_triton_is_found_without_torchs_own_check(without, monkeypatch, found, missing):
    without("has_triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert fast_compile._missing_compiler(torch.device("cuda", 0)) == missing
