"""What is logged is what happened: on every rank, over the whole interval, in TensorBoard and in
files.
"""

import io
import json
import math
import mmap
import shutil
from statistics import median

import numpy as np
import pytest
import torch
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import NothingCounts, Overflow, Tiny, log, make_run, take_steps

from dist_amp.clock import OWN_PHASES, STEP_PHASES
from dist_amp.diagnostics.limits import Limits
from dist_amp.errors import DataError, NumericsError
from dist_amp.step import evaluate
from dist_amp.supervise.lifecycle import log_group_rates
from dist_amp.telemetry import writers
from dist_amp.telemetry.console import columns
from dist_amp.telemetry.metrics import memory_use
from dist_amp.telemetry.step_report import MAX_RANK_FOLDERS, RANK_METRICS, SUMMED_METRICS, LogRow
from dist_amp.telemetry.sums import MAX_STEPS_ON_DEVICE
from dist_amp.train import main
from dist_amp.world import World

EVERY_RANK = {
    "throughput/items_per_second",
    "throughput/tokens_per_second",
    "memory/peak_bytes",
    "memory/peak_GiB",
    "memory/allocated_bytes",
    "time/step_seconds",
    "time/local_seconds",
    "time/data_wait_seconds",
    "time/forward_seconds",
    "time/backward_seconds",
    "time/optimizer_seconds",
    "time/communication_wait_seconds",
    "time/other_seconds",
    "time/checkpoint_stall_seconds",
    "time/evaluation_seconds",
    "time/diagnostics_seconds",
}
RANK_0 = {
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/clipped_share",
    "train/epoch",
    "train/samples_seen",
    "train/tokens_seen",
    "eval/loss",
    "amp/loss_scale",
    "amp/loss_scale_log2",
    "amp/skipped_steps",
    "amp/skipped_in_interval",
}


class Worded(Tiny):
    """Has tokens: eight per sample."""

    def tokens(self, batch):
        return batch["x"].numel()


def recorded_steps(run, steps):
    reports = take_steps(run, steps)
    for report in reports:
        run.metrics.record(report)
    return reports


def logged(world, folder, dtype):
    words = [
        "--precision.dtype",
        dtype,
        "--precision.scaler.init_scale",
        2**30,
        "--run.dir",
        folder,
    ]
    words += ["--train.micro_batch_size", 4, "--train.accumulation_steps", 2]
    words += ["--eval.every", 3, "--metrics.log_every", 3]
    run = make_run(world, Worded(uneven=True, samples=128), *words)
    run.metrics.open(run.folder, 0, "")
    reports = []
    for _ in range(2):
        reports += recorded_steps(run, 3)
        log(run)
        run.metrics.write_evaluation(run.step, evaluate(run))
    run.metrics.close()
    sums = [(r.loss_sum.item(), r.weight.item(), r.norm.item(), r.applied.item()) for r in reports]
    return sums, run.metrics.last.loss, run.metrics.evaluation, run.metrics.rank_table()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return on_ranks(2, logged, str(folder), "bf16"), folder


