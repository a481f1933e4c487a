"""The loop and the cell in docs/own_loop.md: two models under every strategy, and fit."""

import re
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import whole

from dist_amp.config.load import load_config
from dist_amp.world import World

PAGE = Path(__file__).parents[2] / "docs/own_loop.md"
LOOP, CELL = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def trained(world, *words):
    """Both models' parameters after some steps of the page's loop."""
    torch.manual_seed(0)
    config = load_config(["--train.steps", "6", "--optim.lr", "1e-2", *words], environ={})
    names = {"__name__": "gan"}
    exec(compile(LOOP, PAGE, "exec"), names)
    sides = names["train"](world, config)
    return [whole(p) for side in sides for p in side.parameters]


@pytest.mark.parametrize(
    ("ranks", "strategy", "dtype"),
    [(1, "single", "bf16"), (2, "fsdp", "bf16"), (4, "hsdp", "fp16")],
)
def test_two_models_learn_in_a_custom_loop(ranks, strategy, dtype):
    words = ["--precision.dtype", dtype, "--parallel.strategy", strategy]
    results = on_ranks(ranks, trained, *words)
    start = on_ranks(ranks, trained, *words, "--train.steps", "1")
    for parameters in results:
        torch.testing.assert_close(parameters, results[0], rtol=0, atol=0)
        for number, (after, before) in enumerate(zip(parameters, start[0], strict=True)):
            assert after.isfinite().all(), number
            assert not torch.equal(after, before), f"{number} did not learn"


def trained_on_the_same_data(world, *words):
    """As `trained`, but with rank 0's data on every rank: the average is what one rank computes."""
    manual_seed, seeds = torch.manual_seed, []
    torch.manual_seed = lambda seed: manual_seed(seeds.append(seed) or len(seeds))
    try:
        return trained(world, *words)
    finally:
        torch.manual_seed = manual_seed


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (4, "hsdp")])
def test_ranks_with_the_same_data_take_the_steps_of_one_process(ranks, strategy):
    alone = trained_on_the_same_data(World(), "--use_amp", "false")
    words = ["--parallel.strategy", strategy, "--use_amp", "false"]
    for parameters in on_ranks(ranks, trained_on_the_same_data, *words):
        # Six steps of Adam add up roundings of 1e-7.
        torch.testing.assert_close(parameters, alone, rtol=0, atol=1e-5)


def test_an_overflow_skips_the_step():
    words = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", str(2.0**60)]
    words += ["--train.steps", "1"]
    skipped, begun = trained(World(), *words), trained(World(), *words, "--optim.lr", "1e-30")
    # The rate is no number that moves a parameter.
    torch.testing.assert_close(skipped, begun, rtol=0, atol=1e-12)


def test_the_cell_trains_in_a_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_file.py").write_text("from tiny import Tiny as TinyRegression\n")
    monkeypatch.setenv("DIST_AMP_TRAIN__STEPS", "3")
    names = {}
    exec(CELL, names)
    assert names["summary"]["steps"] == 3
