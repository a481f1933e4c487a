"""What is logged is what happened: on every rank, over the whole interval, in all files."""

import io
import json
import math
import shutil

import numpy as np
import pytest
import torch
from messages import message_of
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Overflow, Tiny, log, log_row, make_run, take_steps, variant

from dist_amp.clock import STEP_PHASES
from dist_amp.diagnostics.limits import Limits
from dist_amp.step import evaluate
from dist_amp.telemetry import writers
from dist_amp.telemetry.metrics import memory_use
from dist_amp.telemetry.step_report import MAX_RANK_FOLDERS, RANK_METRICS, SUMMED_METRICS, LogRow
from dist_amp.telemetry.writers import in_readable_units
from dist_amp.world import World

PHASES = "step local data_wait forward backward optimizer communication_wait other"
EVERY_RANK = {f"time/{name}_seconds" for name in PHASES.split()}
EVERY_RANK |= {f"time/{name}_seconds" for name in ("checkpoint_stall", "evaluation", "diagnostics")}
EVERY_RANK |= {f"throughput/{name}_per_second" for name in ("items", "tokens")}
EVERY_RANK |= {f"memory/{name}" for name in ("peak_bytes", "peak_GiB", "allocated_bytes")}
EVERY_RANK |= {"train/loss_sum"}
TRAIN = "loss grad_norm lr clipped_share epoch samples_seen tokens_seen"
AMP = "loss_scale loss_scale_log2 skipped_steps skipped_in_interval"
RANK_0 = {"eval/loss", *(f"train/{name}" for name in TRAIN.split())}
RANK_0 |= {f"amp/{name}" for name in AMP.split()}


def recorded_steps(run, steps):
    reports = take_steps(run, steps)
    for report in reports:
        run.metrics.after_step(report)
    return reports


def logged(world, folder):
    words = ["--run.dir", folder, "--train.micro_batch_size", 4, "--train.accumulation_steps", 2]
    words += ["--eval.every", 3, "--metrics.log_every", 3]
    task = Tiny(uneven=True, samples=131)
    task.tokens = lambda batch: batch["x"].numel()
    run = make_run(world, task, *words)
    run.metrics.open(run.folder, 0, "")
    reports = []
    for _ in range(2):
        reports += recorded_steps(run, 3)
        log(run)
        run.metrics.write_evaluation(run.step, evaluate(run))
    run.metrics.close_files()
    rows = task.build_dataset("validation")[:]
    with torch.no_grad(), run.precision.autocast():
        held_out = task.loss_sum(run.parallel.module, rows) / task.weight(rows)
    sums = [(report.loss_sum.item(), report.weight.item()) for report in reports]
    return sums, run.metrics.last.loss, held_out.item()


def scalars(folder, rank):
    events = EventAccumulator(str(folder / "tensorboard" / f"rank{rank:05d}")).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_every_ranks_events_hold_its_metrics_and_rank_0_and_metrics_jsonl_the_worlds(tmp_path):
    (one, loss, held_out), (other, loss_there, _) = on_ranks(2, logged, str(tmp_path))
    first, second = scalars(tmp_path, 0), scalars(tmp_path, 1)
    events = EventAccumulator(str(tmp_path / "tensorboard/rank00000")).Reload()
    assert events.Tags()["tensors"] == ["start/config/text_summary"]
    assert set(second) == EVERY_RANK
    assert set(first) >= EVERY_RANK | RANK_0
    assert {tag.split("/")[0] for tag in set(first) - set(second) - RANK_0} == {"ranks"}
    for tags in (first, second):
        assert [step for step, _ in tags["memory/peak_bytes"]] == [3, 6]
        assert all(value > 2**20 for _, value in tags["memory/peak_bytes"])
        items, tokens = tags["throughput/items_per_second"], tags["throughput/tokens_per_second"]
        rates = [t / i for (_, i), (_, t) in zip(items, tokens, strict=True)]
        assert rates == pytest.approx([8, 8], rel=1e-5)
    # The loss is the weighted mean over the interval's steps, micro-batches and ranks.
    expected = sum(step[0] for step in [*one[3:], *other[3:]]) / sum(step[1] for step in one[3:])
    assert loss == loss_there == pytest.approx(expected, rel=1e-6)
    assert first["train/loss"][1][1] == pytest.approx(expected, rel=1e-6)
    # Every held-out sample counts once; 131 do not fall on two ranks evenly.
    assert first["eval/loss"][-1] == (6, pytest.approx(held_out, rel=1e-5))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logs = [line for line in lines if "train/loss" in line]
    assert [(line["step"], len(line["ranks"])) for line in logs] == [(3, 2), (6, 2)]
    assert [line["step"] for line in lines if "eval/loss" in line] == [3, 6]
    assert all(line["train/epoch"] == line["train/samples_seen"] / 131 for line in logs)
    for line in logs:  # short numbers: a line may list 64 ranks
        times = [value for tag, value in line["ranks"][1].items() if tag.startswith("time/")]
        assert times == [*np.round(times, 7)]
    rates = [(line["step"], pytest.approx(line["train/lr"], rel=1e-6)) for line in logs]
    assert first["train/lr"] == rates


