"""Core as test_config.py tests it, with several features."""

from pathlib import Path

from conftest import ROOT
from reference import reference
from test_config import load, values

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_command_line_may_be_written_in_several_ways():
    assert load("--train.steps=7").train.steps == 7
    assert load("--train.steps", "7", "--train.steps", "8").train.steps == 8, "the last one wins"
    assert load("--train.micro-batch-size", "3").train.micro_batch_size == 3
    assert not load("--use_amp", "false").precision.use_amp
    assert not load("--use-amp=false").precision.use_amp
    for word in ("true", "True"):
        assert load("--precision.tf32", word).precision.tf32
    target = ("--task.target", f"{ROOT}/examples/sinusoid.py:Sinusoid")
    assert load(*target, "--task.args.frequencies", "-4", "2").task.args.frequencies == (-4, 2)


def test_the_reference_file_shows_every_setting_with_its_default_and_meaning():
    assert (CONFIGS / "reference.toml").read_text() == reference(), "run python tests/reference.py"
    assert values(load("--config", CONFIGS / "reference.toml")) == values(load())


def test_every_shipped_config_loads():
    for path in CONFIGS.glob("*.toml"):
        load("--config", path)
