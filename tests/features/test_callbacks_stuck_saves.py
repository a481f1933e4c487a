"""Core as test_stuck_saves.py tests it, with callbacks."""

import pytest
from test_stuck_saves import SHARD, check_end, start


@pytest.mark.bad_input("a disk that blocks all ranks, or the only one, in the last save")
@pytest.mark.parametrize(("ranks", "words"), [([0], []), ([0, 1], ["--parallel.strategy", "fsdp"])])
def test_a_job_whose_last_save_is_stuck_on_all_ranks_ends_and_can_be_continued(
    launch, ranks, words
):
    plant = f"{SHARD}:0,1:4"
    check_end(launch, start(launch, len(ranks), *words, plant=plant), ranks, "write_shards")


@pytest.mark.bad_input("a disk that blocks the save of a run that a signal stops")
def test_a_preempted_job_whose_save_is_stuck_ends_and_can_be_continued(launch):
    more = ("--train.steps", "8")
    ends = start(launch, 2, *more, plant=f"{SHARD}:1:3", PREEMPTED_AT="3")
    check_end(launch, ends, [1], "write_shards", *more)


@pytest.mark.bad_input("a disk on which nothing can be flushed any more")
def test_a_job_on_whose_disk_every_flush_blocks_says_so_and_ends(launch):
    (end,) = start(launch, 1, plant="os:fsync:0:4")
    assert end.returncode == 1
    assert "error: run/checkpoints/step_00000004 could not be written: " in end.stderr
    assert "rank 0 in make_folder: blocks (blocks.py, line " in end.stderr