def test_memory_is_the_resident_set_on_a_cpu_and_the_allocators_on_a_gpu(monkeypatch):
    peak, now, *others = memory_use(torch.device("cpu"))
    assert 2**25 < now <= peak
    assert (now % 4096, *others) == (0, 0, 0), "in whole pages; there is no allocator"
    run = make_run(World(), Tiny())
    assert not {"memory/reserved_bytes", "memory/allocator_retries"} & set(log(run).rank_tags(0))
    stats = {f"{name}_bytes.all.current": n for name, n in (("allocated", 20), ("reserved", 40))}
    stats |= {"allocated_bytes.all.peak": 30, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    on_gpu = memory_use(torch.device("cuda", 1))
    monkeypatch.setattr("dist_amp.telemetry.metrics.memory_use", lambda device: on_gpu)
    tags = log(run).rank_tags(0)
    names = ("peak_bytes", "allocated_bytes", "reserved_bytes", "allocator_retries")
    assert [tags[f"memory/{name}"] for name in names] == [30, 20, 40, 2]
    stats.clear()
    assert memory_use(torch.device("cuda", 1)) == (0, 0, 0, 0), "before the first allocation"


def random_row(ranks):
    table = np.random.default_rng(0).uniform(1, 2, (ranks, len(RANK_METRICS)))
    return LogRow(10, table), [dict(zip(RANK_METRICS, own, strict=True)) for own in table.tolist()]


def test_a_line_lists_at_most_64_ranks_and_the_summary_all(tmp_path):
    metrics = opened(tmp_path)
    for size in (2, MAX_RANK_FOLDERS + 1):
        metrics.last = random_row(size)[0]
        metrics._totals = np.full((size, len(SUMMED_METRICS)), 0.01)
        metrics.write(metrics.last)
        line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
        assert len(line["ranks"]) == min(size, 64)
        assert line["ranks"][1]["memory/peak_bytes"] == metrics.last.column("peak_bytes")[1]
        rates = [tags["throughput/items_per_second"] for tags in metrics.rank_table()]
        assert rates == pytest.approx([1 / len(STEP_PHASES)] * size)
        metrics._totals[:] = 1.0
        assert metrics.rank_table()[1]["time/forward_seconds"] == 1.0
    metrics.close_files()


@pytest.mark.bad_input("a total weight of inf or nan")
@pytest.mark.parametrize("weight", [0, math.inf, math.nan])
def test_a_total_weight_that_is_0_or_no_number_is_named(weight):
    run = make_run(World(), variant(weight=lambda batch: weight))
    recorded_steps(run, 3)
    said = message_of(65, Limits(run).on_log, log(run))
    assert f"a step had a total weight of {weight} (up to step 3); the loss" in said
    assert "--run.allow_config_change true, or return max(1, weight)" in said


@pytest.mark.bad_input("loss or gradients not finite k times in a row")
def test_too_many_skips_in_a_row_end_the_run_with_the_limit_and_advice():
    run = make_run(World(), Tiny(), "--train.max_skips_in_a_row", 3)
    run.schedule.counters[:] = torch.tensor([5, 4, 3])
    row = log_row(run)
    said = "max_skips_in_a_row=3; try a lower optim.lr"
    assert said in message_of(70, Limits(run).on_log, row)
    assert math.isnan(row.loss), "no step, no mean"


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("--train.max_grad_norm 1e-6", 2 / 3),
        ("--train.max_grad_norm 1e6", 0),
        ("--train.clip_by off", 0),
    ],
)
def test_a_skipped_steps_loss_is_not_the_intervals_and_clipped_steps_are_counted_by_their_norm(
    words, share
):
    words = [*words.split(), "--data.shuffle", "false", "--train.micro_batch_size", 4]
    run = make_run(World(), Overflow(bad=(0,)), *words)
    skipped, *rest = recorded_steps(run, 3)
    assert not skipped.applied
    expected = sum(r.loss_sum.item() for r in rest) / sum(r.weight.item() for r in rest)
    row = log(run)
    assert row.loss == pytest.approx(expected, rel=1e-6), "float32 sums of eight samples"
    assert row.global_tags()["train/clipped_share"] == share


def opened(folder, *steps):
    """Metrics that write into a folder, with a line of each of these steps."""
    metrics = make_run(World(), Tiny()).metrics
    metrics.open(folder, 0, "")
    write_rows(metrics, *steps)
    return metrics