def scalars(folder, rank):
    events = EventAccumulator(str(folder / "tensorboard" / f"rank{rank:05d}"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_ranks_events_hold_its_throughput_and_memory_and_rank_0_the_worlds(two_ranks):
    _, folder = two_ranks
    first, second = scalars(folder, 0), scalars(folder, 1)
    assert set(second) == EVERY_RANK
    assert set(first) >= EVERY_RANK | RANK_0
    assert {tag.split("/")[0] for tag in set(first) - set(second) - RANK_0} == {"ranks"}
    for tags in (first, second):
        assert [step for step, _ in tags["memory/peak_bytes"]] == [3, 6]
        assert all(value > 2**20 for _, value in tags["memory/peak_bytes"])
        items, tokens = tags["throughput/items_per_second"], tags["throughput/tokens_per_second"]
        assert all(
            t / i == pytest.approx(8, rel=1e-5)
            for (_, i), (_, t) in zip(items, tokens, strict=True)
        )


def test_the_logged_loss_is_the_weighted_mean_over_interval_micro_batches_and_ranks(two_ranks):
    (first, second), folder = two_ranks
    last_three = [*first[0][3:], *second[0][3:]]
    weight = sum(step[1] for step in first[0][3:])
    expected = sum(step[0] for step in last_three) / weight
    assert first[1] == second[1] == pytest.approx(expected, rel=1e-6)
    assert scalars(folder, 0)["train/loss"][1][1] == pytest.approx(expected, rel=1e-6)


def test_metrics_jsonl_has_a_line_per_logged_step_with_the_same_metrics(two_ranks):
    _, folder = two_ranks
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logs = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in logs] == [3, 6]
    assert [len(line["ranks"]) for line in logs] == [2, 2]
    assert [line["step"] for line in lines if "eval/loss" in line] == [3, 6]
    for line, (step, value) in zip(logs, scalars(folder, 0)["train/lr"], strict=True):
        assert (line["step"], line["train/lr"]) == (step, pytest.approx(value, rel=1e-6))


def evaluate_in_pieces(world, samples):
    words = ("--eval.every", 1, "--use_amp", "false", "--train.micro_batch_size", 4)
    run = make_run(world, Tiny(uneven=True, samples=samples), *words)
    before = torch.get_rng_state()
    (mean,) = evaluate(run).values()
    rows = run.task.build_dataset("validation")[:]
    whole = run.task.loss_sum(run.parallel.module, rows) / run.task.weight(rows)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in run.parallel.parameters)
    return mean, whole.item()


def evaluate_each(world, sizes):
    return [evaluate_in_pieces(world, samples) for samples in sizes]


def test_evaluation_counts_every_held_out_sample_once_however_they_fall_on_ranks():
    first, second = on_ranks(2, evaluate_each, (32, 35, 41))
    assert first == second
    for mean, whole in first:
        assert mean == pytest.approx(whole, rel=1e-6)  # float32 sums in another order


def test_the_loss_scale_and_skipped_steps_are_seen(tmp_path):
    logged(World(), str(tmp_path), "fp16")
    tags = scalars(tmp_path, 0)
    skipped = tags["amp/skipped_steps"][-1][1]
    assert skipped > 0
    assert tags["amp/loss_scale"][-1][1] == 2 ** (30 - skipped)


def test_memory_is_the_resident_set_on_a_cpu():
    peak, now, *others = memory_use(torch.device("cpu"))
    assert others == [0, 0], "there is no allocator"
    ballast = mmap.mmap(-1, 2**26)  # 64 MiB from the system, which no allocator had kept
    for page in range(0, len(ballast), mmap.PAGESIZE):
        ballast[page] = 1
    grown_peak, grown, *_ = memory_use(torch.device("cpu"))
    ballast.close()
    assert grown - now > 2**25
    assert grown_peak >= max(peak, grown)


def test_reserved_bytes_and_allocator_retries_of_a_gpu_are_logged_and_on_a_cpu_there_are_none(
    monkeypatch,
):
    run = make_run(World(), Tiny())
    recorded_steps(run, 1)
    assert not {"memory/reserved_bytes", "memory/allocator_retries"} & set(log(run).rank_tags(0))
    calls = []
    stats = {
        "allocated_bytes.all.peak": 30,
        "allocated_bytes.all.current": 20,
        "reserved_bytes.all.current": 40,
    }
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda device: calls.append(device) or stats | {"num_alloc_retries": 2},
    )
    gpu = torch.device("cuda", 1)
    assert memory_use(gpu) == (30, 20, 40, 2)
    assert calls == [gpu], "asked once: each time it collects all of its statistics"
    monkeypatch.setattr("dist_amp.telemetry.metrics.memory_use", lambda device: (30, 20, 40, 2))
    recorded_steps(run, 1)
    tags = log(run).rank_tags(0)
    names = ("peak_bytes", "allocated_bytes", "reserved_bytes", "allocator_retries")
    assert [tags[f"memory/{name}"] for name in names] == [30, 20, 40, 2]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    assert memory_use(gpu) == (0, 0, 0, 0), "before the first allocation"


