"""What test_mfu.py tests, with other features."""

import json

import pytest
import torch
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_mfu import FLOPS, Counted, log_mfu_of
from tiny import Tiny, log, make_run, take_steps

from dist_amp.settings import DataConfig
from dist_amp.supervise.banner import closing_table
from dist_amp.supervise.lifecycle import write_summary
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.telemetry.console import columns
from dist_amp.telemetry.mfu import count_flops, flops_per_item
from dist_amp.world import World


def of_a_text(**shape):
    task = CausalLM(DataConfig(), **shape)
    tokens = torch.zeros(2, task.context + 1, dtype=torch.int64, device="meta")
    return task, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(
    ("task", "batch"),
    [
        of_a_text(tied=False, vocabulary=300),
        of_a_text(context=1024, width=768, layers=12, heads=12, vocabulary=50304),
    ],
)
def test_a_tasks_flops_per_item_are_those_that_the_counter_of_torch_counts(task, batch):
    with torch.device("meta"):
        model = task.build_model()
    # Whole numbers below 2^53, and no operation is approximated; 1 % is what the design asks for.
    assert flops_per_item(task, model) == count_flops(task, model, batch) / 2


def in_the_run(world, folder):
    words = ["--metrics.peak_flops", 1e9 * (1 + world.rank), "--train.micro_batch_size", 4]
    run = make_run(world, Counted(), *words, "--parallel.strategy", "fsdp", "--run.dir", folder)
    run.metrics.open(run.folder, 0, "")
    log_mfu_of(run)
    for report in take_steps(run, 2):
        run.metrics.record(report)
    row = log(run)
    run.metrics.close_files()
    summary = write_summary(run.folder, run, "completed", 0, "") if world.is_main else None
    return "  ".join(columns(row, 1.0)), summary


def test_mfu_is_items_per_second_times_the_tasks_flops_over_the_peak_of_each_rank(tmp_path):
    (line, summary), _ = on_ranks(2, in_the_run, str(tmp_path))
    rows = json.loads((tmp_path / "metrics.jsonl").read_text())["ranks"]
    for rank, seconds in enumerate((FLOPS / 1e9, FLOPS / 2e9)):
        row = rows[rank]
        expected = row["throughput/items_per_second"] * seconds
        assert row["throughput/mfu"] == pytest.approx(expected, rel=1e-12)
        board = EventAccumulator(str(tmp_path / f"tensorboard/rank{rank:05d}")).Reload()
        (event,) = board.Scalars("throughput/mfu")
        # TensorBoard keeps float32.
        assert event.value == pytest.approx(row["throughput/mfu"], rel=1e-6)
        ended = summary["ranks"][rank]
        assert ended["mfu"] == pytest.approx(ended["items_per_second"] * seconds, rel=1e-12)
    assert summary["mfu"] == (summary["ranks"][0]["mfu"] + summary["ranks"][1]["mfu"]) / 2
    mean = (rows[0]["throughput/mfu"] + rows[1]["throughput/mfu"]) / 2
    assert f" MiB  mfu {100 * mean:.3g} %  " in line
    table = closing_table(summary, tmp_path).splitlines()
    assert table[0].endswith("        mfu")
    assert table[1].endswith(f" {100 * summary['ranks'][0]['mfu']:.3g} %")
    assert len({len(text) for text in table[:3]}) == 1


@pytest.mark.parametrize(
    ("task", "words"), [(Counted, []), (Tiny, ["--metrics.peak_flops", "1e12"])]
)
def test_without_a_peak_or_the_tasks_flops_there_is_no_mfu_and_the_cpu_keeps_silent(
    task, words, capsys
):
    run = make_run(World(), task(), *words)
    log_mfu_of(run)
    said = capsys.readouterr().out
    assert bool(said) == bool(words), "who sets the peak wants MFU"
    run.metrics.record(*take_steps(run, 1))
    row = log(run)
    assert "throughput/mfu" not in row.rank_tags(0)
    assert "mfu" not in "  ".join(columns(row, 1.0))
