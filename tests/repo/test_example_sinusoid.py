"""examples/sinusoid.py: its crops, its network and its sample."""

import pytest
import torch
from conftest import ROOT
from messages import message_of

from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.record import Record

TARGET = f"{ROOT}/examples/sinusoid.py:Sinusoid"


def build(**settings):
    words = ["--task.target", TARGET]
    for name, value in settings.items():
        words += [f"--task.args.{name}", str(value)]
    return build_task(load_config(words, {}))


def test_the_sinusoid_has_134145_parameters_and_exactly_four_levels():
    task = build()
    assert sum(p.numel() for p in task.build_model().parameters()) == 134_145
    assert task.picture["levels"].unique().tolist() == (torch.arange(4) / 3).tolist()


def test_crops_to_train_on_are_cut_from_the_picture_and_those_to_validate_on_cover_it_once():
    task = build(size=48, crop=16, crops=50)
    dataset = task.build_dataset("train")
    whole, picture = task.picture.values()
    assert len(dataset) == 50
    for sample in dataset:
        left, top = ((sample["coordinates"][:, 0, 0] + 1) / 2 * 47).round().int().tolist()
        cut = (slice(None), slice(top, top + 16), slice(left, left + 16))
        expected = {"coordinates": whole[cut], "levels": picture[cut]}
        torch.testing.assert_close(sample, expected, rtol=0, atol=0)
    crops = [sample["coordinates"].flatten(1).T.tolist() for sample in task.build_dataset("valid")]
    pixels = [tuple(pixel) for crop in crops for pixel in crop]
    assert len(pixels) == len(set(pixels)) == 48 * 48


def test_a_picture_that_crops_can_not_tile_is_rejected():
    message = message_of(64, lambda: build(size=32, crop=64))
    assert "size=32 must be a multiple of crop=64: crops tile it" in message


def test_the_sample_shows_the_target_next_to_the_models_drawing():
    task = build(size=32, crop=16, width=8)
    with torch.no_grad():
        image = task.sample(task.build_model())
    assert image.shape == (1, 32, 64)
    assert 0 <= image.min() <= image.max() <= 1
    assert image[:, :, :32].tolist() == task.picture["levels"].tolist()


@pytest.mark.slow
def test_the_sinusoid_is_learnt(launch, tmp_path):
    words = f"""--task.target {TARGET} --task.args.crop 4
        --task.args.crops 65536 --train.steps 300 --train.micro_batch_size 256 --optim.lr 1e-3
        --optim.schedule constant --optim.weight_decay 0 --metrics.log_every 100
        --eval.batches 16 --run.dir run""".split()
    done = launch(2, *words, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    evaluation = Record(tmp_path / "run").summary["evaluation"]
    assert evaluation["loss"] < 0.065, "the picture's variance, which a constant leaves, is 0.079"
