"""A save whose writer is stuck: training and the exit continue, and say which rank and stage."""

import json
import threading
import time
from contextlib import redirect_stderr
from io import StringIO
from unittest.mock import patch

import pytest
from ranks import on_ranks
from test_train import TINY, wait_for
from tiny import Tiny, make_run, take_steps
from torch.distributed.checkpoint.filesystem import FileSystem

from dist_amp.checkpoint import saver as saver_module
from dist_amp.checkpoint.format import integrity_error
from dist_amp.errors import Transient
from dist_amp.world import World

TIMEOUT = 2

# --- in a run


def words(folder, *more):
    run = ("--run.dir", folder, "--run.timeout_seconds", TIMEOUT, "--checkpoint.keep", 9)
    return *run, "--train.micro_batch_size", 2, *more


def saves_around_a_stuck_one(world, folder):
    """What rank 0 says of the first save, which hangs on the last rank, and of the next ones: two
    meanwhile, of which the later fails, and one after it has ended. Then the checkpoints' names.
    """
    is_last = world.rank == world.world_size - 1
    run = make_run(world, Tiny(), *words(folder, "--parallel.strategy", "ddp"))
    released = threading.Event()
    real = FileSystem.create_stream

    def stuck(*args):
        if is_last:
            assert released.wait(300)
        return real(*args)

    printed = StringIO()
    saving = run.saver
    with redirect_stderr(printed):
        with patch.object(FileSystem, "create_stream", stuck):
            take_steps(run, 1)
            saving.save(wait=False)
            save = run.saver.pending
            take_steps(run, 1)
            saving.save(wait=False)  # finds that it is stuck
            take_steps(run, 1)
            with pytest.raises(Transient) as error:
                saving.save(wait=False)
        released.set()
        wait_for(save.future.done, "the end of the save")
        take_steps(run, 1)
        saving.save(wait=True)
    world.barrier()
    folders = sorted(folder.glob("checkpoints/*"))
    assert [integrity_error(each) for each in folders] == [""] * len(folders)
    return printed.getvalue(), str(error.value), [each.name for each in folders]


@pytest.mark.bad_input("a disk that blocks a write for longer than `run.timeout_seconds`")
def test_training_continues_past_a_stuck_save_and_ends_if_it_is_stuck_at_the_next_one(tmp_path):
    (printed, error, names), _ = on_ranks(2, saves_around_a_stuck_one, tmp_path)
    assert "the run trains on, and ends if that save has not ended at the next one" in printed
    stuck = "step_00000001 could not be written: step_00000001 has made no progress for 2 s, of "
    stuck += "run.timeout_seconds=2 (rank 0 in write_shards, rank 1 in write_shards); check the"
    assert stuck in printed
    assert "step_00000003 could not be written: step_00000001 has made no progress" in error
    # A copy is of its step, whenever it is written.
    assert names == ["step_00000001", "step_00000004"]


def test_a_save_that_writes_for_longer_than_the_timeout_is_not_stuck(tmp_path):
    def slowly(*args):
        time.sleep(TIMEOUT / 4)
        return real(*args)

    real = saver_module.Planner.resolve_data
    run = make_run(World(), Tiny(), *words(tmp_path))
    take_steps(run, 1)
    started = time.monotonic()
    with patch.object(saver_module.Planner, "resolve_data", slowly):
        run.saver.save(wait=True)
    assert time.monotonic() - started > 2 * TIMEOUT
    assert integrity_error(tmp_path / "checkpoints/step_00000001") == ""


def test_a_save_that_is_not_a_copy_ends_the_run_once_it_is_stuck(tmp_path):
    released = threading.Event()
    run = make_run(World(), Tiny(), *words(tmp_path, "--checkpoint.async_save", "false"))
    take_steps(run, 1)
    blocked = patch.object(saver_module, "publish", lambda *_: released.wait(300))
    error = r"step_00000001 could not .*\(rank 0 in finish\)"
    with blocked, pytest.raises(Transient, match=error):
        run.saver.save(wait=False)
    released.set()


