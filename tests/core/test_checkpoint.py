"""A resumed run goes on as if it had never stopped; a checkpoint is complete or absent."""

import random
from functools import cache

import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, log_row, make_run, moments_of, parameters_of, save, take_steps
from torch import nn

from dist_amp.errors import DataError
from dist_amp.world import World

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp"), (4, "hsdp")]
OFTEN = [(1, "single"), (2, "fsdp")]  # whose checkpoints the others read also in the quick tests
ELASTIC = ["--train.global_batch_size", 12, "--train.micro_batch_size", 1]
ELASTIC += ["--train.accumulation_steps", "auto"]


class Dropped(Tiny):
    """Draws random numbers in every forward, so that a lost generator shows."""

    def build_model(self):
        layers = nn.Linear(8, 16), self.norm(), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 1)
        return nn.Sequential(*layers)

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
    tensors = [*parameters_of(run).values(), *buffers, *moments_of(run)]
    tensors += [run.schedule.counters, run.scaler.scale_tensor, torch.get_rng_state()]
    return [*tensors, torch.tensor([random.random(), run.step, run.data.position])]


def equal_states(one, other):
    """Whether two runs are the same, but for the process's generators, which they share."""
    return list(map(torch.equal, state_of(one)[:-2], state_of(other)[:-2]))


def logged_steps(run, steps):
    """Take steps, with a log line after each third; return every loss and every logged loss."""
    losses = []
    for _ in range(steps):
        (report,) = take_steps(run, 1)
        run.metrics.record(report)
        losses.append(report.loss_sum.item())
        if run.step % 3 == 0:
            losses.append(log_row(run).loss)
    return losses


def stop_and_go_on(world, folder, strategy, dtype, workers, task=Dropped, more=()):
    more = ("--data.workers", workers, "--run.deterministic", "true", *more)
    words = settings(folder, strategy, dtype, *more)
    through = make_run(world, task(samples=40), *words)
    losses = logged_steps(through, 8)
    stopped = make_run(world, task(samples=40), *words)
    before = logged_steps(stopped, 4)  # in the middle of a log interval
    save(stopped)
    resumed = make_run(world, task(samples=40), *words, "--run.resume", "auto")
    assert resumed.resumed_from_step == resumed.step == 4
    assert before + logged_steps(resumed, 4) == losses
    torch.use_deterministic_algorithms(False)
    return equal_states(resumed, through)


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


def test_batch_statistics_go_on_bit_identical_on_every_rank_though_their_averages_are_saved(
    tmp_path,
):
    for equal in on_ranks(2, stop_and_go_on, tmp_path, "ddp", "fp32", 0, Normed):
        assert all(equal)


def statistics_after_a_save(world, folder):
    run = make_run(world, Normed(), *settings(folder, "ddp", "fp32"))
    take_steps(run, 2)
    save(run)
    return [b.double().tolist() for b in run.parallel.module.buffers() if b.is_floating_point()]


def test_a_checkpoint_holds_the_average_of_the_ranks_batch_statistics(tmp_path):
    of_ranks = on_ranks(2, statistics_after_a_save, tmp_path)
    words = ["--run.resume", "auto", "--train.accumulation_steps", 4]
    alone = make_run(World(), Normed(), *settings(tmp_path, "single", "fp32"), *words)
    buffers = [b.double() for b in alone.parallel.module.buffers() if b.is_floating_point()]
    assert of_ranks[0] != of_ranks[1]
    for buffer, *values in zip(buffers, *of_ranks, strict=True):
        torch.testing.assert_close(buffer, torch.tensor(values).double().mean(0), atol=1e-6, rtol=0)


def losses_of(run, steps):
    """The world's loss in each of so many steps, and the global samples that each was fed."""
    losses, samples = [], []
    for _ in range(steps):
        start = run.data.position
        report = take_steps(run, 1)[0]
        run.metrics.record(report)
        losses.append((run.world.sum(report.loss_sum) / report.weight).item())
        mine = [index for _, indices in run.data.at(start) for index in indices]
        fed = [index for indices in run.world.gather(mine) for index in indices]
        samples.append(sorted(fed))
    return losses, samples


