"""The samples of a run, at every evaluation and at the end; they change nothing."""

import json
import re

import pytest
import torch
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Tiny, make_run, parameters_of, take_steps

from dist_amp.supervise.sampling import write_sample
from dist_amp.train import main


class Drawn(Tiny):
    def loss_sum(self, model, batch):
        torch.rand(1)  # so that the generator is elsewhere at every step
        return super().loss_sum(model, batch)

    def sample(self, model):
        """Eight random numbers."""
        return str(torch.rand(8))


class Pictures(Tiny):
    def sample(self, model):
        return torch.rand(3, 4, 6).bfloat16()


class Fails(Tiny):
    def sample(self, model):
        raise KeyError("no prompt")


def six_steps(monkeypatch, tmp_path, task):
    """Train with three evaluations; the events of TensorBoard."""
    monkeypatch.chdir(tmp_path)
    words = "--train.steps 6 --eval.every 2 --run.dir run --train.micro_batch_size 4".split()
    assert main(["--task.target", f"test_sampling:{task}", *words]) == 0
    return EventAccumulator(str(tmp_path / "run/tensorboard/rank00000")).Reload()


def test_every_evaluation_has_a_sample_of_the_same_random_numbers_with_its_step_and_what_it_shows(
    monkeypatch, tmp_path, capsys
):
    events = six_steps(monkeypatch, tmp_path, "Drawn").Tensors("sample/text_summary")
    texts = [event.tensor_proto.string_val[0].decode() for event in events]
    assert [event.step for event in events] == [2, 4, 6]
    for event, text in zip(events, texts, strict=True):
        assert text.startswith(f"**step {event.step}**: Eight random numbers.\n```\n")
    assert len({text.split("```")[1] for text in texts}) == 1
    printed = capsys.readouterr().out
    assert printed.count("tensor(") == 1, "the last one, at the end"
    assert len(re.findall(r"(?m)^sample +\d  [\d.]+ s; see TensorBoard's text$", printed)) == 3
    assert "tensor(" in (tmp_path / "run/sample.txt").read_text()


def test_a_picture_of_every_evaluation_is_in_tensorboard(monkeypatch, tmp_path):
    events = six_steps(monkeypatch, tmp_path, "Pictures")
    images = [(image.step, image.width, image.height) for image in events.Images("sample")]
    assert images == [(2, 6, 4), (4, 6, 4), (6, 6, 4)]


@pytest.mark.bad_input("a `sample(model)` that fails, or whose result can't be written")
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Fails", "the task's sample(model) failed: KeyError: 'no prompt' (test_sampling.py, l"),
        ("Drawn", "the task's sample(model) failed: IsADirectoryError: [Errno 21] Is a directory"),
    ],
)
def test_a_sample_that_fails_is_a_warning_and_ends_no_run(
    task, message, monkeypatch, tmp_path, capsys
):
    (tmp_path / "run/sample.txt").mkdir(parents=True)
    six_steps(monkeypatch, tmp_path, task)
    assert capsys.readouterr().err.count(message) == 3
    assert json.loads((tmp_path / "run/summary.json").read_text())["stopped_by"] == "completed"


class FailsOnRank1(Tiny):
    """Its sample fails on one rank, before it calls the model."""

    def sample(self, model):
        if torch.distributed.get_rank() == 1:
            raise ValueError("no such file")
        with torch.no_grad():
            return str(model(torch.ones(1, 8)).shape)


def sampled_on_one_rank_only(world, folder):
    words = ["--parallel.strategy", "fsdp", "--use_amp", "false", "--run.dir", folder]
    run = make_run(world, FailsOnRank1(), *words)
    take_steps(run, 1)
    write_sample(run)
    take_steps(run, 1)  # in step with the other rank
    return {name: value.tolist() for name, value in parameters_of(run).items()}


def test_a_sample_that_fails_on_one_rank_of_a_sharded_model_leaves_the_ranks_in_step(tmp_path):
    first, second = on_ranks(2, sampled_on_one_rank_only, str(tmp_path))
    assert first == second
