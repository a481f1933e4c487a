"""Saves in the background: each holds its step, whatever training does meanwhile. Training goes on
after one that fails; one that is stuck ends it, by the name of the rank and the stage.
"""

import json
import os
import signal
import threading
import time
from contextlib import closing, redirect_stderr
from io import StringIO
from unittest.mock import patch

import pytest
import torch
from chaos import tensors_of
from ranks import on_ranks
from test_train import TINY, wait_for
from tiny import Tiny, log_row, make_run, take_steps
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.utils._pytree import tree_leaves

from dist_amp.checkpoint import background
from dist_amp.checkpoint.background import Staging
from dist_amp.checkpoint.format import checkpoint_folder, integrity_error
from dist_amp.errors import Transient
from dist_amp.world import World, local


def words(folder, *more, timeout=1):
    run = ("--run.dir", folder, "--run.timeout_seconds", timeout, "--checkpoint.keep", 9)
    return *run, "--train.micro_batch_size", 2, *more


def full_disk_on_rank_1(world, folder):
    """The warnings and checkpoints of three saves; two find no space on rank 1."""
    run = make_run(world, Tiny(), *words(folder, "--parallel.strategy", "fsdp", timeout=300))

    class Full(FileSystemWriter):
        def write_data(self, plan, planner):
            if world.rank == 1 and "00000001" in str(self.path):
                torch.save(torch.ones(10**6), "/dev/full")  # torch's writer gives no reason
            if world.rank == 1 and "00000002" in str(self.path):
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    full = patch.object(background, "FileSystemWriter", Full)
    with full, closing(run.saver) as saver, redirect_stderr(StringIO()) as said:
        for _ in range(3):
            take_steps(run, 1)
            saver.save(wait=False)
            while run.saver.pending is not None:
                saver.on_log(log_row(run))
    world.barrier()
    return said.getvalue(), [path.name for path in folder.glob("checkpoints/*")]


@pytest.mark.bad_input("no space, or quota, while saving")
def test_a_failed_background_save_is_known_to_all_ranks_and_the_run_continues(tmp_path):
    (said, kept), (_, kept_by_1) = on_ranks(2, full_disk_on_rank_1, tmp_path)
    assert kept == kept_by_1 == ["step_00000003"]
    assert "step_00000001 could not be written: rank 1: no space is left on the disk; the " in said
    assert "step_00000002 could not be written: rank 1: No space left on device; the " in said


def saves_around_a_stuck_one(world, folder):
    """The error of the save after one that hangs on rank 1, and the checkpoints' names once that
    one has ended and another is made.
    """
    run = make_run(world, Tiny(), *words(folder, "--parallel.strategy", "ddp"))
    released = threading.Event()
    real = FileSystem.create_stream

    def stuck(*args):
        if world.rank == 1:
            assert released.wait(300)
        return real(*args)

    saving = run.saver
    with patch.object(FileSystem, "create_stream", stuck):
        take_steps(run, 1)
        saving.save(wait=False)
        save = run.saver.pending
        take_steps(run, 1)
        with pytest.raises(Transient) as error:
            saving.save(wait=False)
    saving.close(error.value)
    assert not save.future.done(), "leaving does not wait for it"
    released.set()
    wait_for(save.future.done, "the end of the save")
    take_steps(run, 1)
    saving.save(wait=True)
    world.barrier()
    folders = sorted(folder.glob("checkpoints/*"))
    assert [integrity_error(each) for each in folders] == [""] * len(folders)
    return str(error.value), [each.name for each in folders]


@pytest.mark.bad_input("a disk that blocks a write for longer than `run.timeout_seconds`")
def test_the_run_ends_with_the_ranks_and_stages_of_a_stuck_save_at_the_next_one(tmp_path):
    (error, names), _ = on_ranks(2, saves_around_a_stuck_one, tmp_path)
    stuck = "step_00000001 could not be written: it has made no progress for run.timeout_seconds=1 "
    assert f"{stuck}(rank 0 in write_shards, rank 1 in write_shards); check the file" in error
    # A copy is of its step, whenever it is written.
    assert names == ["step_00000001", "step_00000003"]


def test_a_save_that_writes_for_longer_than_the_timeout_is_not_stuck(tmp_path):
    slow = iter([0.5] * 5)

    def slowly(*args):
        time.sleep(next(slow, 0))
        return real(*args)

    real = background.Planner.resolve_data
    run = make_run(World(), Tiny(), *words(tmp_path, timeout=2))
    take_steps(run, 1)
    with patch.object(background.Planner, "resolve_data", slowly):
        run.saver.save(wait=True)
    assert next(slow, None) is None
    assert integrity_error(tmp_path / "checkpoints/step_00000001") == ""


# --- copies


