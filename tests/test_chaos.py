"""The short form of chaos.py: real runs, broken; what they end with is compared bit by bit with
runs left alone.
"""

import random
import shutil
import signal

import chaos
import pytest
from chaos import LAYOUTS, Chaos, as_options, differences

from dist_amp.checkpoint.format import all_checkpoints

SHORT = {"train.steps": 30, "eval.every": 10}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), random.randrange(1000), **SHORT)


def all_good(rows):
    rows = list(rows)
    assert all(row.good == row.tried > 0 for row in rows), chaos.table(rows)


def test_a_run_whose_rank_is_killed_in_the_middle_of_a_checkpoint_goes_on_and_ends_bit_identical(
    world, launch
):
    words = as_options(world.words | LAYOUTS["fsdp"])
    killed = launch.each(2, *words, DIE_AT="in the midst of a shard:20:1")
    assert killed[1].returncode == -signal.SIGKILL
    assert killed[0].returncode > 0
    again = launch.each(2, *words)
    assert [rank.returncode for rank in again] == [0, 0], again[0].stderr[-3000:]
    assert ", resumed from step 10" in again[0].stdout, (
        "the checkpoint of step 20 was never complete"
    )
    assert differences(launch.folder / "run", world.through(**LAYOUTS["fsdp"])) == []


@pytest.mark.bad_input("a rank that hangs")
def test_a_rank_that_hangs_is_named_with_the_function_it_is_in_and_the_job_ends(world, launch):
    words = as_options(world.words | {"run.timeout_seconds": 10})
    first, second = launch.each(2, *words, HANG_AT="10:1")
    assert first.returncode > 0
    assert second.returncode != 0
    errors = first.stderr + second.stderr
    assert "error: rank 1 (process" in errors
    assert "loss_sum" in errors


@pytest.mark.slow
def test_torchrun_restarts_a_rank_that_is_killed_in_the_middle_of_a_checkpoint_and_the_run_ends_bit_identical(
    world,
):
    all_good(chaos.points(world, ["in the midst of a shard"], ["fsdp"]))


@pytest.mark.slow
def test_torchrun_ends_a_job_with_a_hanging_rank_and_the_run_goes_on_when_started_again(world):
    all_good([next(iter(chaos.hangs(world)))])


@pytest.mark.bad_input("torchrun killed, or a signal to it or any rank")
@pytest.mark.slow
def test_a_signal_in_an_evaluation_stops_all_ranks_at_one_step_and_the_evaluation_is_made_up_for(
    world,
):
    all_good(chaos.signals(world, ["SIGUSR1"], ["torchrun"], [2], ["evaluation"]))


@pytest.mark.slow
def test_the_comparison_sees_one_bit(world, tmp_path):
    one = world.through()
    assert differences(one, one) == []
    other = tmp_path / "other"
    shutil.copytree(one, other)
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(
        text.replace('"train/grad_norm": ', '"train/grad_norm": 1', 1)
    )
    assert [difference[:15] for difference in differences(one, other)] == ["line 0, step 1:"]
    (other / "metrics.jsonl").write_text(text)
    job = world.job(**LAYOUTS["ddp"], **{"optim.lr": 3.0001e-4})
    assert job.end() == 0
    names = differences(one, job.run)
    assert "model.0.weight" in names
    assert "ranks.0.random.torch" not in names, "the same numbers were drawn"
    assert all_checkpoints(one)[-1].name == all_checkpoints(job.run)[-1].name


# The long form in parts that a sample can hold, with fewer kills and signals; `bash
# launch/chaos.sh` has all of them.
PARTS = {
    **{
        f"sigkills {strategy} {dtype}": lambda trials, cell=(strategy, dtype): chaos.sigkills(
            trials, 3, [cell]
        )
        for strategy in LAYOUTS
        for dtype in ("fp16", "bf16")
    },
    **{
        f"{point}, {strategy}": lambda trials, where=([point], [strategy]): chaos.points(
            trials, *where
        )
        for strategy in LAYOUTS
        for point in chaos.POINTS
    },
    **{
        f"SIGTERM to {target} in {phase}": lambda trials, where=([target], [2], [phase]): (
            chaos.signals(trials, ["SIGTERM"], *where)
        )
        for target in ("one rank", "all ranks")
        for phase in ("training", "evaluation", "warm-up")
    },
    **{name: chaos.LONG[name] for name in ("flips", "orphans", "disks", "hangs", "mishaps")},
}


@pytest.mark.slow
@pytest.mark.parametrize("part", list(PARTS))
def test_nothing_is_lost(tmp_path, part):
    all_good(PARTS[part](Chaos(tmp_path, seed=random.randrange(1000))))


def test_the_parts_have_every_kind_of_trial_of_the_long_form():
    assert {*chaos.LONG} == {
        "sigkills",
        "points",
        "signals",
        "flips",
        "orphans",
        "disks",
        "hangs",
        "mishaps",
    }
