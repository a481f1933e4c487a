"""Settings of several features: their files, pages and schema, and the demo's precision."""

import os
import sys

import pytest
from conftest import ROOT
from reference import reference
from test_config import load, values
from test_schema import problems

from dist_amp.commands import demo, trackers
from dist_amp.config.schema import json_schema
from dist_amp.config.text import flat, to_toml
from dist_amp.errors import ConfigError
from examples.sinusoid import Sinusoid

CONFIGS = ROOT / "configs"


def test_a_command_line_may_be_written_in_several_ways():
    assert load("--train.steps", "7", "--train.steps", "8").train.steps == 8, "the last one wins"
    assert load("--train.micro-batch-size", "3").train.micro_batch_size == 3
    assert not load("--use-amp=false").precision.use_amp
    assert load("--precision.tf32", "True").precision.tf32
    target = ("--task.target", f"{ROOT}/examples/sinusoid.py:Sinusoid")
    assert load(*target, "--task.args.frequencies", "-4", "2").task.args.frequencies == (-4, 2)


def test_every_shipped_config_loads_and_the_reference_has_every_setting_with_its_default():
    for path in CONFIGS.glob("*.toml"):
        load("--config", path)
    assert (CONFIGS / "reference.toml").read_text() == reference(), "run python tests/reference.py"
    assert values(load("--config", CONFIGS / "reference.toml")) == values(load())


def test_every_debugging_setting_is_documented():
    page = (ROOT / "docs/debugging.md").read_text()
    keys = flat(to_toml(load()))
    assert [key for key in keys if key.startswith("debug.") and key not in page] == []


def test_the_arguments_of_a_task_are_checked_if_it_is_named():
    of_task = json_schema(Sinusoid)
    arguments = '[task]\ntarget = "examples/sinusoid.py:Sinusoid"\n[task.args]\n'
    assert problems(arguments + "hidden_layers = 8", of_task) == []
    (said,) = problems(arguments + "hidden_layer = 8", of_task)
    assert "hidden_layer" in said
    assert problems(arguments + "hidden_layer = 8") == [], "of an unknown task nothing is known"


@pytest.mark.bad_input("`follow` to a tracker that is not installed")
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match="not_there is not installed; pip install not_there"):
        trackers.imported("not_there")
    page = (ROOT / "docs/metrics.md").read_text()
    assert all(f".[{name}]" in page for name in trackers.TRACKERS)


def test_the_demo_is_a_launch_of_its_config(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append(argv))
    assert demo.main(["--train.steps", "5"]) == 0
    expected = ["-m", "dist_amp.launch", "--config", str(CONFIGS / "demo.toml")]
    assert started == [[sys.executable, *expected, "--train.steps", "5"]]
