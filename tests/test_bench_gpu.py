"""`python -m dist_amp.bench gpu` in its smoke form for a CPU: every code path, and the verdicts of its report."""

import json

import pytest
import torch

from dist_amp.bench import gpu
from dist_amp.bench.gpu_report import draw, markdown, save, targets, targets_table
from dist_amp.bench.loops import Loop, baseline
from dist_amp.bench.report import BASELINE
from dist_amp.errors import ConfigError

ONE_CELL = ("--smoke", "--models", "124m", "--modes", "eager", "--precisions", "bf16", "--rounds", "1")


def smoke(folder, *words):
    """The report of a run in the smoke form."""
    assert gpu.main([*ONE_CELL, *words, "--out", str(folder)]) == 0
    return json.loads((folder / "gpu.json").read_text())


@pytest.fixture
def without_free_steps(monkeypatch):
    """The steps before the first cell are left out, for tests of something else."""
    monkeypatch.setattr(gpu, "free_steps", lambda bench, cell: {"waits": "nothing"})


def without_peers(monkeypatch):
    """They count as not installed, whether they are or not."""

    def missing(setup):
        raise ImportError

    monkeypatch.setattr(gpu, "accelerate", missing)
    monkeypatch.setattr(gpu, "fabric", missing)


def test_the_smoke_form_runs_every_code_path_and_says_that_its_numbers_are_meaningless(tmp_path, monkeypatch):
    without_peers(monkeypatch)
    report = smoke(tmp_path, "--modes", "compiled", "--backend", "eager")
    (steps,), (cell,) = report["free_steps"], report["cells"]
    assert (steps["waits"], steps["waits_when_logged"]) == ("nothing", "nothing")
    assert list(cell["loops"]) == [BASELINE, "dist_amp", "Accelerate", "Fabric"]
    for name in (BASELINE, "dist_amp"):
        row = cell["loops"][name]
        assert len(row["seconds"]) == len(row["speedup"]) == 1
        assert row["peak_bytes"] >= 0
    # Sums in half precision, in another order: see SAME_LOSS.
    assert cell["loops"]["dist_amp"]["loss"] == pytest.approx(cell["loops"][BASELINE]["loss"], rel=2e-3)
    assert "not installed" in cell["loops"]["Fabric"]["note"]
    text = (tmp_path / "gpu.md").read_text()
    assert "The speeds and memory below are meaningless" in text
    assert " met " not in text


@pytest.mark.slow
def test_the_smoke_form_with_the_compiler_of_a_gpu_run_and_the_peers(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning_fabric")
    pytest.importorskip("matplotlib")
    words = ["--modes", "compiled", "eager", "whole", "--backend", "inductor"]
    report = smoke(tmp_path, *words)
    assert [cell["mode"] for cell in report["cells"]] == ["compiled", "eager", "whole"]
    for cell in report["cells"]:
        assert not [row["note"] for row in cell["loops"].values() if "note" in row]
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_without_a_gpu_it_ends_and_names_the_fix(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == ConfigError.exit_code
    assert "add --smoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--micro_batch", "32"], ["--micro_batch", "2b=32"], ["--rounds", "-1"], ["--modes", "fast"]]
)
def test_a_mistake_is_refused_in_one_line(words, capsys):
    assert gpu.main(["--smoke", *words]) == ConfigError.exit_code
    assert words[0] in capsys.readouterr().err


def test_what_fails_gets_a_note_in_its_row_and_the_others_go_on(tmp_path, monkeypatch, without_free_steps):
    without_peers(monkeypatch)

    def too_large(setup):
        if setup.precision == "bf16":
            return baseline(setup)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def breaks_later(setup):
        loop, steps = baseline(setup), iter(range(gpu.SMOKE[1]))

        def step(micro_batches):
            next(steps)
            loop.step(micro_batches)

        return Loop(loop.module, step)

    monkeypatch.setattr(gpu, "dist_amp", too_large)
    monkeypatch.setattr(gpu, "accelerate", breaks_later)
    report = smoke(tmp_path, "--precisions", "fp16")
    loops = report["cells"][0]["loops"]
    assert list(loops) == [BASELINE, "dist_amp", "dist_amp, bf16", "Accelerate", "Fabric"]
    assert "out of memory" in loops["dist_amp"]["note"]
    assert "StopIteration" in loops["Accelerate"]["note"]
    assert len(loops["dist_amp, bf16"]["speedup"]) == 1
    assert loops[BASELINE]["seconds"]
    assert [row[3] for row in targets(report) if row[0].startswith(f"dist_amp / {BASELINE}")] == ["not measured"]


