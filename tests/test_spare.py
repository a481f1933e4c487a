"""Spare processes of the launcher: a restart's ranks, which have their imports already."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train import TINY, wait_for

from dist_amp.commands import spare
from dist_amp.commands.spare import TRAIN, Spares

LAUNCHER = """
import sys
from dist_amp.commands import launch, spare
spare.AFTER_SECONDS = 0.0
sys.exit(launch.main(sys.argv[1:]))
"""
# Waits in the third step of the first attempt.
TASK = """
import json, os, sys, time
from pathlib import Path
from tiny import Tiny

class Waits(Tiny):
    def on_step(self, run, report):
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        text = json.dumps([os.getpid(), run.step, sys.orig_argv])
        Path(f"attempt{attempt}_rank{run.world.rank}").write_text(text)
        while attempt == "0" and run.step == 3:
            time.sleep(0.1)
"""


def handler(local_rank=0, stdout=None, stderr=None):
    """What torch gives of a rank to be started."""
    files = [path and SimpleNamespace(name=str(path)) for path in (stdout, stderr)]
    return SimpleNamespace(local_rank_id=local_rank, _stdout=files[0], _stderr=files[1])


def command_of(*words):
    return (sys.executable, "-u", "-m", TRAIN, *words)


def spare_pids(launcher):
    pids = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
            is_child = f"PPid:\t{launcher.pid}\n" in status.read_text()
        except OSError:  # it has ended
            continue
        if is_child and spare.__name__.encode() in words:
            pids.append(int(status.parent.name))
    return pids


def is_in_third_step(path):
    return path.exists() and json.loads(path.read_text() or "[0, 0]")[1] == 3


@pytest.fixture
def spares(monkeypatch):
    monkeypatch.setattr(spare, "AFTER_SECONDS", 0.0)
    spares = Spares()
    yield spares
    spares.close()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_after_a_kill_the_spares_are_the_ranks_and_the_run_ends_as_usual(launch, strategy):
    folder = launch.folder
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "waits.py").write_text(TASK)
    words = ["--nproc-per-node", "2", *TINY, "--task.target", "waits:Waits", "--run.dir", "run"]
    words += ["--train.steps", "6", "--checkpoint.every", "1", "--parallel.strategy", strategy]
    launcher = subprocess.Popen(
        [sys.executable, "launcher.py", *words],
        cwd=folder,
        env=launch.environ({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = [folder / f"attempt0_rank{rank}" for rank in range(2)]
        wait_for(lambda: all(map(is_in_third_step, first)), "the third step")
        wait_for(lambda: len(spare_pids(launcher)) == 2, "the spares")
        pids = spare_pids(launcher)
        os.kill(json.loads(first[1].read_text())[0], signal.SIGKILL)
        stdout, stderr = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, stderr
    ranks = [json.loads((folder / f"attempt1_rank{rank}").read_text()) for rank in range(2)]
    assert sorted(pid for pid, _, _ in ranks) == sorted(pids)
    assert {step for _, step, _ in ranks} == {6}
    assert ranks[0][2][-len(words) + 2 :] == words[2:]
    assert "restart 1 of 3" in stderr
    assert "done: 6 steps" in stdout
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["start_seconds"]["processes"] > 0
    environment = json.loads((folder / "run/environment.json").read_text())
    assert f"-m {TRAIN} " in environment["command"]


def test_a_spare_has_the_environment_arguments_and_output_files_of_its_rank(spares, tmp_path):
    output = tmp_path / "output"
    output.write_text("before\n")
    environ = {**os.environ, "DIST_AMP_TRAIN__STEPS": "77"}
    assert spares.take(handler(), command_of("--first"), environ) is None
    spares.prepare()
    words = ("--config", "demo", "--print_config", "--optim.lr", "0.25")
    process = spares.take(handler(stdout=output), command_of(*words), environ)
    assert process.wait(60) == 0
    text = output.read_text()
    assert text.startswith("before\n")
    assert "steps = 77\n" in text
    assert "lr = 0.25\n" in text
    assert spares.take(handler(), command_of(), environ) is None, "it is used once"


def test_an_ordinary_process_replaces_a_dead_spare_or_takes_a_huge_environment(
    spares,
):
    spares.take(handler(), command_of(), {})
    spares.prepare()
    ((process, _),) = spares._spares.values()
    process.kill()
    process.wait()
    assert spares.take(handler(), command_of(), {}) is None
    spares.prepare()
    ((process, _),) = spares._spares.values()
    assert spares.take(handler(), command_of(), {"LONG": "x" * 2**24}) is None
    assert process.returncode == -signal.SIGKILL


def test_other_modules_than_the_main_job_have_no_spares(spares):
    assert spares.take(handler(), (sys.executable, "-u", "-m", "other", TRAIN), {}) is None
    spares.prepare()
    assert not spares._spares


@pytest.mark.bad_input("a machine that can start no more processes while spare ones are prepared")
def test_a_spare_that_can_not_be_started_is_done_without(spares, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    spares.take(handler(), command_of(), {})
    monkeypatch.setattr(spare, "Popen", refuse)
    spares.prepare()
    assert spares.take(handler(), command_of(), {}) is None


def test_spares_end_with_the_launcher_however_it_ends(tmp_path):
    text = "import sys, time; from dist_amp.commands import spare; s = spare.Spares(); "
    text += "spare.AFTER_SECONDS = 0; from test_spare import handler, command_of; "
    text += "s.take(handler(), command_of(), {}); s.prepare(); print(flush=True); time.sleep(600)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, cwd=Path(__file__).parent
    )
    launcher.stdout.readline()
    (pid,) = spare_pids(launcher)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
