"""Core as test_task.py tests it, with sinusoid."""

import pytest
import torch
from test_task import (
    assert_says,
    build,
    clean_imports,  # noqa: F401
    own_cache,  # noqa: F401
    refusal,
)

SINUSOID = "dist_amp.tasks.sinusoid:Sinusoid"


# ---- the shipped picture ----


def test_the_sinusoid_has_134145_parameters_and_exactly_four_levels():
    task = build(SINUSOID)
    assert sum(p.numel() for p in task.build_model().parameters()) == 134_145
    assert torch.equal(task.picture["levels"].unique(), torch.arange(4) / 3)


def test_crops_to_train_on_are_cut_from_the_picture_and_those_to_validate_on_cover_it_once():
    task = build(SINUSOID, "--task.args.size", 48, "--task.args.crop", 16, "--task.args.crops", 50)
    dataset = task.build_dataset("train")
    whole, picture = task.picture.values()
    assert len(dataset) == 50
    for sample in dataset:
        left, top = ((sample["coordinates"][:, 0, 0] + 1) / 2 * 47).round().int().tolist()
        assert torch.equal(sample["coordinates"], whole[:, top : top + 16, left : left + 16])
        assert torch.equal(sample["levels"], picture[:, top : top + 16, left : left + 16])
    crops = [sample["coordinates"].flatten(1).T.tolist() for sample in task.build_dataset("valid")]
    pixels = [tuple(pixel) for crop in crops for pixel in crop]
    assert len(pixels) == len(set(pixels)) == 48 * 48


@pytest.mark.parametrize(
    ("size", "crop", "parts"),
    [
        (32, 64, ["size=32", "crop=64"]),
        (40, 16, ["size=40", "crop=16"]),
        (1, 1, ["size=1", "at least 2"]),
    ],
)
def test_a_picture_that_crops_can_not_tile_is_rejected(size, crop, parts):
    message = refusal(build, SINUSOID, "--task.args.size", size, "--task.args.crop", crop)
    assert_says(message, *parts)


def test_the_sample_shows_the_target_next_to_the_models_drawing():
    task = build(SINUSOID, "--task.args.size", 32, "--task.args.crop", 16, "--task.args.width", 8)
    with torch.no_grad():
        image = task.sample(task.build_model())
    assert image.shape == (1, 32, 64)
    assert 0 <= image.min() <= image.max() <= 1
    assert torch.equal(image[:, :, :32], task.picture["levels"])