def facts_of(run):
    """What a run has, and what it does in five steps."""
    counters = run.schedule.counters.tolist()
    seed = torch.initial_seed()
    facts = parameters_of(run), moments_of(run), counters, *losses_of(run, 5), seed
    return *facts, log_row(run).loss


def save_after_two_steps(world, folder, strategy):
    run = make_run(world, Tiny(samples=60), *settings(folder, strategy, "fp32", *ELASTIC))
    for report in take_steps(run, 2):
        run.metrics.record(report)
    save(run)
    return facts_of(run)


def resume_elsewhere(world, folder, strategy):
    words = settings(folder, strategy, "fp32", *ELASTIC, "--run.resume", "auto")
    return facts_of(make_run(world, Tiny(samples=60), *words))


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """saved_by(ranks, strategy): (folder, what rank 0 had and did), made once for each layout."""

    @cache
    def saved(ranks, strategy):
        folder = tmp_path_factory.mktemp(strategy)
        return folder, on_ranks(ranks, save_after_two_steps, folder, strategy)[0]

    return saved


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
@pytest.mark.parametrize(
    "saver",
    [pytest.param(layout, marks=[] if layout in OFTEN else pytest.mark.slow) for layout in LAYOUTS],
)
def test_every_layout_reads_every_others_checkpoint(saved_by, saver, ranks, strategy):
    folder, (parameters, moments, counters, losses, samples, seed, logged) = saved_by(*saver)
    resumed = on_ranks(ranks, resume_elsewhere, folder, strategy)
    if ranks != saver[0]:
        seeds = {seed, *(loaded[5] for loaded in resumed)}
        assert len(seeds) == 1 + ranks, "each rank draws numbers that the start has not drawn"
    for loaded in resumed:
        assert all(torch.equal(loaded[0][name], value) for name, value in parameters.items())
        assert all(map(torch.equal, loaded[1], moments))
        assert loaded[2] == counters == [2, 0, 0]
        assert loaded[3] == pytest.approx(losses, rel=1e-5), "the same sums in other orders"
        assert loaded[4] == samples
        assert loaded[6] == pytest.approx(logged, rel=1e-5), "over steps before and after"


@pytest.mark.bad_input("an explicit resume path that is missing or not a checkpoint")
@pytest.mark.bad_input("resume=auto without any checkpoint")
def test_resume_takes_a_checkpoint_or_a_run_and_refuses_what_is_neither(tmp_path):
    run = make_run(World(), Tiny(), *settings(tmp_path / "a", "single", "fp32"))
    take_steps(run, 2)
    path = save(run)
    for given, step in ((path, 2), (tmp_path / "a", 2), ("auto", 0)):
        words = settings(tmp_path / "b", "single", "fp32", "--run.resume", given)
        assert make_run(World(), Tiny(), *words).step == step
    assert not (tmp_path / "b").exists()
    (tmp_path / "empty").mkdir()
    for wrong, why in (("nowhere", "does not exist"), ("empty", "is not a checkpoint")):
        with pytest.raises(DataError, match=f"{wrong} {why}") as error:
            make_run(World(), Tiny(), "--run.resume", tmp_path / wrong)
        assert error.value.exit_code == 65


@pytest.mark.bad_input("`run.resume` set to an older checkpoint of the same folder")
def test_an_older_checkpoint_is_refused_in_its_folder_and_starts_a_run_in_another(tmp_path):
    words = settings(tmp_path, "single", "fp32")
    run = make_run(World(), Tiny(), *words)
    take_steps(run, 1)
    older = save(run)
    take_steps(run, 1)
    save(run)
    said = "is older than step_00000002 next to it; resume it in a new --run.dir"
    with pytest.raises(DataError, match=said):
        make_run(World(), Tiny(), *words, "--run.resume", older)
    elsewhere = settings(tmp_path / "new", "single", "fp32", "--run.resume", older)
    run = make_run(World(), Tiny(), *elsewhere)
    assert run.step == 1
    take_steps(run, 3)
    save(run)
    assert make_run(World(), Tiny(), *elsewhere).step == 4, "the same command, started again"


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
    assert all(equal_states(*runs))
    assert make_run(World(), Overflow(bad=(0,)), *words, "--run.resume", "auto").step == 1
