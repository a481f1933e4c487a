"""optim.ema: a moving average of the parameters that follows applied steps, is saved, and is what
is evaluated.
"""

import pytest
import torch
from own_optimizers import Own
from ranks import on_ranks
from safetensors.torch import load_file
from test_optim import LAYOUTS, Counter, words
from tiny import Tiny, make_run, parameters_of, take_steps, whole

from dist_amp.checkpoint.saver import save
from dist_amp.commands import export, sample
from dist_amp.step import evaluate, train_step
from dist_amp.world import World

EMA = ["--optim.ema", 0.75, "--optim.lr", 0.05]
EVALUATES = ["--eval.every", 5]


def averages_of(run):
    return {name: whole(average) for name, average in run.extra_states["ema"].tensors.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def follows(world, strategy, kind):
    """Whether the average is the textbook's after each of five steps, of which the second is
    skipped.
    """
    half = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 64]
    task = Own(kind, bad=(2 * world.world_size,))
    run = make_run(world, task, *words("unused", strategy, *half, *EMA))
    expected, found = averages_of(run), []
    found.append(equal(expected, parameters_of(run)))
    for _ in range(5):
        before, applied = averages_of(run), take_steps(run, 1)[0].applied
        if applied:
            expected = {
                name: 0.75 * value + 0.25 * parameters_of(run)[name]
                for name, value in expected.items()
            }
            # Two orders of the same three operations of float32.
            near = [
                torch.allclose(averages_of(run)[name], value, rtol=1e-6, atol=1e-7)
                for name, value in expected.items()
            ]
            found.append(all(near))
        else:
            found.append(equal(before, averages_of(run)))
    return found, run.schedule.counters.tolist()


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
@pytest.mark.parametrize("kind", ["fused adamw", "lion"])  # by its kernel, and by the textbook
def test_the_average_follows_applied_steps_and_a_skipped_one_leaves_it_bit_for_bit(
    ranks, strategy, kind
):
    for found, counters in on_ranks(ranks, follows, strategy, kind):
        assert counters == [4, 1, 0]
        assert all(found)


def test_the_average_costs_no_host_read():
    run = make_run(World(), Tiny(), *words("unused", "single", *EMA))
    take_steps(run, 1)
    batch = next(run.data)
    with Counter("_local_scalar_dense") as counter:
        train_step(run, batch)
    assert counter.count == 0


def evaluated(world, strategy, more):
    """Evaluate between steps: what is evaluated, and whether parameters, averages and later steps
    are as without.
    """
    plain, run = (
        make_run(world, Tiny(), *words("unused", strategy, *EMA, *EVALUATES, *more))
        for _ in range(2)
    )
    for one in (plain, run):
        take_steps(one, 3)
    before, averages = parameters_of(run), averages_of(run)
    loss = evaluate(run)["loss"]
    same = [equal(before, parameters_of(run)), equal(averages, averages_of(run))]
    model = Tiny().build_model()
    model.load_state_dict(averages)
    rows = Tiny().build_dataset("validation").columns
    with torch.no_grad():
        expected = (Tiny().loss_sum(model, rows) / len(rows["x"])).item()
    for one in (plain, run):
        take_steps(one, 2)
    same.append(equal(parameters_of(plain), parameters_of(run)))
    same.append(equal(averages_of(plain), averages_of(run)))
    return loss, expected, same


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_an_evaluation_uses_the_average_and_the_next_step_the_parameters(ranks, strategy):
    for loss, expected, same in on_ranks(ranks, evaluated, strategy, ["--use_amp", "false"]):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert all(same)


def test_parameters_that_are_stored_in_bf16_have_a_float32_average():
    for loss, expected, same in on_ranks(2, evaluated, "fsdp", ["--parallel.param_dtype", "bf16"]):
        assert loss == pytest.approx(expected, rel=0.02)  # bf16 keeps 8 bits
        assert all(same)


