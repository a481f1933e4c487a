"""optim.ema: an average of the parameters that follows applied steps, is saved and evaluated."""

import pytest
import torch
from optimizer_runs import LAYOUTS, Counter, Own, words
from ranks import on_ranks
from tiny import Tiny, average_of, make_run, parameters_of, save, take_steps, whole

from dist_amp.step import evaluate, train_step
from dist_amp.world import World

EMA = ["--optim.ema", 0.75, "--optim.lr", 0.05]


def averages_of(run):
    return {name: whole(average) for name, average in average_of(run).items()}


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def follow(world, strategy, kind):
    """Compare the average with the textbook's after each of five steps, the second skipped."""
    half = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 64]
    task = Own(kind, bad=(2 * world.world_size,))
    run = make_run(world, task, *words("unused", strategy, *half, *EMA))
    assert_equal(averages_of(run), parameters_of(run))
    for step in range(5):
        before = averages_of(run)
        (report,) = take_steps(run, 1)
        assert bool(report.applied) == (step != 1)
        if report.applied:
            now = parameters_of(run)
            expected = {name: 0.75 * value + 0.25 * now[name] for name, value in before.items()}
            # Two orders of the same three operations of float32.
            torch.testing.assert_close(averages_of(run), expected, rtol=1e-6, atol=1e-7)
        else:
            assert_equal(averages_of(run), before)


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_the_average_follows_applied_steps_and_a_skipped_one_leaves_it_bit_for_bit(ranks, strategy):
    # Lion skips by the host's decision, a fused AdamW in its kernel.
    on_ranks(ranks, follow, strategy, "lion" if ranks == 1 else "fused adamw")


def evaluated_saved_and_resumed(world, folder, strategy, more):
    """The loss of an evaluation, what it should be, and the average's dtypes.

    An evaluation changes neither the parameters nor their average, and a resume continues both.
    """
    small = [*EMA, "--eval.every", 5, "--train.global_batch_size", 8, *more]
    small = words(folder, strategy, *small)
    run = make_run(world, Tiny(), *small)
    take_steps(run, 2)
    before, averages = parameters_of(run), averages_of(run)
    loss = evaluate(run)["loss"]
    assert_equal(parameters_of(run), before)
    assert_equal(averages_of(run), averages)
    model = Tiny().build_model()
    model.load_state_dict(averages)
    rows = Tiny().build_dataset("validation")[:]
    with torch.no_grad():
        expected = (Tiny().loss_sum(model, rows) / len(rows["x"])).item()
    save(run)
    resumed = make_run(world, Tiny(), *small, "--run.resume", "auto")
    assert_equal(averages_of(resumed), averages)
    for one in (run, resumed):
        take_steps(one, 2)
    assert_equal(parameters_of(resumed), parameters_of(run))
    assert_equal(averages_of(resumed), averages_of(run))
    return loss, expected, {average.dtype for average in averages.values()}


FP32, BF16 = ["--use_amp", "false"], ["--parallel.param_dtype", "bf16"]


# A sum of float32 in another order; bf16 keeps 8 bits of a parameter, and float32 of its average.
@pytest.mark.parametrize(
    ("ranks", "strategy", "more", "rel"),
    [(1, "single", FP32, 1e-6), (2, "fsdp", FP32, 1e-6), (2, "fsdp", BF16, 0.02)],
)
def test_an_evaluation_uses_the_average_and_a_resume_continues_it_bit_for_bit(
    tmp_path, ranks, strategy, more, rel
):
    results = on_ranks(ranks, evaluated_saved_and_resumed, tmp_path, strategy, more)
    for loss, expected, dtypes in results:
        assert loss == pytest.approx(expected, rel=rel)
        assert dtypes == {torch.float32}


def test_an_average_that_starts_on_a_resume_begins_at_the_parameters_and_says_so(tmp_path, capsys):
    run = make_run(World(), Tiny(), *words(tmp_path, "single"))
    take_steps(run, 2)
    save(run)
    more = ["--optim.ema", 0.9, "--run.resume", "auto"]
    resumed = make_run(World(), Tiny(), *words(tmp_path, "single", *more))
    assert "optim.ema starts here: the checkpoint has no average\n" in capsys.readouterr().out
    assert_equal(averages_of(resumed), parameters_of(resumed))
    batch = next(resumed.data)
    with Counter("_local_scalar_dense") as counter:
        train_step(resumed, batch)
    assert counter.count == 0, "host reads"
    save(resumed)
    without = make_run(World(), Tiny(), *words(tmp_path, "single", "--run.resume", "auto"))
    assert "the average of the weights in" in capsys.readouterr().err
    assert (without.step, [*without.observers]) == (3, [])
