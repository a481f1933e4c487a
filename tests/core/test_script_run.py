"""A loop of one's own in a script or notebook: it evaluates, saves, is killed, resumes, closes."""

import tomllib

import pytest
import torch
from messages import message_of
from ranks import on_ranks
from tiny import Tiny, moments_of, parameters_of, seal_again
from torch import nn

from dist_amp import train
from dist_amp.checkpoint.format import all_checkpoints
from dist_amp.config.load import load_config
from dist_amp.run import build_run
from dist_amp.settings import TaskConfig
from dist_amp.step import evaluate, train_step
from dist_amp.train import fit
from dist_amp.world import World

STEPS = 6


class Noisy(Tiny):
    """Its steps depend on dropout, batch statistics and, in fp16, the loss scale."""

    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
        )


def built(world, folder, *words, task=None):
    quick = ["--run.dir", f"{folder}/run", "--train.steps", STEPS, "--optim.lr", "1e-2"]
    config = load_config([*map(str, quick), *map(str, words)], environ={})
    return build_run(config, world, task=task or Noisy())


def loop(run, until=STEPS):
    """The loop of docs/recipes.md, which ends early as if it were killed there."""
    run.resume()
    values = []
    while run.step < until:
        train_step(run, next(run.data))
        if run.step % 2 == 0:
            values.append(run.evaluate())
            run.save()
    return values


def killed_and_rerun(world, folder, *words):
    """What an undisturbed run ends with, and one that is built again after 3 of 6 steps."""
    through = built(world, f"{folder}/through", *words)
    values = loop(through)
    loop(built(world, f"{folder}/killed", *words), until=3)
    rerun = built(world, f"{folder}/killed", *words)
    again = loop(rerun)
    assert rerun.resumed_from_step == 2
    ends = []
    for run in (through, rerun):
        ends.append((parameters_of(run), moments_of(run), run.scaler.state_dict()))
        run.close()
    return values[1:], again, ends


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_a_loop_that_is_killed_and_run_again_ends_bit_for_bit_as_undisturbed(tmp_path):
    words = ["--parallel.strategy", "fsdp", "--precision.dtype", "fp16"]
    for values, again, (through, rerun) in on_ranks(2, killed_and_rerun, tmp_path, *words):
        assert values == again
        assert len(again) == 2
        assert all(same(one, other) for one, other in zip(through, rerun, strict=True))


@pytest.mark.bad_input("`run.resume()` after the first step")
def test_a_save_that_does_not_wait_is_complete_after_close(tmp_path, capsys):
    run = built(World(), tmp_path, "--checkpoint.async_save", "true")
    assert run.resume() is None
    assert "resumed" not in capsys.readouterr().out
    train_step(run, next(run.data))
    path = run.save(wait=False)
    run.close()
    assert all_checkpoints(run.folder) == [path]
    again = built(World(), tmp_path)
    assert again.resume() == path
    train_step(again, next(again.data))
    assert "resume() was called after step 2; call it before" in message_of(64, again.resume)


def test_checkpoints_of_another_run_in_the_folder_are_set_aside_and_not_taken_for_this_ones(
    tmp_path, capsys
):
    loop(built(World(), tmp_path), until=4)
    fresh = built(World(), tmp_path, "--optim.lr", "2e-2")
    for _ in range(2):
        train_step(fresh, next(fresh.data))
    fresh.save()
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["refused_step_00000002", "refused_step_00000004", "step_00000002"]
    assert capsys.readouterr().err.count("is damaged or of another run: renamed to ") == 2
    again = built(World(), tmp_path, "--optim.lr", "2e-2")
    again.resume()
    assert same(parameters_of(again), parameters_of(fresh))


@pytest.mark.bad_input("`run.evaluate()` without held-out samples, or with `eval.every=off`")
@pytest.mark.bad_input("a class in place of an object for `build_run(config, task=...)`")
def test_an_evaluation_of_nothing_and_a_class_as_the_task_are_refused(tmp_path):
    run = built(World(), tmp_path, "--eval.every", "off")
    assert "has no validation samples: eval.every is off; it must" in message_of(64, run.evaluate)
    assert evaluate(run) == {}
    said = "got the class Noisy as its task; give an object: Noi"
    assert said in message_of(64, built, World(), tmp_path, task=Noisy)


def test_a_wish_to_stop_after_an_evaluation_is_told_to_the_callers_loop(tmp_path, capsys):
    run = built(World(), tmp_path)
    for answer in (None, "stop"):
        run.task.on_evaluation = lambda run, values, answer=answer: answer
        run.evaluate()
        said = "; the caller of evaluate() must end the loop"
        assert (said in capsys.readouterr().out) == (answer == "stop")


def refused_save(world, folder):
    run = built(world, folder)
    train_step(run, next(run.data))
    return message_of(1, run.save)


@pytest.mark.bad_input("`run.save()` where `run.dir` is a file")
def test_a_save_that_fails_says_so_on_every_rank(tmp_path):
    (tmp_path / "run").touch()
    for message in on_ranks(2, refused_save, tmp_path):
        assert "step_00000001 could not be written: rank 0" in message


def recorded(folder):
    return tomllib.loads((folder / "run/config.toml").read_text())["task"]


def trained(folder, task, *words):
    run = built(World(), folder, "--checkpoint.every", 3, *words, task=task)
    fit(run)
    return run


class Unkept(Noisy):
    """It does not keep its argument."""

    def __init__(self, width: int = 4):
        super().__init__()


def test_a_run_of_an_object_resumes_by_object_and_by_name_which_stays_where_it_is_given(tmp_path):
    words = ["--optim.schedule", "constant", "--train.steps"]
    named = ["--task.target", "test_script_run:Unkept", "--task.args.width", "5", *words]
    expected = {"target": "test_script_run:Unkept", "args": {"width": 5}}
    trained(tmp_path, Unkept(5), *words, 1)
    more = ["2", "--run.dir", f"{tmp_path}/run", "--optim.lr", "1e-2", "--checkpoint.every", "3"]
    assert train.main([*named, *more]) == 0
    assert recorded(tmp_path) == expected
    assert trained(tmp_path, Unkept(5), *words, 3).resumed_from_step == 2
    assert recorded(tmp_path)["args"] == {}
    assert trained(tmp_path, Unkept(5), *named, 4).resumed_from_step == 3
    assert recorded(tmp_path) == expected


def test_a_run_for_which_an_earlier_version_recorded_the_default_task_resumes(tmp_path):
    words = ["--optim.schedule", "constant", "--train.steps"]
    trained(tmp_path, Noisy(), *words, 1)
    for path in tmp_path.rglob("config.toml"):
        path.write_text(path.read_text().replace("test_script_run:Noisy", TaskConfig.target))
    (manifest,) = tmp_path.rglob("manifest.json")
    seal_again(manifest.parent)
    assert trained(tmp_path, Noisy(), *words, 2).resumed_from_step == 1
