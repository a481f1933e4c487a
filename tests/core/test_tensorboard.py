"""What TensorBoard gets: tags, pinned charts, the environment. None of it ends a run."""

import re

import pytest
from conftest import ROOT

from dist_amp.telemetry import writers
from dist_amp.telemetry.writers import TensorBoardWriter, in_readable_units


def test_readable_units_are_those_of_the_other_tags():
    values = {"memory/peak_bytes": 3 * 2**29, "throughput/mfu": 0.5, "amp/loss_scale": 2.0**38}
    readable = {"memory/peak_GiB": 1.5, "perf/mfu_pct": 50, "amp/loss_scale_log2": 38}
    assert in_readable_units(values) == readable


@pytest.mark.bad_input("a TensorBoard folder that can't be made")
def test_a_folder_that_can_not_be_made_is_one_warning_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "RETRY_SECONDS", 0.0)
    (tmp_path / "tensorboard").write_text("a file")
    warnings = []
    writer = TensorBoardWriter(tmp_path / "tensorboard/rank00000", 1, warnings.append)
    for step in (1, 2):
        writer.write_scalars({"train/loss": 1.0}, step)
    writer.close()
    (warning,) = warnings
    assert "rank00000 can't be written (" in warning


def test_what_starts_tensorboard_here_listens_on_this_machine_alone():
    files = [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "docker-compose.yml"]
    files += [*ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.*"), *ROOT.glob("dist_amp/**/*.py")]
    lines = [(path, line) for path in files for line in path.read_text().splitlines()]
    starts = [found for found in lines if re.search("tensorboard,? --", found[1])]
    assert len(starts) > 2
    assert not [line for _, line in starts if "bind_all" in line]
    opened = {path.name: path.read_text() for path, line in starts if "--host" in line}
    assert set(opened) == {"Dockerfile", "docker-compose.yml"}, "containers publish a port"
    for text in opened.values():
        assert "127.0.0.1:6006:6006" in text
        assert not re.search(r"(?<!127\.0\.0\.1:)\b6006:6006", text)
