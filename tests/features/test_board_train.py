"""Core as test_train.py tests it, with board."""

import json

import pytest
from test_train import TINY, summary_of


def test_the_summary_has_each_ranks_local_time_of_all_steps_and_the_table_too(launch, tmp_path):
    words = [*TINY, "--train.steps", "4", "--eval.every", "off", "--run.dir", "run"]
    for rank in (done := launch.each(2, *words)):
        assert rank.returncode == 0, rank.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for rank, entry in enumerate(summary_of(tmp_path / "run")["ranks"]):
        mean = sum(row["ranks"][rank]["time/local_seconds"] for row in rows) / len(rows)
        # The lines are rounded to 0.1 us.
        assert entry["local_seconds"] == pytest.approx(mean, abs=2e-7)
    assert any("local s/step" in line for line in done[0].stdout.splitlines())
    assert "watch  dist_amp board run\n" in done[0].stdout
