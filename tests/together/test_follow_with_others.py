"""What test_follow.py tests, with other features."""

from pathlib import Path

import pytest
import test_follow
from test_follow import (
    refused,
    runs,  # noqa: F401
)

from dist_amp.commands import trackers
from dist_amp.errors import ConfigError

# Fixtures.
run = test_follow.run


@pytest.mark.bad_input("`follow` to a tracker that is not installed")
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    run, monkeypatch, capsys
):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    run.take(1)
    for name in ("wandb", "trackio", "mlflow"):
        status, line = refused(capsys, run.folder, to=name)
        assert status == ConfigError.exit_code
        assert line.startswith(f"error: {name} is not installed; pip install {name}")
        page = (Path(__file__).parents[2] / "docs/trackers.md").read_text()
        assert f".[{name}]" in page
