"""Core as test_metrics.py tests it, with console."""

import json
from statistics import median

import pytest
from test_metrics import random_row, steps_of

from dist_amp.clock import OWN_PHASES, STEP_PHASES
from dist_amp.telemetry.console import columns
from dist_amp.telemetry.step_report import MAX_RANK_FOLDERS
from dist_amp.train import main


@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_what_is_computed_for_all_ranks_at_once_is_what_each_rank_gives(ranks):
    row, each = random_row(ranks)
    rates = [own["items"] / sum(own[phase] for phase in STEP_PHASES) for own in each]
    tags = row.global_tags()
    loss = sum(own["loss_sum"] for own in each) / each[0]["weight_sum"]
    expected = {"train/loss": loss}
    local = [sum(own[phase] for phase in OWN_PHASES) / own["steps"] for own in each]
    if ranks > 1:
        expected["ranks/items_per_second_min"] = min(rates)
        expected["ranks/items_per_second_median"] = median(rates)
        expected["ranks/peak_bytes_max"] = max(own["peak_bytes"] for own in each)
        expected["ranks/data_wait_seconds_max"] = max(own["data"] / own["steps"] for own in each)
    if ranks > MAX_RANK_FOLDERS:
        expected["ranks/slowest_rank"] = local.index(max(local))
    # Sums in another order; seconds are rounded to 0.1 us.
    assert {tag: tags[tag] for tag in expected} == pytest.approx(expected, rel=1e-12, abs=1e-7)
    assert ("ranks/forward_seconds_median" in tags) == (ranks > MAX_RANK_FOLDERS)
    assert f"items/s {sum(rates):,.0f}" in columns(row, 1.0)
    last = row.rank_tags(ranks - 1)["throughput/items_per_second"]
    assert last == pytest.approx(rates[-1], rel=1e-12)
    assert json.loads(json.dumps(tags)) == tags, "plain numbers"


def test_lines_come_before_the_evaluation_and_the_checkpoint_that_follow_them(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ["--task.target", "tiny:Tiny", "--train.steps", "6", "--metrics.log_every", "2"]
    words += ["--eval.every", "2", "--checkpoint.every", "3", "--run.dir", "run"]
    assert main(words) == 0
    out = capfd.readouterr().out.splitlines()
    kinds = [line.split()[:2] for line in out if line.startswith(("step ", "eval "))]
    expected = [[["step", f"{step}/6"], ["eval", str(step)]] for step in (2, 4, 6)]
    assert kinds == [line for lines in expected for line in lines]
    assert steps_of(tmp_path / "run") == [2, 2, 4, 4, 6, 6]
