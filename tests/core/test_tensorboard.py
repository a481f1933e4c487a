"""What TensorBoard gets: tags, pinned charts, the environment. None of it ends a run."""

import pytest

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