def random_row(ranks):
    table = np.random.default_rng(0).uniform(1, 2, (ranks, len(RANK_METRICS)))
    return LogRow(10, table), [dict(zip(RANK_METRICS, own, strict=True)) for own in table.tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_what_is_computed_for_all_ranks_at_once_is_what_each_rank_gives(ranks):
    row, each = random_row(ranks)
    seconds = [sum(own[phase] for phase in STEP_PHASES) for own in each]
    rates = [own["items"] / own_seconds for own, own_seconds in zip(each, seconds, strict=True)]
    tags = row.global_tags()
    if ranks > 1:
        assert tags["ranks/items_per_second_min"] == pytest.approx(min(rates), rel=1e-12), (
            "sums in another order"
        )
        assert tags["ranks/items_per_second_median"] == pytest.approx(median(rates), rel=1e-12)
        assert tags["ranks/peak_bytes_max"] == max(own["peak_bytes"] for own in each)
        waits = [own["data"] / own["steps"] for own in each]
        assert tags["ranks/data_wait_seconds_max"] == pytest.approx(max(waits), abs=1e-7)
        local = [sum(own[phase] for phase in OWN_PHASES) for own in each]
        assert tags.get("ranks/slowest_rank", -1) == (
            local.index(max(local)) if ranks > MAX_RANK_FOLDERS else -1
        )
        assert ("ranks/forward_seconds_median" in tags) == (ranks > MAX_RANK_FOLDERS)
        assert not any("worst_rank" in tag for tag in tags)
    loss = sum(own["loss_sum"] for own in each) / each[0]["weight_sum"]
    assert tags["train/loss"] == pytest.approx(loss, rel=1e-12), "float64 sums in another order"
    assert f"items/s {sum(rates):,.0f}" in columns(row, 1.0)
    assert row.rank_tags(ranks - 1)["throughput/items_per_second"] == pytest.approx(
        rates[-1], rel=1e-12
    )
    assert json.loads(json.dumps(tags)) == tags, "plain numbers"


def test_a_line_lists_at_most_64_ranks_and_the_summary_all(tmp_path):
    metrics = make_run(World(), Tiny()).metrics
    metrics.open(tmp_path, 0, "")
    for size in (2, MAX_RANK_FOLDERS + 1):
        metrics.last = random_row(size)[0]
        metrics._totals = np.ones((size, len(SUMMED_METRICS)))
        metrics.write(metrics.last)
        line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
        assert len(line["ranks"]) == min(size, 64)
        assert line["ranks"][1]["memory/peak_bytes"] == metrics.last.column("peak_bytes")[1]
        rates = [tags["throughput/items_per_second"] for tags in metrics.rank_table()]
        assert rates == pytest.approx([1 / len(STEP_PHASES)] * size)
    metrics.close()


def test_a_step_in_which_nothing_counts_is_named():
    run = make_run(World(), NothingCounts())
    recorded_steps(run, 1)
    with pytest.raises(DataError, match="a total weight was 0; the task's weight"):
        Limits(run).on_log(log(run))


@pytest.mark.bad_input("a total weight of inf or nan")
@pytest.mark.parametrize("weight", [math.inf, math.nan])
def test_a_total_weight_that_is_no_number_is_named(weight):
    task = Tiny()
    task.weight = lambda batch: weight
    run = make_run(World(), task)
    recorded_steps(run, 3)
    with pytest.raises(DataError, match=f"a total weight was {weight}; the task's weight"):
        Limits(run).on_log(log(run))


@pytest.mark.bad_input("loss or gradients not finite k times in a row")
def test_too_many_skips_in_a_row_end_the_run_with_the_limit_and_advice():
    run = make_run(World(), Tiny(), "--train.max_skips_in_a_row", 3)
    run.schedule.counters[:] = torch.tensor([5, 4, 3])
    row = run.metrics.log(8, run.schedule, run.scaler, run.data)
    with pytest.raises(
        NumericsError, match=r"3 steps in a row .*max_skips_in_a_row=3; try a lower optim.lr"
    ) as error:
        Limits(run).on_log(row)
    assert error.value.exit_code == 70
    assert math.isnan(row.loss), "no step, no mean"


def test_building_and_stepping_a_run_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(World(), Tiny(), "--run.dir", "auto")
    recorded_steps(run, 2)
    run.metrics.log(2, run.schedule, run.scaler, run.data)
    assert list(tmp_path.iterdir()) == []


class Measured(Tiny):
    """Its metrics return what the test sets."""

    def metrics(self, model, batch):
        return {"odd": self.odd(batch)}


def test_a_metric_is_a_number_or_a_scalar_and_anything_else_is_named():
    task = Measured()
    run = make_run(World(), task, "--eval.every", 1)
    task.odd = lambda batch: 2 * len(batch["y"])
    assert evaluate(run)["odd"] == 2
    task.odd = lambda batch: batch["y"]
    with pytest.raises(DataError, match=r"metrics\(\) gave odd a tensor of shape \[8\]"):
        evaluate(run)


def test_a_skipped_steps_loss_is_not_the_intervals(tmp_path):
    run = make_run(
        World(), Overflow(bad=(0,)), "--data.shuffle", "false", "--train.micro_batch_size", 4
    )
    reports = recorded_steps(run, 3)
    assert not reports[0].applied
    expected = sum(r.loss_sum.item() for r in reports[1:]) / sum(
        r.weight.item() for r in reports[1:]
    )
    assert log(run).loss == pytest.approx(expected, rel=1e-6), "float32 sums of eight samples"


def write_rows(metrics, steps):
    for step in steps:
        metrics.write_scalars(step, {"train/loss": float(step)})


@pytest.mark.bad_input("metrics.jsonl on a full disk")
def test_lines_that_find_no_space_are_written_once_there_is_some(tmp_path, capsys, monkeypatch):
    metrics = make_run(World(), Tiny()).metrics
    metrics.open(tmp_path, 0, "")
    write_rows(metrics, [1])

    class NearlyFull(io.FileIO):
        def write(self, data):
            return super().write(data[:16])

    monkeypatch.setattr(
        writers, "open", lambda path, mode, buffering: NearlyFull(path, mode), raising=False
    )
    write_rows(metrics, [2, 3])
    monkeypatch.undo()
    write_rows(metrics, [4])
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("its lines are kept in memory and written later") == 1


@pytest.mark.bad_input("TensorBoard's folder removed or full")
def test_a_tensorboard_folder_that_is_removed_is_made_anew_and_nothing_else_is_lost(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(writers, "RETRY_SECONDS", 0.0)
    metrics = make_run(World(), Tiny()).metrics
    metrics.open(tmp_path, 0, "")
    write_rows(metrics, [1])
    # Else the writer's thread may create its file while the folder is being removed.
    metrics.write_to_tensorboard(lambda writer: writer.flush())
    shutil.rmtree(tmp_path / "tensorboard")
    write_rows(metrics, [2, 3])
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard/rank00000")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert (
        "rank00000 can't be written (No such file or directory); metrics.jsonl will"
        in capsys.readouterr().err
    )


def test_a_resume_after_a_kill_keeps_the_complete_lines_of_the_steps_that_are_not_taken_again(
    tmp_path,
):
    whole = [json.dumps({"step": step, "train/loss": 1.0 * step}) for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(whole) + '\n{"step": 8, "train')
    metrics = make_run(World(), Tiny()).metrics
    metrics.open(tmp_path, 5, "")
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == whole[:5]
    assert metrics.last_logged == {"step": 5, "train/loss": 5.0}


def read_at_once_and_later(world):
    """The metrics of three steps: read at once, and read after two more."""
    rows = []
    for later in (False, True):
        run = make_run(world, Tiny(uneven=True), "--train.micro_batch_size", 2)
        recorded_steps(run, 3)
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        if later:
            recorded_steps(run, 2)
        rows.append(run.metrics.read())
        assert run.metrics.read() is None
    return [
        (row.step, row.loss, row["grad_norm"], row["lr"], row["applied_steps"], row.total("items"))
        for row in rows
    ]


def test_metrics_that_are_read_later_are_those_of_their_log_step():
    for at_once, later in on_ranks(2, read_at_once_and_later):
        assert at_once == later


def test_the_metrics_of_many_steps_are_summed_step_by_step():
    steps = MAX_STEPS_ON_DEVICE + 5
    words = ("--train.micro_batch_size", 2, "--train.accumulation_steps", 2, "--train.steps", steps)
    run = make_run(World(), Tiny(uneven=True, samples=steps * 4), *words)
    reports = recorded_steps(run, steps)
    loss = weight = 0.0
    for report in reports:
        loss += sum(one.item() for one in report.losses)
        weight += report.weight.item()
    row = run.metrics.log(steps, run.schedule, run.scaler, run.data)
    assert (row.total("loss_sum"), row["weight_sum"]) == (loss, weight), "in float64, bit for bit"
    assert row["grad_norm"] == reports[-1].norm.item()


def steps_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


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


def test_a_failure_loses_no_pending_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tiny.Tiny.loss_sum", fails_in_its_fifth_call(Tiny.loss_sum))
    words = ["--task.target", "tiny:Tiny", "--train.steps", "6", "--metrics.log_every", "2"]
    assert main([*words, "--eval.every", "off", "--run.dir", "run"]) == 1
    assert steps_of(tmp_path / "run") == [2, 4]
    assert json.loads((tmp_path / "run/summary.json").read_text())["applied_steps"] == 4


def fails_in_its_fifth_call(loss_sum):
    calls = []

    def counted(self, model, batch):
        calls.append(batch)
        if len(calls) == 5:
            raise RuntimeError("no luck")
        return loss_sum(self, model, batch)

    return counted


class TwoRates(Tiny):
    """The head learns at a tenth of the rate."""

    def groups(self, model):
        named = dict(model.named_parameters())
        head = [name for name in named if name.startswith("2.")]
        return [
            {"name": "body", "params": [named[name] for name in named if name not in head]},
            {"name": "head", "params": [named[name] for name in head], "lr_scale": 0.1},
        ]


def test_each_groups_learning_rate_is_logged_where_they_differ(tmp_path):
    for name, task in {"two": TwoRates(), "one": Tiny()}.items():
        run = make_run(World(), task, "--run.dir", tmp_path / name)
        (tmp_path / name).mkdir()
        run.metrics.open(run.folder, 0, "")
        log_group_rates(run.metrics, run.optimizer)
        recorded_steps(run, 1)
        log(run)
        run.metrics.close()
    two, one = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("two", "one")
    )
    assert two["train/lr_body"] == two["train/lr"]
    assert two["train/lr_head"] == pytest.approx(0.1 * two["train/lr"])
    assert not [tag for tag in one if tag.startswith("train/lr_")]


def test_clipped_steps_are_counted_by_their_norm():
    for limit, share in ((1e-6, 1.0), (1e6, 0.0)):
        run = make_run(World(), Tiny(), "--train.max_grad_norm", limit, "--use_amp", "false")
        recorded_steps(run, 3)
        assert log(run).global_tags()["train/clipped_share"] == share
    run = make_run(World(), Tiny(), "--train.clip_by", "off", "--use_amp", "false")
    recorded_steps(run, 3)
    assert log(run).global_tags()["train/clipped_share"] == 0.0