def write_rows(metrics, *steps):
    for step in steps:
        metrics.write_scalars(step, {"train/loss": float(step)})


def steps_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.bad_input("metrics.jsonl on a full disk")
def test_lines_that_find_no_space_are_written_once_there_is_some(tmp_path, capsys, monkeypatch):
    metrics = opened(tmp_path, 1)

    class NearlyFull(io.FileIO):
        def write(self, data):
            return super().write(data[:16])

    with monkeypatch.context() as patch:
        patch.setattr(writers, "open", lambda path, mode, **_: NearlyFull(path, mode), False)
        write_rows(metrics, 2, 3)
    write_rows(metrics, 4)
    metrics.close_files()
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("its lines are kept in memory and written later") == 1


@pytest.mark.bad_input("TensorBoard's folder removed or full")
def test_a_removed_tensorboard_folder_is_made_anew_and_nothing_else_is_lost(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(writers, "RETRY_SECONDS", 0.0)
    metrics = opened(tmp_path, 1)
    # Else the writer's thread may create its file while the folder is being removed.
    metrics.write_to_tensorboard(lambda writer: writer.flush())
    shutil.rmtree(tmp_path / "tensorboard")
    write_rows(metrics, 2, 3)
    metrics.close_files()
    assert [step for step, _ in scalars(tmp_path, 0)["train/loss"]] == [3]
    assert steps_of(tmp_path) == [1, 2, 3]
    said = "rank00000 can't be written (No such file or directory); metrics.jsonl will"
    assert said in capsys.readouterr().err


@pytest.mark.bad_input("a damaged metrics.jsonl at a resume")
@pytest.mark.parametrize("damaged", [b"12", b'{"step": "2"}', b'{"st\xff": 2}'], ids=repr)
def test_a_resume_after_a_kill_keeps_the_complete_lines_of_steps_not_taken_again(
    damaged, tmp_path, capsys
):
    logged = {"train/loss": 1.0, "amp/skipped_steps": 0, "ranks": []}
    rows = [{"step": step, **logged} for step in range(1, 8)]
    whole = [json.dumps(row).encode() for row in rows]
    lines = [whole[0], damaged, *whole[1:], b'{"step": 8, "train']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    metrics = make_run(World(), Tiny()).metrics
    metrics.open(tmp_path, 5, "")
    metrics.close_files()
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == whole[:5]
    assert metrics.last_logged == rows[4]
    assert "had unreadable lines, which are removed: 1" in capsys.readouterr().err


def test_figures_of_a_run_whose_checkpoints_are_gone_are_kept(tmp_path, capsys):
    opened(tmp_path, 1).close_files()
    figures = (tmp_path / "metrics.jsonl").read_text()
    opened(tmp_path, 1).close_files()
    said = f"{tmp_path} had metrics but no checkpoint: they are kept in {tmp_path}/metrics_before."
    assert said in capsys.readouterr().err
    assert (tmp_path / "metrics_before.jsonl").read_text() == figures


def test_the_metrics_of_many_steps_are_those_of_their_log_step_also_when_they_are_read_later():
    steps = 69
    words = ("--train.micro_batch_size", 2, "--train.accumulation_steps", 2)
    run = make_run(World(), Tiny(uneven=True, samples=512), *words, "--train.steps", steps + 2)
    reports = recorded_steps(run, steps)
    run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
    lr = run.schedule.last_lr.item()
    recorded_steps(run, 2)
    row = run.metrics.read()
    assert run.metrics.read() is None
    assert (row.step, row["applied_steps"], row["items"]) == (steps, steps, 4 * steps)
    assert row["lr"] == lr
    losses = sum(one.item() for report in reports for one in report.losses)
    weights = sum(report.weight.item() for report in reports)
    assert (row.total("loss_sum"), row["weight_sum"]) == (losses, weights), "in float64"
    assert row["grad_norm"] == reports[-1].norm.item()


def test_an_older_checkpoints_interval_begins_with_unknown_tokens_and_without_skips():
    run = make_run(World(), Tiny())
    run.metrics.resume_unfinished(torch.tensor([[8.0, 4.0, 2.0]]).double(), same_world=True)
    values = run.metrics.unfinished_sums(run.data).tolist()
    assert values == pytest.approx([8.0, 4.0, 2.0, math.nan, 0.0, 0.0, 0.0], nan_ok=True)


def test_readable_units_are_those_of_the_other_tags():
    values = {"memory/peak_bytes": 3 * 2**29, "throughput/mfu": 0.5, "amp/loss_scale": 2.0**38}
    readable = {"memory/peak_GiB": 1.5, "perf/mfu_pct": 50, "amp/loss_scale_log2": 38}
    assert in_readable_units(values) == readable