def saved_and_resumed(world, folder, strategy):
    small = words(folder, strategy, *EMA, "--train.global_batch_size", 8, "--use_amp", "false")
    run = make_run(world, Tiny(), *small)
    take_steps(run, 2)
    save(run)
    saved = averages_of(run)
    resumed = make_run(world, Tiny(), *small, "--run.resume", "auto")
    same = [equal(saved, averages_of(resumed))]
    for one in (run, resumed):
        take_steps(one, 2)
    same.append(equal(averages_of(run), averages_of(resumed)))
    same.append(equal(parameters_of(run), parameters_of(resumed)))
    return same, saved


def loaded_elsewhere(world, folder, strategy):
    small = words(folder, strategy, *EMA, "--train.global_batch_size", 8, "--use_amp", "false")
    return averages_of(make_run(world, Tiny(), *small, "--run.resume", "auto"))


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (2, "fsdp")])
def test_a_resume_continues_the_average_bit_for_bit_on_any_layout(tmp_path, ranks, strategy):
    results = on_ranks(ranks, saved_and_resumed, tmp_path, strategy)
    assert all(all(same) for same, _ in results)
    saved = results[0][1]
    for other_ranks, other in LAYOUTS:
        for loaded in on_ranks(other_ranks, loaded_elsewhere, tmp_path, other):
            assert equal(loaded, saved)


def test_world_sizes_agree_on_the_average():
    alone = on_ranks(1, after_steps, "single")[0]
    for strategy in ("ddp", "fsdp"):
        for averages in on_ranks(2, after_steps, strategy):
            for (
                name,
                value,
            ) in averages.items():  # sums of float32 in another order, over five steps
                torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)


def after_steps(world, strategy):
    run = make_run(
        world,
        Tiny(),
        *words("unused", strategy, *EMA, "--train.global_batch_size", 8, "--use_amp", "false"),
    )
    take_steps(run, 5)
    return averages_of(run)


def test_an_average_that_starts_on_a_resume_begins_at_the_parameters_and_says_so(tmp_path, capsys):
    run = make_run(World(), Tiny(), *words(tmp_path, "single"))
    take_steps(run, 2)
    save(run)
    resumed = make_run(
        World(), Tiny(), *words(tmp_path, "single", "--optim.ema", 0.9, "--run.resume", "auto")
    )
    assert "optim.ema starts at step 2: the checkpoint has no average\n" in capsys.readouterr().out
    assert equal(averages_of(resumed), parameters_of(resumed))
    take_steps(resumed, 1)
    save(resumed)
    without = make_run(World(), Tiny(), *words(tmp_path, "single", "--run.resume", "auto"))
    assert (without.step, without.extra_states) == (3, {})


class Shows(Tiny):
    def sample(self, model):
        return f"{model[0][0].weight.sum().item():.6f}"


def test_export_and_sample_use_the_average_unless_the_parameters_are_asked_for(tmp_path, capsys):
    run = make_run(
        World(),
        Shows(),
        *words(tmp_path / "run", "single", *EMA, "--task.target", "test_ema:Shows"),
    )
    take_steps(run, 3)
    save(run)
    averages, parameters = averages_of(run), parameters_of(run)
    assert not equal(averages, parameters)
    for words_, expected, said in [
        ([], averages, ", their moving average,"),
        (["--weights", "model"], parameters, "fp32,"),
    ]:
        assert export.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), *words_]) == 0
        assert said in capsys.readouterr().out
        assert equal(dict(load_file(tmp_path / "out/model.safetensors")), expected)
        assert sample.main([str(tmp_path / "run"), *words_]) == 0
        assert capsys.readouterr().out.strip() == f"{expected['0.0.weight'].sum().item():.6f}"


def test_the_sample_at_the_end_of_a_run_is_the_averages(launch, tmp_path):
    small = ["--train.steps", 4, "--train.micro_batch_size", 2, "--task.target", "test_ema:Shows"]
    small += ["--run.dir", "run"]
    assert launch(0, *small, *EMA, *EVALUATES).returncode == 0
    shown = (tmp_path / "run/sample.txt").read_text().strip()
    assert launch.module("dist_amp.commands.sample", "run").stdout.strip() == shown
    assert (
        launch.module("dist_amp.commands.sample", "run", "--weights", "model").stdout.strip()
        != shown
    )
