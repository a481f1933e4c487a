"""A resumed run goes on as if it had never stopped; a checkpoint is complete or absent."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, make_run, moments_of, parameters_of, take_steps
from torch import nn

from dist_amp.checkpoint.format import all_checkpoints, read_manifest
from dist_amp.checkpoint.resume import newest_checkpoint
from dist_amp.checkpoint.saver import save
from dist_amp.errors import DataError
from dist_amp.world import World

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp"), (4, "hsdp")]
ELASTIC = ["--train.global_batch_size", 12, "--train.micro_batch_size", 1]
ELASTIC += ["--train.accumulation_steps", "auto"]


class Dropped(Tiny):
    """Draws random numbers in every forward, so that a lost generator shows."""

    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 16), self.norm(), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 1)
        )

    def norm(self):
        return nn.Identity()


class Normed(Dropped):
    """Has batch statistics, which differ between ranks."""

    def norm(self):
        return nn.BatchNorm1d(16)


def settings(folder, strategy, dtype, *more):
    words = ["--parallel.strategy", strategy, "--run.dir", str(folder), "--train.steps", 10]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 2]
    words += ["--optim.warmup_steps", 3, "--precision.scaler.growth_interval", 2]
    words += ["--use_amp", "false"] if dtype == "fp32" else ["--precision.dtype", dtype]
    return [*words, *more]


def state_of(run):
    """All that a run is, for comparing bit by bit."""
    buffers = [buffer.clone() for buffer in run.parallel.module.buffers()]
    tensors = [
        *parameters_of(run).values(),
        *buffers,
        *moments_of(run),
        run.schedule.counters,
        run.scaler.scale_tensor,
    ]
    return [
        *tensors,
        torch.get_rng_state(),
        torch.tensor([random.random(), run.step, run.data.position]),
    ]


def logged_steps(run, steps):
    """Take so many steps, with a log line after each third; return every loss and every logged
    loss.
    """
    losses = []
    for _ in range(steps):
        (report,) = take_steps(run, 1)
        run.metrics.record(report)
        losses.append(report.loss_sum.item())
        if run.step % 3 == 0:
            losses.append(run.metrics.log(run.step, run.schedule, run.scaler, run.data).loss)
    return losses


def stop_and_go_on(world, folder, strategy, dtype, workers, task=Dropped, more=()):
    words = settings(
        folder, strategy, dtype, "--data.workers", workers, "--run.deterministic", "true", *more
    )
    through = make_run(world, task(samples=40), *words)
    losses = logged_steps(through, 8)
    stopped = make_run(world, task(samples=40), *words)
    before = logged_steps(stopped, 4)  # in the middle of a log interval
    save(stopped)
    resumed = make_run(world, task(samples=40), *words, "--run.resume", "auto")
    assert resumed.resumed_from_step == resumed.step == 4
    assert before + logged_steps(resumed, 4) == losses
    torch.use_deterministic_algorithms(False)
    # `through` drew from the process's generators first, `resumed` last: compare what it drew at
    # the same point.
    return [
        torch.equal(a, b)
        for a, b in zip(state_of(resumed)[:-2], state_of(through)[:-2], strict=True)
    ]


# Each strategy, dtype, number of ranks and of workers at least once; the whole product is slow.
CORE = {
    *((1, "single", "fp32", 0), (2, "ddp", "fp16", 2), (2, "fsdp", "bf16", 2)),
    *((3, "ddp", "fp32", 0), (4, "hsdp", "fp16", 0)),
}
WHOLE = [
    (ranks, strategy, dtype, workers)
    for ranks, strategy in [*LAYOUTS, (4, "ddp"), (4, "fsdp")]
    for dtype in ("fp32", "bf16", "fp16")
    for workers in (0, 2)
]


@pytest.mark.parametrize(
    ("ranks", "strategy", "dtype", "workers"),
    [pytest.param(*cell, marks=[] if cell in CORE else pytest.mark.slow) for cell in WHOLE],
)
def test_a_resumed_run_is_bit_identical_to_one_that_was_not_stopped(
    tmp_path, ranks, strategy, dtype, workers
):
    for equal in on_ranks(ranks, stop_and_go_on, tmp_path, strategy, dtype, workers):
        assert all(equal)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "single"), (2, "ddp"), pytest.param(4, "ddp", marks=pytest.mark.slow)],
)
def test_batch_statistics_go_on_bit_identical_on_every_rank_though_their_averages_are_saved(
    tmp_path, ranks, strategy
):
    for equal in on_ranks(ranks, stop_and_go_on, tmp_path, strategy, "fp32", 0, Normed):
        assert all(equal)


def losses_of(run, steps):
    """The world's loss in each of so many steps, and the global samples that each was fed."""
    losses, samples = [], []
    for _ in range(steps):
        start = run.data.position
        report = take_steps(run, 1)[0]
        losses.append((run.world.sum(report.loss_sum) / report.weight).item())
        mine = [index for _, indices in run.data.at(start) for index in indices]
        samples.append(
            sorted(index for text in run.world.gather_texts(repr(mine)) for index in eval(text))
        )
    return losses, samples