def four_saves(world, folder, strategy, async_save):
    """The bytes that all ranks copy for a save, the memory of each of four copies between steps,
    which saves are planned as the one before, and how many are written at one time.
    """
    more = ("--parallel.strategy", strategy, "--checkpoint.async_save", async_save)
    run = make_run(world, Tiny(), *words(folder, *more, timeout=300))
    copy, plan = Staging.copy, background.Planner.create_local_plan
    write = background.write_tensors
    copies, reused, under_way, most = [], [], [], []

    def staged(staging, state):
        copies.append(copy(staging, state))
        return copies[-1]

    def planned(planner):
        planned = plan(planner)
        reused.append(not planned.usable)
        return planned

    def slow(*args, **kwargs):
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.05)
        write(*args, **kwargs)
        under_way.pop()

    planning = patch.object(background.Planner, "create_local_plan", planned)
    writing = patch.object(background, "write_tensors", slow)
    with patch.object(Staging, "copy", staged), planning, writing, closing(run.saver) as saver:
        for step in range(4):
            take_steps(run, 1)
            if step == 3 and world.rank == 1:
                run.optimizer.state[run.parallel.parameters[0]]["note"] = "new"
            saver.save(wait=False)
            assert (saver.pending is None) == (async_save == "false")
        take_steps(run, 1)

    def memory(copy):
        tensors = (local(leaf) for leaf in tree_leaves(copy) if isinstance(leaf, torch.Tensor))
        return {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}

    memories = list(map(memory, copies))
    copied = sum(nbytes for first in memories[:1] for nbytes in first.values())
    return sum(world.gather(copied)), memories, reused, max(most)


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (4, "hsdp")])
def test_background_saves_hold_their_steps_do_not_overlap_and_copy_each_byte_once_and_in_place(
    tmp_path, ranks, strategy
):
    results = on_ranks(ranks, four_saves, tmp_path / "background", strategy, "true")
    on_ranks(ranks, four_saves, tmp_path / "waited for", strategy, "false")
    for step in (3, 2, 1):
        paths = [checkpoint_folder(folder, step) for folder in tmp_path.iterdir()]
        one, other = map(tensors_of, paths)
        assert one == other
    for rank, (copied, memories, reused, most) in enumerate(results):
        assert copied == sum(len(bits) for _, _, bits in one.values()) > 0
        assert memories == [memories[0]] * 4
        assert reused == [False, True, True, rank != 1], "planned again where the state is new"
        assert most == 1


def test_what_is_staged_equals_the_state_and_shares_nothing_with_it():
    shared = torch.randn(6)
    state = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "with gaps": torch.randn(8, 8)[::2, ::2],
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(3).to_sparse(),
        "whole": shared,
        "part": shared[2:4],
        "nested": {"count": 7, "list": [1, 2], "both": [shared, (torch.ones(2), 5)]},
    }
    staging = Staging(torch.device("cpu"))
    staging.copy({"whole": shared})
    staged = staging.copy(state)
    for a, b in zip(tree_leaves(state), tree_leaves(staged), strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a.to_dense(), b.to_dense())
            assert a.dtype == b.dtype
        else:
            assert a == b
    assert staged["channels last"].stride() == state["channels last"].stride()
    state["nested"]["list"].append(3)
    shared.add_(1)
    assert staged["nested"]["list"] == [1, 2]
    assert torch.equal(staged["whole"] + 1, shared)
    # torch's writer clones a tensor whose storage holds more than it.
    assert staged["part"].untyped_storage().size() == staged["part"].nbytes


# --- at the end of a job


class Planted(Tiny):
    """What PLANT names blocks for ever on a rank from a step on: "function:rank:step"."""

    def on_step(self, run, report):
        function, rank, step = os.environ["PLANT"].split(":")
        if (rank, step) == (f"{run.world.rank}", f"{run.step}"):
            if run.saver.pending is not None:
                run.saver.pending.future.result()
            patch(function, lambda *args, **options: threading.Event().wait()).start()
        if os.environ.get("PREEMPTED_AT") == f"{run.step}":
            os.kill(os.getpid(), signal.SIGTERM)


SHARD = "torch.distributed.checkpoint.filesystem.FileSystem.create_stream"
# (what blocks, the rank, the stage that is named, the strategy, checkpoint.async_save)
STAGES = [
    ("pathlib.Path.mkdir", 0, "make_folder", "ddp", "true"),
    ("dist_amp.checkpoint.background.appears", 1, "find_folder", "fsdp", "false"),
    (SHARD, 0, "write_shards", "ddp", "false"),
    (SHARD, 1, "write_shards", "fsdp", "true"),
    ("dist_amp.checkpoint.format.sync_folder", 0, "finish", "ddp", "true"),
]


def start(launch, ranks, *more, plant="nothing:none:0", **environ):
    run = ["--task.target", "test_background_saves:Planted", "--train.steps", "4"]
    run += ["--checkpoint.every", "2", "--run.dir", "run", "--run.timeout_seconds", "4", *more]
    return launch.each(ranks, *TINY, *run, PLANT=plant, timeout=120, **environ)


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
