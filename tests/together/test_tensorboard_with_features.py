"""What runs with several features write for TensorBoard, and the board that shows it."""

import io
import json
import os
import re
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from conftest import ROOT
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_mfu import FLOPS, Counted
from tiny import Tiny, log, make_run, take_steps

from dist_amp.commands.board import main as board
from dist_amp.commands.board import main_tags, pinned_url
from dist_amp.settings import DataConfig
from dist_amp.supervise.banner import closing_table
from dist_amp.supervise.lifecycle import open_run, write_summary
from dist_amp.supervise.stop import AgreedStop
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.telemetry.console import columns
from dist_amp.telemetry.mfu import count_flops, find_mfu, flops_per_item
from dist_amp.train import train
from dist_amp.world import World


class Complete(Counted):
    """Has every optional method that leads to a tag."""

    def tokens(self, batch):
        return batch["x"].numel()

    def metrics(self, model, batch):
        return {"error": batch["y"].abs().sum()}

    def train_metrics(self, run, report):
        return {"norm_squared": report.norm**2}


def everything(world, folder):
    """Write all that a run may write to TensorBoard; each rank has a peak of its own."""
    words = ["--run.dir", folder, "--precision.dtype", "fp16", "--debug.numerics", "true"]
    words += ["--eval.every", 2, "--metrics.log_every", 2, "--train.steps", 4]
    words += ["--precision.scaler.init_scale", 2.0**40, "--parallel.strategy", "fsdp"]
    words += ["--precision.cast_by", "autocast"]
    run = make_run(world, Complete(), *words, "--metrics.peak_flops", 1e9 * (1 + world.rank))
    open_run(run)
    with AgreedStop(world) as stop, redirect_stdout(io.StringIO()) as console:
        train(run, stop)
    run.metrics.close_files()
    if world.is_main:
        (run.folder / "console.txt").write_text(console.getvalue())
        write_summary(run.folder, run, "completed", 0, "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    on_ranks(2, everything, str(folder))
    return folder


def events_of(folder, rank=0):
    return EventAccumulator(str(folder / "tensorboard" / f"rank{rank:05d}")).Reload()


def test_every_tag_that_a_run_writes_is_in_the_table_of_the_docs(folder):
    written = {tag for rank in (0, 1) for tag in events_of(folder, rank).Tags()["scalars"]}
    text = (ROOT / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| (`.+?) \| .+ \|$", text, re.MULTILINE)
    tags = [tag for cell in cells for tag in re.findall("`(.+?)`", cell)]
    assert [tag for tag in sorted(written) if not any(fnmatchcase(tag, t) for t in tags)] == []
    unused = {pattern for pattern in tags if not any(fnmatchcase(tag, pattern) for tag in written)}
    on_a_gpu = {tag for tag in tags if tag.startswith(("gpu/", "memory/allocator", "memory/res"))}
    # Of the train command, of many ranks, of groups, of tasks that read tokens, of bad samples; the
    # last one needs a step that is taken by the optimizer that is hooked.
    elsewhere = {tag for tag in tags if tag.startswith(("host/", "memory/host", "train/counted"))}
    elsewhere |= {"train/lr_*", "ranks/slowest_rank", "train/padding_pct", "eval/loss_*"}
    elsewhere |= {"train/skipped_samples", "start/*_seconds", "numerics/lost_update_share/*"}
    assert unused <= on_a_gpu | elsewhere


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_address_pins_six_charts_that_a_run_has(folder, has_tokens):
    url = urlsplit(pinned_url(has_tokens))
    assert (url.hostname, url.port, url.fragment) == ("localhost", 6006, "timeseries")
    assert not set(url.query) & set(' "{}[]()|<>'), "a terminal makes a link of all of it"
    cards = json.loads(parse_qs(url.query)["pinnedCards"][0])
    tags = {card["tag"] for card in cards}
    assert len(cards) == len(tags) == 6
    assert tags <= set(events_of(folder).Tags()["scalars"])
    assert ("throughput/tokens_per_second" in tags) == has_tokens
    assert "eval/loss" in tags
    assert "time/local_seconds" in main_tags(has_tokens), "it shows a slow rank"
    (colours,) = parse_qs(url.query)["runColorGroup"]
    names = ["rank00000", "rank00001", *(f"run1/tensorboard/rank0000{n}" for n in (0, 1))]
    names.append("run2/tensorboard/rank00000")
    groups = [re.search(colours.removeprefix("regex:"), name).groups() for name in names]
    assert len(set(groups[:2])) == 2, "one run: a colour per rank"
    assert groups[2] == groups[3] != groups[4], "several runs: a colour per run"


def test_board_prints_the_address_of_the_main_charts_and_becomes_tensorboard(
    folder, monkeypatch, capsys
):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words[3:]))
    board([str(folder), "--port", "7000"])
    board([str(folder.parent)])
    assert started == [
        ["--logdir", str(folder / "tensorboard"), "--port", "7000"],
        ["--logdir", str(folder.parent), "--port", "6006"],
    ]
    assert capsys.readouterr().out.split() == [pinned_url(True, 7000), pinned_url(True)]


# ---- MFU


@pytest.mark.parametrize(
    "shape",
    [
        {"tied": False, "vocabulary": 300},
        {"context": 1024, "width": 768, "layers": 2, "heads": 12, "vocabulary": 50304},
    ],
)
def test_a_tasks_flops_per_item_are_those_that_the_counter_of_torch_counts(shape):
    task = CausalLM(DataConfig(), **shape)
    with torch.device("meta"):
        model = task.build_model()
        tokens = torch.zeros(2, task.context + 1, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    # Whole numbers below 2^53, and no operation is approximated.
    assert flops_per_item(task, model) == count_flops(task, model, batch) / 2


def test_mfu_is_items_per_second_times_the_tasks_flops_over_the_peak_of_each_rank(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    *_, row = (row for row in map(json.loads, lines) if "ranks" in row)
    summary = json.loads((folder / "summary.json").read_text())
    for rank, seconds in enumerate((FLOPS / 1e9, FLOPS / 2e9)):
        logged, ended = row["ranks"][rank], summary["ranks"][rank]
        expected = logged["throughput/items_per_second"] * seconds
        assert logged["throughput/mfu"] == pytest.approx(expected, rel=1e-12)
        *_, event = events_of(folder, rank).Scalars("throughput/mfu")
        assert event.value == pytest.approx(expected, rel=1e-6), "TensorBoard keeps float32"
        assert ended["mfu"] == pytest.approx(ended["items_per_second"] * seconds, rel=1e-12)
    assert summary["mfu"] == (summary["ranks"][0]["mfu"] + summary["ranks"][1]["mfu"]) / 2
    mean = (row["ranks"][0]["throughput/mfu"] + row["ranks"][1]["throughput/mfu"]) / 2
    assert f" MiB  mfu {100 * mean:.3g} %  " in (folder / "console.txt").read_text()
    first, second, *_ = closing_table(summary, folder).splitlines()
    assert first.endswith("  mfu")
    assert second.endswith(f" {100 * summary['ranks'][0]['mfu']:.3g} %")


@pytest.mark.parametrize(("task", "words"), [(Complete, ""), (Tiny, "--metrics.peak_flops 1e12")])
def test_without_a_peak_or_the_tasks_flops_there_is_no_mfu_and_the_cpu_keeps_silent(
    task, words, capsys
):
    run = make_run(World(), task(), *words.split())
    assert find_mfu(run.world, run.config, run.task, run.parallel) is None
    assert bool(capsys.readouterr().out) == bool(words), "who sets the peak wants MFU"
    run.metrics.after_step(*take_steps(run, 1))
    assert "mfu" not in "  ".join(columns(log(run), 1.0))