def test_what_no_longer_fits_into_the_time_is_listed(tmp_path, without_free_steps):
    report = smoke(tmp_path, "--minutes", "0")
    assert report["left_out"] == ["124m eager bf16"]
    assert "left out, no time: 124m eager bf16" in (tmp_path / "gpu.md").read_text()


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path, monkeypatch, without_free_steps, capsys):
    cells = iter([{"note": "first"}])

    def measure(bench, cell):
        if (found := next(cells, None)) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(gpu, "measure", measure)
    assert gpu.main([*ONE_CELL, "--models", "124m", "1b", "--out", str(tmp_path)]) == 1
    assert "error: stopped" in capsys.readouterr().err
    assert [cell["note"] for cell in json.loads((tmp_path / "gpu.json").read_text())["cells"]] == ["first"]


def measured(seconds_per_step, rounds=10):
    """A loop's row, all rounds equal, where the baseline takes 0.1 s."""
    row = {"seconds": [seconds_per_step] * rounds, "speedup": [0.1 / seconds_per_step] * rounds}
    return {**row, "peak_bytes": 40 * 2**30, "loss": 10.0}


def a_report(**changes):
    """A report from an H200: the baseline's step takes 100 ms and reaches 45 % of the peak."""
    loops = {BASELINE: measured(0.1), "dist_amp": measured(0.1), "Accelerate": measured(0.105)}
    loops |= {"Fabric": {"note": "out of memory; use a smaller --micro_batch"}}
    cell = {"model": "124m", "mode": "compiled", "precision": "bf16", "took_seconds": 1.0, "clocks": {}}
    cell |= {"tokens_per_step": 1000, "flops_per_token": 1e9, "peak_flops": 1e13 / 0.45, "loops": loops | changes}
    options = gpu.parse(["--smoke", "--models", "124m"])
    report = gpu.GpuBench(gpu.World(), options).report
    report |= {"smoke": False, "machine": {"gpu": "NVIDIA H200", "cpu": "a CPU", "cores": 2}, "cells": [cell]}
    return report | {"free_steps": [{"precision": "bf16", "waits": "nothing", "waits_when_logged": "nothing"}]}


def verdicts(report):
    return {target: verdict for target, _, _, verdict in targets(report)}


def test_each_target_gets_its_verdict():
    assert verdicts(a_report()) == {
        "no step waits for the device": "met",
        f"dist_amp / {BASELINE} >= 0.99": "met",
        "dist_amp / Accelerate > 1": "met",
        "dist_amp / Fabric > 1": "not measured",
        "MFU >= 42 %": "met",
        "loss equal to the baseline's within 0.002": "met",
    }
    slow = verdicts(a_report(dist_amp=measured(0.11)))
    assert [target for target, verdict in slow.items() if verdict == "missed"] == [
        f"dist_amp / {BASELINE} >= 0.99",
        "dist_amp / Accelerate > 1",
        "MFU >= 42 %",
    ]
    other = verdicts(a_report(dist_amp={**measured(0.1), "loss": 10.1}))
    assert [target for target, verdict in other.items() if verdict == "missed"] == [
        "loss equal to the baseline's within 0.002"
    ]


def test_fp16_is_compared_with_bf16_of_the_same_rounds():
    report = a_report(dist_amp=measured(0.104), **{"dist_amp, bf16": measured(0.1)})
    report["cells"][0]["precision"] = "fp16"
    found = {row[0]: row[2:] for row in targets(report)}
    assert found["fp16 / bf16 >= 0.97"] == ("0.962 [0.962, 0.962]", "missed")
    assert "MFU >= 42 %" not in found


def test_on_another_gpu_the_report_says_that_the_targets_are_for_an_h200():
    report = a_report()
    assert "The targets are for" not in markdown(report)
    report["machine"]["gpu"] = "NVIDIA L4"
    assert "The targets are for an H200; this is NVIDIA L4." in markdown(report)


def test_an_empty_report_can_be_written(tmp_path):
    report = a_report() | {"cells": [], "free_steps": [{"precision": "bf16", "note": "out of memory"}]}
    save(report, tmp_path)
    assert "out of memory" in targets_table(report)


def test_the_picture_shows_loops_without_numbers_too(tmp_path):
    pytest.importorskip("matplotlib")
    draw(a_report(), tmp_path / "gpu.png")
    draw(a_report() | {"cells": []}, tmp_path / "empty.png")
    assert (tmp_path / "gpu.png").read_bytes()[:4] == b"\x89PNG"


def test_tokens_and_weights_are_the_same_for_every_loop():
    bench = gpu.GpuBench(gpu.World(), gpu.parse([*ONE_CELL, "--micro_batch", "124m=3"]))
    setups = [bench.setup(gpu.Cell("124m", "eager", "bf16"), 3, 2) for _ in range(2)]
    one, other = (setup.task.batches(4, 2, 3) for setup in setups)
    assert len(one) == 4
    assert [tuple(batch["input_ids"].shape) for batch in one[0]] == [(3, 33)] * 2
    for step, again in zip(one, other, strict=True):
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(step, again, strict=True))
    assert int(one[0][0]["input_ids"].max()) > 255, "the whole vocabulary, not bytes"
    models = [setup.new_model() for setup in setups]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
