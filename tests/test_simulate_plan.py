"""`dist_amp.plan --simulate`: what it needs and lacks, and what it says of a plan."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import TESTS, needs_fake_gpus
from tiny import Tiny
from torch import nn

from dist_amp.commands import stand_in
from dist_amp.commands.plan import main
from dist_amp.errors import ConfigError

LINEAR = "--task.target test_simulate_plan:Wide --world_size 2 --parallel.strategy fsdp"


class Wide(Tiny):
    """Of 17 M parameters."""

    def __init__(self):
        super().__init__(samples=4096)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1))


class Refuses(Wide):
    """Wherever it finds a GPU."""

    def loss_sum(self, model, batch):
        if batch["x"].is_cuda:
            raise ValueError("no such feature")
        return super().loss_sum(model, batch)


def shown(capsys, words):
    """(exit status, standard output, standard error) of the command."""
    status = main(words.split())
    return status, *capsys.readouterr()


def interpreter(folder: Path, version: str) -> str:
    """A script in place of Python, in whose environment torch has this version.py."""
    package = folder / "site-packages/torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(version)
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho {package}/__init__.py\n")
    script.chmod(0o755)
    return str(script)


CUDA_13 = "__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"


@pytest.mark.bad_input(
    "`plan --simulate` without a CUDA build of torch, of another CUDA, or without its headers"
)
@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("", "needs torch for CUDA 13 (tested: 2.14.1), and {python} has no CUDA build of torch"),
        ("cuda: Optional[str] = None\n", "has no CUDA build of torch; give --simulate=PYTHON of"),
        (CUDA_13.replace("13.0", "12.8"), "and {python} has CUDA 12; give --simulate=PYTHON of"),
        (CUDA_13, "{python} -m pip install nvidia-cuda-runtime nvidia-cuda-crt"),
    ],
)
def test_an_interpreter_without_what_it_takes_is_refused(
    tmp_path, capsys, monkeypatch, version, message
):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    python = interpreter(tmp_path, version)
    status, out, err = shown(capsys, f"{LINEAR} --simulate {python}")
    assert (status, out) == (64, "")
    assert message.format(python=python) in err
    assert err.count("\n") == 1


@pytest.mark.bad_input("`plan --simulate` of an interpreter that is not there, or for a CPU")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--simulate no/python", "--simulate=no/python: there is no such interpreter; in a clone"),
        ("--simulate --run.device cpu", "--simulate is for GPUs; leave it or run.device=cpu out"),
    ],
)
def test_what_can_not_be_simulated_is_refused(capsys, words, message):
    status, out, err = shown(capsys, f"{LINEAR} {words}")
    assert (status, out) == (64, "")
    assert message in err


@pytest.mark.bad_input("`plan --simulate` without a C compiler, or with one that fails")
def test_without_a_c_compiler_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    status, out, err = shown(capsys, f"{LINEAR} --simulate")
    assert (status, out) == (64, "")
    assert "needs a C compiler: gcc, clang or the one that CC names (Debian: apt-get ins" in err
    # With headers that are none.
    found = stand_in.StandIn(sys.executable, tmp_path, "/usr/bin/gcc")
    with pytest.raises(ConfigError, match="can't compile .*fake_gpu.c with the headers in "):
        found.build(tmp_path)


@pytest.mark.bad_input("`plan --simulate` on another system than Linux")
def test_it_is_for_linux(capsys, monkeypatch):
    monkeypatch.setattr(stand_in.sys, "platform", "darwin")
    status, out, err = shown(capsys, f"{LINEAR} --simulate")
    assert (status, out) == (64, "")
    assert "--simulate needs Linux" in err


def planted(monkeypatch, result):
    """A stand-in whose process ends so."""

    def call(*args, **options):
        if isinstance(result, BaseException):
            raise result
        return result

    found = stand_in.StandIn("python", Path(), "gcc")
    monkeypatch.setattr(stand_in, "find_stand_in", lambda python: found)
    monkeypatch.setattr(stand_in.StandIn, "build", lambda found, folder: folder / "libcuda.so.1")
    monkeypatch.setattr(stand_in.StandIn, "call", call)


MEASURED = {"other": 2**28, "forward": 2**28, "backward": 2**28, "optimizer": 2**28}


def test_the_plan_is_printed_beside_what_was_measured(capsys, monkeypatch):
    planted(monkeypatch, (MEASURED, ""))
    _, out, _ = shown(capsys, f"{LINEAR} --simulate --json")
    plan = json.loads(out)
    (chosen,) = [one for one in plan["strategies"] if one["chosen"]]
    off = 100 * (chosen["on_device"] / 2**28 - 1)
    assert plan["simulated"]["planned"]["step"] == chosen["on_device"]
    assert plan["simulated"]["measured"]["step"] == 2**28
    assert plan["simulated"]["off_percent"]["step"] == pytest.approx(off)
    _, out, _ = shown(capsys, f"{LINEAR} --simulate")
    assert "fsdp on an imagined GPU of 79.65 GiB" in out
    assert out.splitlines()[-1].split()[-3:] == ["MiB", f"{off:+.1f}", "%"]


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("", "though the plan says that it fits"), ("--device_memory_GiB 0.1", "as planned")],
)
def test_memory_that_runs_out_there_is_compared_with_the_plan(
    capsys, monkeypatch, memory, expected
):
    planted(monkeypatch, ({}, "OutOfMemoryError: CUDA out of memory."))
    status, out, _ = shown(capsys, f"{LINEAR} {memory} --simulate")
    assert status == 0
    assert f"runs out of memory, {expected}" in out


@pytest.mark.bad_input("`plan --simulate` of a step that fails on a GPU, crashes or takes too long")
@pytest.mark.parametrize(
    ("result", "status", "message"),
    [
        (
            ({}, "ValueError: no (a.py, line 1)"),
            65,
            "a step on imagined GPUs raised ValueError: no",
        ),
        (subprocess.TimeoutExpired("python", 1), 1, "--simulate took more than 30 minutes"),
        (
            subprocess.CalledProcessError(-11, "python", "", "first\nlast\n"),
            65,
            "--simulate: python ended with -11: last",
        ),
    ],
)
def test_a_step_that_fails_there_is_named_after_the_plan(
    capsys, monkeypatch, result, status, message
):
    planted(monkeypatch, result)
    ended, out, err = shown(capsys, f"{LINEAR} --simulate")
    assert ended == status
    assert "sent per step" in out, "the plan is printed all the same"
    assert message in err


@pytest.mark.slow
@pytest.mark.engine
@needs_fake_gpus
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (LINEAR, "peak in step"),
        # The assumed context of 600 MiB leaves too little.
        (f"{LINEAR} --device_memory_GiB 0.7", "runs out of memory, though the plan says that it"),
        (LINEAR.replace("Wide", "Refuses"), "raised ValueError: no such feature (test_simulate_pl"),
    ],
)
def test_steps_run_on_imagined_gpus(capsys, monkeypatch, words, message):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")
    _, out, err = shown(capsys, f"{words} --simulate --compile.blocks false")
    assert message in out + err
