"""The overhead bench compares what it says, and reports it; no test asserts a time."""

import json
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks

from dist_amp.bench import harness, overhead
from dist_amp.bench.__main__ import BENCHES
from dist_amp.bench.__main__ import main as bench
from dist_amp.bench.loops import baseline
from dist_amp.bench.overhead import AGAIN, OUR_UPDATE, TELEMETRY, UPDATE, Cell, verdict
from dist_amp.bench.report import BASELINE, PEERS, interval, median_interval
from dist_amp.world import World

TINY = Cell("tiny", "bf16", 1, "single")
# As on the command's ranks.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """(text, report) of the command on the smallest workload, in this process and with the fewest steps."""
    folder = tmp_path_factory.mktemp("out")
    words = ["overhead", "--workloads", "tiny", "--ranks", "1", "--rounds", "6", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        for peer in ("accelerate", "fabric"):  # the slow test below measures them
            patch.setattr(overhead, peer, raises(ImportError()))
        patch.setattr(overhead, "ROUND_SECONDS", 0.0)
        patch.setattr(harness, "on_ranks", lambda size, measure, *args: measure(World(), *args))
        assert bench(words) == 0
    return (folder / "overhead.txt").read_text(), json.loads((folder / "overhead.json").read_text())


def test_table_and_report_agree(report):
    text, found = report
    loops = [(cell, name, row) for cell in found["cells"] for name, row in cell["loops"].items()]
    lines = text.split("|\n|:")[1].splitlines()[1:]
    assert len(lines) == len(loops) == 3 * 6
    for line, (cell, name, row) in zip(lines, loops, strict=True):
        cells = [part.strip() for part in line.strip("|").split("|")]
        assert cells[:5] == [cell["workload"], cell["precision"], "1", "single", name]
        if "note" in row:
            assert name in PEERS
            assert cells[-1] == row["note"] == "not installed: pip install -e '.[bench]' in the clone's folder"
            continue
        for ratio in overhead.RATIOS:
            low, high = row[ratio]["interval"]
            assert low <= row[ratio]["median"] <= high
            assert name == BASELINE or interval(row[ratio]["rounds"]) in cells
        assert cells[-1] == row.get("verdict", "")
        assert all(len(row["seconds"][measure]) == 6 for measure in overhead.MEASURES)
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("precision", overhead.PRECISIONS)
def test_the_baseline_and_train_step_train_the_same_parameters(report, precision):
    (loops,) = [cell["loops"] for cell in report[1]["cells"] if cell["precision"] == precision]
    # A float32's last place is 6e-8 of the largest parameter: some of it for each of 20 steps.
    assert loops["dist_amp"]["parity"] < 1e-6
    assert loops[TELEMETRY]["parity"] < 1e-6
    assert loops[AGAIN]["parity"] == 0


@pytest.mark.parametrize("precision", overhead.PRECISIONS)
def test_an_ordinary_step_reads_nothing_and_a_logging_step_once(report, precision):
    (loops,) = [cell["loops"] for cell in report[1]["cells"] if cell["precision"] == precision]
    assert loops["dist_amp"]["host_reads"] == [0]
    # Metrics are read one step after they were started.
    assert loops[TELEMETRY]["host_reads"] == [1] + [0] * 9


@pytest.fixture(scope="module")
def tiny():
    """(setup, data, the baseline's path) of one cell."""
    setup, path = overhead.build_setup(TINY, World()), []
    data = [[batch] * 4 for batch in torch.utils.data.DataLoader(setup.task.build_dataset("train"), 16)][:8]
    assert overhead.drift_of(baseline(setup), data, path) == 0
    return setup, data, path


def test_a_learning_rate_that_is_one_step_late_is_a_drift(tiny):
    setup, data, path = tiny
    late = replace(setup.config.optim, warmup_steps=setup.config.optim.warmup_steps + 1)
    late = replace(setup, config=replace(setup.config, optim=late))
    assert overhead.drift_of(baseline(late), data, path) > 1e-5


def test_the_median_of_twenty_lies_between_the_sixth_and_the_fifteenth():
    # David & Nagaraja's table of distribution-free intervals: 6 heads or more, 14 or fewer, in 95.9 % of 20 tosses.
    assert median_interval([float(n) for n in range(20, 0, -1)]) == (10.5, 6.0, 15.0)
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (3.5, 1.0, 6.0)  # 96.9 %
    assert median_interval([2.0]) == (2.0, 2.0, 2.0)


def test_a_missed_target_is_named():
    row = {"ratio": {"median": 0.98, "target": 0.97}, "wall ratio": {"median": 0.96, "target": 0.97}}
    row |= {"parity": 1e-7, "host_reads": [0], "collectives": None}
    assert verdict("dist_amp", row, 1e-6) == "missed: ratio"
    assert verdict("dist_amp", {**row, "ratio": {"median": 0.97, "target": 0.97}}, 1e-6) == "met"
    assert verdict("dist_amp", {**row, "wall ratio": row["ratio"]}, 1e-6) == "missed: ratio, wall ratio"
    assert verdict("dist_amp", {**row, "parity": 1e-5, "host_reads": [1]}, 1e-6) == "missed: ratio, parity, host reads"


def test_two_ddp_ranks_are_held_to_processor_time_and_wall_time():
    assert overhead.targets(Cell("tiny", "bf16", 2, "ddp"), "dist_amp") == (0.97, 0.97)
    assert overhead.targets(Cell("tiny", "fp16", 2, "ddp"), "dist_amp") == (0.97, None)
    assert overhead.targets(Cell("tiny", "bf16", 2, "fsdp"), "dist_amp") == (None, None)
    assert overhead.targets(TINY, "dist_amp") == (0.95, None)


def raises(error):
    def build(setup):
        raise error

    return build


def in_float32(setup):
    return baseline(overhead.build_setup(Cell("tiny", "fp32", 1, "single"), setup.world))


def unsharded(setup):
    return baseline(overhead.build_setup(TINY, setup.world))


@pytest.mark.parametrize(
    ("build", "note"),
    [
        (raises(ValueError("No such thing on a CPU. Buy a GPU.\nOr two.")), "failed: No such thing on a CPU"),
        (raises(ModuleNotFoundError("no module")), "not installed: pip install -e '.[bench]' in the clone's folder"),
        (in_float32, "failed: trains in float32"),
        (unsharded, "failed: its parameters are not sharded"),
    ],
)
def test_what_a_peer_can_not_do_is_reported(build, note, tiny):
    setup, data, _ = tiny
    if build is unsharded:
        setup = overhead.build_setup(TINY._replace(strategy="fsdp"), World())
    assert overhead.first_steps(setup, build, data, [], may_fail=True)[2] == note


def test_a_loop_of_this_project_may_not_fail(tiny):
    with pytest.raises(ValueError, match="broken"):
        overhead.first_steps(tiny[0], raises(ValueError("broken")), [], [], may_fail=False)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["overhaed"], "there is no bench 'overhaed'; did you mean overhead?"),
        (["overhead", "--workloads", "huge"], "invalid choice: 'huge'"),
        (["overhead", "--rounds", "5"], "--rounds: 5 must be at least 6"),
        (["overhead", "--ranks", "0"], "--ranks: 0 must be at least 1"),
        (["overhead", "--rouns", "6"], "unrecognized arguments: --rouns 6"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(words, error, capsys):
    assert bench(words) == 64
    assert error in capsys.readouterr().err


def test_the_command_alone_lists_the_benches(capsys):
    assert bench([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in BENCHES)


def sharded_cell(world):
    return overhead.measure(world, Cell("tiny", "fp16", 2, "fsdp"), 1)["loops"]


@pytest.mark.slow
def test_on_shards_the_update_calls_one_collective():
    loops = on_ranks(2, sharded_cell)[0]
    assert loops[UPDATE]["collectives"] == 2, "the textbook: the norm, and the scaler's decision"
    assert loops[OUR_UPDATE]["collectives"] == 1
    assert loops[OUR_UPDATE]["host_reads"] == [0]
    assert loops[OUR_UPDATE]["parity"] < 1e-6
    assert loops["dist_amp"]["parity"] < 1e-6


@pytest.mark.slow
def test_the_command_starts_its_own_ranks(tmp_path, capfd):
    words = ["--workloads", "tiny", "--precisions", "fp32", "--ranks", "2", "--strategies", "ddp", "--rounds", "6"]
    assert bench(["overhead", *words, "--out", str(tmp_path)]) == 0
    assert "dist_amp, full telemetry" in capfd.readouterr().out
    (cell,) = json.loads((tmp_path / "overhead.json").read_text())["cells"]
    assert cell["loops"]["dist_amp"]["parity"] < 1e-6
    notes = [cell["loops"][peer].get("note", "") for peer in PEERS]
    assert all(not note or note.startswith("not installed") for note in notes), notes