def save_after_two_steps(world, folder, strategy, dtype):
    run = make_run(world, Tiny(samples=60), *settings(folder, strategy, dtype, *ELASTIC))
    take_steps(run, 2)
    save(run)
    return parameters_of(run), moments_of(run), run.schedule.counters, *losses_of(run, 5)


def resume_elsewhere(world, folder, strategy, dtype):
    run = make_run(
        world,
        Tiny(samples=60),
        *settings(folder, strategy, dtype, *ELASTIC, "--run.resume", "auto"),
    )
    return parameters_of(run), moments_of(run), run.schedule.counters.clone(), *losses_of(run, 5)


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """saved_by(ranks, strategy): (folder, what rank 0 had and did), made once for each layout."""

    @cache
    def saved(ranks, strategy):
        folder = tmp_path_factory.mktemp(strategy)
        return folder, on_ranks(ranks, save_after_two_steps, folder, strategy, "fp32")[0]

    return saved


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
@pytest.mark.parametrize(
    ("saved_ranks", "saved_strategy"),
    [
        pytest.param(*layout, marks=[] if layout == (2, "fsdp") else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_every_layout_reads_every_others_checkpoint(
    saved_by, saved_ranks, saved_strategy, ranks, strategy
):
    folder, (parameters, moments, _, losses, samples) = saved_by(saved_ranks, saved_strategy)
    for loaded in on_ranks(ranks, resume_elsewhere, folder, strategy, "fp32"):
        assert all(
            torch.equal(loaded[0][name], parameter) for name, parameter in parameters.items()
        )
        assert all(torch.equal(a, b) for a, b in zip(loaded[1], moments, strict=True))
        assert loaded[2].tolist() == [2, 0, 0]
        assert loaded[3] == pytest.approx(losses, rel=1e-5), (
            "other orders of the same sums, over five steps"
        )
        assert loaded[4] == samples


def rates_around_a_resume(world, folder):
    run = make_run(world, Tiny(), *settings(folder, "fsdp", "bf16"))
    take_steps(run, 2)
    save(run)
    resumed = make_run(world, Tiny(), *settings(folder, "fsdp", "bf16", "--run.resume", "auto"))
    rates = []
    for _ in range(3):
        take_steps(resumed, 1)
        rates.append(resumed.schedule.last_lr.item())
    live = all(group["lr"] == resumed.schedule.lr for group in resumed.optimizer.param_groups)
    return rates, live


def test_the_learning_rate_moves_after_a_resume(tmp_path):
    for rates, live in on_ranks(2, rates_around_a_resume, tmp_path):
        assert len(set(rates)) == 3
        assert live


def test_only_the_newest_are_kept_and_what_was_left_half_written_is_no_checkpoint(tmp_path):
    run = make_run(World(), Tiny(), *settings(tmp_path, "single", "fp32"))
    for _ in range(3):
        take_steps(run, 1)
        save(run)
    (tmp_path / "checkpoints" / ".step_00000004.writing").mkdir()
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]
    assert newest_checkpoint("auto", tmp_path, World()).name == "step_00000003"
    assert newest_checkpoint("never", tmp_path, World()) is None
    assert read_manifest(tmp_path / "checkpoints/step_00000003").samples == 12


@pytest.mark.bad_input("an explicit resume path that is missing or not a checkpoint")
def test_resume_takes_a_checkpoint_or_a_run_and_refuses_what_is_neither(tmp_path):
    run = make_run(World(), Tiny(), *settings(tmp_path / "a", "single", "fp32"))
    take_steps(run, 2)
    path = save(run)
    for given in (path, tmp_path / "a"):
        words = settings(tmp_path / "b", "single", "fp32", "--run.resume", given)
        assert make_run(World(), Tiny(), *words).step == 2
    (tmp_path / "empty").mkdir()
    for wrong, why in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "empty", "is not a checkpoint"),
    ):
        with pytest.raises(DataError, match=why) as error:
            make_run(World(), Tiny(), "--run.resume", wrong)
        assert str(wrong) in str(error.value)
        assert error.value.exit_code == 65


