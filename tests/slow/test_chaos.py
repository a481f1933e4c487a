"""Real runs of two ranks, broken in every way we know: each ends as a run that was left alone, bit
by bit.

DIST_AMP_KILLS=12 bash launch/test.sh -m slow tests/slow/test_chaos.py    # more kills
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import pytest
from chaos import LAYOUTS, Chaos, differences, is_there
from restless import MAIN_ONLY, POINTS, STEPS_BETWEEN

from dist_amp.checkpoint.format import all_checkpoints

KILLS = int(os.environ.get("DIST_AMP_KILLS", "4"))
# Ranks and strategy of a bit-exact run's attempts.
ANY_WORLD = [(4, "ddp"), (2, "fsdp"), (1, "single"), (8, "hsdp"), (2, "ddp"), (4, "fsdp")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), 0)


@pytest.fixture
def chaos(runs):
    seed = random.randrange(1000)
    print(f"seed {seed}")
    runs.random = random.Random(seed)
    return runs


@pytest.mark.slow
def test_the_comparison_sees_one_bit(chaos, tmp_path):
    run = chaos.through()
    assert json.loads((run / "summary.json").read_text())["skipped_steps"] > 0
    assert differences(run, run) == []
    other = shutil.copytree(run, tmp_path / "other")
    text = (other / "metrics.jsonl").read_text()
    text = text.replace('"train/grad_norm": ', '"train/grad_norm": 1', 1)
    (other / "metrics.jsonl").write_text(text)
    assert [difference[:7] for difference in differences(run, other)] == ["line 0:"]
    names = differences(run, chaos.through(**{"optim.lr": 3.0001e-4}))
    assert "model.0.weight" in names
    assert "ranks.0.random.torch" not in names, "the same numbers were drawn"


# ---- killed ----


def kill(*pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "dtype", "workers"),
    [("ddp", "fp16", 0), ("ddp", "bf16", 2), ("fsdp", "fp16", 0), ("fsdp", "bf16", 2)],
)
def test_a_rank_that_is_killed_at_any_time_is_started_again(chaos, strategy, dtype, workers):
    words = {**LAYOUTS[strategy], "precision.dtype": dtype, "data.workers": workers}
    words |= {"checkpoint.every": 5, "train.steps": 60 + 50 * KILLS}
    job = chaos.job(restarts=5 * KILLS, **words)
    for _ in range(KILLS):
        job.wait_for("step", count=1 + job.count("step"))
        time.sleep(chaos.random.uniform(0, 1.5))
        starts = job.count("run    ")
        kill(chaos.random.choice(list(job.rank_processes().values())))
        time.sleep(chaos.random.uniform(0, 5))
        if job.count("run    ") == starts:  # also while the ranks start
            kill(*list(job.rank_processes().values())[:1])
        job.wait_for("run    ", count=starts + 1)
    chaos.check(job, **words)


@pytest.mark.slow
def test_a_bit_exact_run_that_is_killed_continues_on_other_ranks_by_another_strategy(chaos):
    words = {"parallel.bit_exact": "true", "task.args.batch_norm": "false", "checkpoint.every": 5}
    words |= {"train.global_batch_size": 16, "train.accumulation_steps": "auto"}
    # One of an epoch's 8 steps is skipped: the scale grows twice in the others.
    words |= {"precision.dtype": "fp16", "precision.scaler.growth_interval": 3}
    words["train.steps"] = 40 * KILLS
    folder = chaos.new_folder()
    for number in range(KILLS):
        ranks, strategy = ANY_WORLD[number % len(ANY_WORLD)]
        job = chaos.forked(ranks, folder=folder, **words, **{"parallel.strategy": strategy})
        # Not by time: a fast machine would end the run before its last kill.
        job.wait_for("step", count=chaos.random.randint(1, 30))
        job.kill()
    chaos.check(chaos.forked(1, folder=folder, **words), **words)


IN_THE_DEFAULT_RUN = ("fsdp", "in the midst of a shard")


@pytest.mark.parametrize(
    ("strategy", "point"),
    [
        pytest.param(*row, marks=() if row == IN_THE_DEFAULT_RUN else pytest.mark.slow)
        for row in itertools.product(LAYOUTS, POINTS)
    ],
)
def test_a_kill_while_a_checkpoint_is_written_leaves_the_old_one_or_the_new(chaos, strategy, point):
    words = {**LAYOUTS[strategy], "train.steps": 40}
    # The first that is removed is that of the first save, at the third.
    step = (3 if point == "while an old one is removed" else 2) * STEPS_BETWEEN
    is_written = point in ("after the rename", "while an old one is removed")
    for rank in (0,) if point in MAIN_ONLY else (0, 1):
        job = chaos.forked(environ={"DIE_AT": f"{point}:{step}:{rank}"}, **words)
        assert job.processes[rank].wait(300) == -signal.SIGKILL, job.text[-3000:]
        if (strategy, point) == IN_THE_DEFAULT_RUN and rank == 1:
            assert job.processes[0].wait(300) > 0, "it ends by itself"
        job.kill()  # the other rank, as torchrun does
        again = chaos.finish(job, **words)
        resumed = next(line for line in again.text.splitlines() if line.startswith("run    "))
        assert resumed.endswith(f"step {step if is_written else step - STEPS_BETWEEN}"), resumed


# ---- stopped ----

PHASES = {  # the environment that makes them long, and the line with which they begin
    "training": ({}, "step     15"),
    "evaluation": ({"EVALUATION": "3"}, "step     20"),
    "warm-up": ({"WARM_UP": "1.5"}, "warming up"),
}


@pytest.mark.bad_input("torchrun killed, or a signal to it or any rank")
@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("target", ["torchrun", "one rank", "all ranks", "killed torchrun"])
def test_a_signal_stops_all_ranks_after_one_step_which_is_saved(chaos, target, phase):
    number = chaos.random.choice((signal.SIGTERM, signal.SIGUSR1))
    if "killed" in target:
        number = signal.SIGKILL
    environ, begins = PHASES[phase]
    job = (chaos.job if "torchrun" in target else chaos.forked)(environ=environ)
    job.wait_for(begins)
    time.sleep(0.3 if phase == "evaluation" else 0.0)
    pids = list(job.rank_processes().values())
    if "rank" not in target:
        pids = [job.process.pid]
    elif target == "one rank":
        pids = [chaos.random.choice(pids)]
    # A step's line comes a step later, unless an evaluation follows.
    seen = job.count("step") + (phase == "training")
    ranks = job.rank_processes().values()
    for pid in pids:
        os.kill(pid, number)
    job.end()
    while any(map(is_there, ranks)):
        time.sleep(0.1)
    stopped = job.summary
    assert stopped["stopped_by"] == "preempted", f"{number}\n{job.text[-2000:]}"
    assert stopped["exit_code"] == 75
    # The ranks exchange the stop about once a second, and at most after as many steps again.
    assert stopped["steps"] - seen <= 2 + seen
    assert all_checkpoints(job.run)[-1].name == f"step_{stopped['steps']:08d}"
    chaos.finish(job)


# ---- disks ----


@contextmanager
def small_disk(folder, options):
    """A file system of its own over `folder`."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.mark.slow
@needs_root
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_no_line(chaos):
    words = {"train.steps": 120}
    folder = chaos.new_folder()
    with small_disk(folder / "run", "size=16m"):
        job = chaos.forked(folder=folder, **words)
        job.wait_for("step     15")
        with suppress(OSError), (folder / "run" / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)
        job.wait_for("warning: checkpoint")
        job.wait_for("step", count=job.count("step") + 5)
        (folder / "run" / "ballast").unlink()
        chaos.check(job, **words)


@pytest.mark.slow
@needs_root
def test_a_folder_that_is_read_only_is_named_and_the_run_ends_from_its_last_checkpoint(chaos):
    job = chaos.forked()
    job.wait_for("step     15")
    time.sleep(0.5)
    with small_disk(job.run / "checkpoints", "ro"):
        assert job.end() != 0
        assert "could not be written: rank 0: Read-only file system" in job.text
        assert "rank 0: Traceback" not in job.text
    newest = int(all_checkpoints(job.run)[-1].name.removeprefix("step_"))
    assert newest > 0
    assert f"resumed from step {newest}\n" in chaos.finish(job).text