def test_a_save_that_must_succeed_fails_at_once_while_another_is_stuck(tmp_path):
    released = threading.Event()
    run = make_run(World(), Tiny(), *words(tmp_path))
    take_steps(run, 1)
    try:
        with patch.object(saver_module, "publish", lambda *_: released.wait(300)):
            saving = run.saver
            saving.save(wait=False)
            save = run.saver.pending
            take_steps(run, 1)
            for _ in range(2):
                with pytest.raises(Transient, match=r"step_00000002 could not .* in finish\)"):
                    saving.save(wait=True)
            saving.close()  # nor does leaving wait for it
            assert not save.future.done()
    finally:
        released.set()


# --- at the end of a job

PLANTED = """
import importlib, os, signal, time
from contextlib import suppress
from tiny import Tiny

class Planted(Tiny):
    step = 0

    def on_step(self, run, report):
        if run.step == int(first) and run.saver.pending is not None:
            run.saver.pending.future.result()
        Planted.step = run.step
        if os.environ.get("PREEMPTED_AT") == f"{run.step}":
            os.kill(os.getpid(), signal.SIGTERM)

module, name, ranks, first = os.environ["PLANT"].split(":")
if os.environ.get("RANK", "0") in ranks.split(","):
    owner = importlib.import_module(module)
    *more, name = name.split(".")
    for part in more:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def blocks(*args, **options):
        if Planted.step >= int(first):
            with suppress(FileExistsError):  # the other rank's
                os.mkfifo("pipe")
            open("pipe", "wb")  # nobody reads it
        return real(*args, **options)

    setattr(owner, name, blocks)
"""
SAVER = "dist_amp.checkpoint.saver"
SHARD = "torch.distributed.checkpoint.filesystem:FileSystem.create_stream"
# (what blocks, the rank, the stage that is named, the strategy, checkpoint.async_save)
STAGES = [
    ("pathlib:Path.mkdir", 0, "make_folder", "ddp", "true"),
    (f"{SAVER}:appears", 1, "find_folder", "fsdp", "false"),
    (SHARD, 0, "write_shards", "ddp", "false"),
    (SHARD, 1, "write_shards", "fsdp", "true"),
    ("dist_amp.checkpoint.format:sync_folder", 0, "finish", "ddp", "true"),
]


def start(launch, ranks, *more, plant="os:fsync:none:0", torchrun=False, **environ):
    (launch.folder / "blocks.py").write_text(PLANTED)
    run = ["--task.target", "blocks:Planted", "--train.steps", "4", "--checkpoint.every", "2"]
    run += ["--run.dir", "run", "--run.timeout_seconds", "4", *more]
    if torchrun:
        return [launch(ranks, *TINY, *run, PLANT=plant, timeout=120, **environ)]
    return launch.each(ranks, *TINY, *run, PLANT=plant, timeout=90, **environ)


def check_end(launch, ends, ranks, stage, *more):
    """The summary names what blocks; the checkpoint before is valid, and the run continues."""
    assert {end.returncode for end in ends} == {1}, ends[0].stderr[-3000:]
    summary = json.loads((launch.folder / "run/summary.json").read_text())
    for rank in ranks:
        assert f"rank {rank} in {stage}" in summary["cause"]
    assert " could not be written: " in summary["cause"]
    assert integrity_error(launch.folder / "run/checkpoints/step_00000002") == ""
    again = start(launch, len(ends), *more)
    assert {end.returncode for end in again} == {0}, again[0].stderr[-3000:]
    last = max((launch.folder / "run/checkpoints").glob("step_*"))
    assert last.name >= "step_00000004"
    assert integrity_error(last) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rank", "stage", "strategy", "in_background"), STAGES)
def test_a_job_ends_with_the_rank_and_stage_in_which_its_save_is_stuck(
    launch, what, rank, stage, strategy, in_background
):
    more = ["--parallel.strategy", strategy, "--checkpoint.async_save", in_background]
    ends = start(launch, 2, *more, "--train.steps", "6", plant=f"{what}:{rank}:4")
    check_end(launch, ends, [rank], stage)


@pytest.mark.slow
def test_torchrun_ends_with_ranks_whose_threads_are_stuck(launch):
    (end,) = start(launch, 2, "--train.steps", "6", plant=f"{SHARD}:1:4", torchrun=True)
    assert end.returncode == 1
    assert "rank 1 in write_shards" in end.stderr