@pytest.mark.bad_input("resume=auto without any checkpoint")
def test_resume_auto_without_a_checkpoint_starts_at_zero(tmp_path):
    words = ["--run.dir", tmp_path / "new", "--run.resume", "auto"]
    assert make_run(World(), Tiny(), *words).step == 0
    assert not Path(tmp_path / "new").exists()


def test_a_run_that_began_from_anothers_checkpoint_goes_on_from_its_own(tmp_path):
    first = make_run(World(), Tiny(), *settings(tmp_path / "first", "single", "fp32"))
    take_steps(first, 2)
    origin = save(first)
    words = settings(tmp_path / "second", "single", "fp32", "--run.resume", origin)
    second = make_run(World(), Tiny(), *words)
    take_steps(second, 3)
    save(second)
    assert make_run(World(), Tiny(), *words).step == 5, "the same command, started again"


@pytest.mark.bad_input("`run.resume` set to an older checkpoint of the same folder")
def test_going_back_to_an_older_checkpoint_of_the_same_folder_is_refused(tmp_path):
    words = settings(tmp_path, "single", "fp32")
    run = make_run(World(), Tiny(), *words)
    take_steps(run, 1)
    older = save(run)
    take_steps(run, 1)
    save(run)
    with pytest.raises(
        DataError, match="is older than step_00000002 next to it; resume it in a new --run.dir"
    ):
        make_run(World(), Tiny(), *words, "--run.resume", older)
    elsewhere = settings(tmp_path / "new", "single", "fp32", "--run.resume", older)
    assert make_run(World(), Tiny(), *elsewhere).step == 1


@pytest.mark.parametrize(
    "optimizer", [["adamw", "--optim.fused", "false"], ["sgd", "--optim.momentum", 0]]
)
def test_saving_before_a_step_was_applied_changes_nothing(tmp_path, optimizer):
    words = ["--run.dir", tmp_path, "--data.shuffle", "false", "--use_amp", "false"]
    words += ["--optim.name", *optimizer]
    runs = [make_run(World(), Overflow(bad=(0,)), *words) for _ in range(2)]
    for run, saves in zip(runs, (True, False), strict=True):
        take_steps(run, 1)  # skipped
        if saves:
            save(run)
        take_steps(run, 2)
    for a, b in zip(state_of(runs[0])[:-2], state_of(runs[1])[:-2], strict=True):
        assert torch.equal(a, b)
    assert make_run(World(), Overflow(bad=(0,)), *words, "--run.resume", "auto").step == 1


def test_each_parameters_own_step_count_is_resumed(tmp_path):
    words = ["--run.dir", tmp_path / "run", "--use_amp", "false", "--checkpoint.every", 1]
    through = make_run(World(), Tiny(), *words)
    take_steps(through, 2)
    # A step that the user takes, in which the others have no gradient.
    for p in through.parallel.parameters[:2]:
        p.grad = torch.ones_like(p)
    through.optimizer.step()
    save(through)
    resumed = make_run(World(), Tiny(), *words, "--run.resume", "auto")
    counts = [
        [run.optimizer.state[p]["step"].item() for p in run.parallel.parameters]
        for run in (through, resumed)
    ]
    assert counts[0] == counts[1]
    assert set(counts[0]) == {2.0, 3.0}
