"""Core as test_task.py tests it, with causal_lm."""

import pytest
import torch
from test_task import (
    assert_says,
    build,
    clean_imports,  # noqa: F401
    own_cache,  # noqa: F401
    refusal,
)

from dist_amp.tasks.causal_lm import GPT, rotary_table, rotate

# ---- tasks that can't be found ----


@pytest.mark.bad_input("task target not importable, no such class, a method missing")
@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("tiny", ["task.target=tiny must be module:Class or path/to/file.py:Class"]),
        ("tiny:", ["task.target=tiny: must be module:Class"]),
        (":Tiny", ["task.target=:Tiny must be module:Class"]),
        ("missing:Mine", ["task.target=missing:Mine", "No module named 'missing'"]),
        ("dist_amp.missing.part:Mine", ["No module named 'dist_amp.missing'"]),
        ("/nowhere/missing.py:Mine", ["there is no file /nowhere/missing.py; check the path"]),
        ("elsewhere/tiny.py:Tiny", ["there is no file elsewhere/tiny.py; check the path"]),
        ("tiny:Tinny", ["task.target=tiny:Tinny", "no class Tinny in tiny, which has", "Tiny,"]),
        ("dist_amp.tasks.causal_lm:rotate", ["there is no class rotate in dist_amp.tasks"]),
        ("tiny:LacksWeight", ["lacks the method weight", "def weight(self, batch) -> number"]),
    ],
)
def test_a_target_that_is_no_task_is_refused_with_the_reason(target, parts):
    message = refusal(build, target)
    assert_says(message, *parts)
    assert "Annotated" not in message, "imported classes are not suggested"


def test_a_prediction_does_not_depend_on_later_bytes():
    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=16, width=32, layers=2, heads=2, tied=False)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_tied_weights_are_one_parameter():
    shape = {"vocabulary": 256, "context": 16, "width": 32, "layers": 1, "heads": 2}
    tied, untied = GPT(**shape, tied=True), GPT(**shape, tied=False)
    assert tied.head.weight is tied.embedding.weight
    sizes = [sum(p.numel() for p in model.parameters()) for model in (untied, tied)]
    assert sizes[0] - sizes[1] == 256 * 32


def test_rotary_positions_depend_on_the_distance_alone_and_keep_length_and_dtype():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 32, dtype=torch.float64)
    cos, sin = rotary_table(64, 32)
    scores = rotate(query.expand(64, 32), cos, sin) @ rotate(key.expand(64, 32), cos, sin).T
    # The table is float32: an angle of 63 rad is off by up to 4e-6, times 32 products of numbers of
    # size 1.
    for distance in range(-63, 64):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-4)
    assert scores[0].unique().numel() == 64
    x = torch.randn(64, 32)
    # torch's tolerance for float32
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16
