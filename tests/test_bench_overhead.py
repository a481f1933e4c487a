"""The bench of the overhead compares what it says, and tells it; how fast anything is, no test asserts."""

import json
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks

from dist_amp.bench import overhead
from dist_amp.bench.__main__ import BENCHES
from dist_amp.bench.__main__ import main as bench
from dist_amp.bench.harness import median_interval
from dist_amp.bench.loops import bare
from dist_amp.bench.overhead_report import OUR_UPDATE, TELEMETRY, UPDATE, Cell, verdict
from dist_amp.bench.report import PEERS
from dist_amp.world import World

TINY = Cell("tiny", "bf16", 1, "single")
# As the ranks of the command have it.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """(table, report) of the command on the smallest workload, in this process and with the least of steps."""
    folder = tmp_path_factory.mktemp("out")
    words = ["overhead", "--workloads", "tiny", "--ranks", "1", "--rounds", "6", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead, "ROUND_SECONDS", 0.0)
        patch.setattr(overhead, "on_ranks", lambda size, measure, *args: measure(World(), *args))
        assert bench(words) == 0
    return (folder / "overhead.txt").read_text(), json.loads((folder / "overhead.json").read_text())


def test_table_and_report_tell_the_same(report):
    table, told = report
    rows = [(cell, row) for cell in told["cells"] for row in cell["rows"]]
    lines = table.split("verdict\n")[1].splitlines()
    assert len(lines) == len(rows) == 3 * 6
    for text, (cell, row) in zip(lines, rows, strict=True):
        assert text.startswith(f"{cell['workload']:<8} {cell['precision']:<9}")
        assert row["loop"] in text
        if "cant" in row:
            assert row["loop"] in PEERS
            assert row["cant"] in text
            continue
        low, high = row["interval"]
        assert low <= row["ratio"] <= high
        assert row["loop"] == "bare" or f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]" in text
        assert text.endswith(row["verdict"])
        assert all(len(cell["seconds"][row["loop"]][name]) == 6 for name in overhead.MEASURES)
    assert told["machine"]["cores"] >= 1
    assert told["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("precision", overhead.PRECISIONS)
def test_the_loop_by_hand_and_train_step_train_the_same_parameters(report, precision):
    (cell,) = [cell for cell in report[1]["cells"] if cell["precision"] == precision]
    # A float32's last place is 6e-8 of the largest parameter: some of it for each of 20 steps.
    assert cell["parity"]["dist_amp"] < 1e-6
    assert cell["parity"][TELEMETRY] < 1e-6
    assert cell["parity"]["bare again"] == 0


def test_a_learning_rate_that_is_one_step_late_is_a_drift():
    setup, path = overhead.build_setup(TINY, World()), []
    data = overhead.steps_of_data(setup)
    assert overhead.follow(bare(setup), data, path) == 0
    optim = replace(setup.config.optim, warmup_steps=setup.config.optim.warmup_steps + 1)
    late = replace(setup, config=replace(setup.config, optim=optim))
    assert overhead.follow(bare(late), data, path) > 1e-5


@pytest.mark.parametrize("precision", overhead.PRECISIONS)
def test_an_ordinary_step_reads_nothing_and_a_logging_step_once(report, precision):
    (cell,) = [cell for cell in report[1]["cells"] if cell["precision"] == precision]
    assert cell["host_reads"]["dist_amp"] == [0]
    # A log step's figures are read a step later.
    assert cell["host_reads"][TELEMETRY] == [1] + [0] * 9


def test_the_median_of_twenty_lies_between_the_sixth_and_the_fifteenth():
    # David & Nagaraja's table of distribution-free intervals: 6 heads or more, 14 or fewer, in 95.9 % of 20 tosses.
    assert median_interval([float(n) for n in range(20, 0, -1)]) == (10.5, 6.0, 15.0)
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (3.5, 1.0, 6.0)  # 96.9 %
    assert median_interval([2.0]) == (2.0, 2.0, 2.0)


def test_a_missed_target_is_told():
    row = {"loop": "dist_amp", "ratio": 0.96, "target": 0.95, "parity": 1e-7, "host_reads": [0], "collectives": None}
    assert verdict(row, 1e-6) == "missed: ratio"
    assert verdict({**row, "ratio": 0.95}, 1e-6) == "met"
    assert verdict({**row, "parity": 1e-5, "host_reads": [1]}, 1e-6) == "missed: ratio, parity, host reads"


def raises(error):
    def make(setup):
        raise error

    return make


def in_float32(setup):
    return bare(overhead.build_setup(Cell("tiny", "fp32", 1, "single"), setup.world))


def unsharded(setup):
    return bare(overhead.build_setup(TINY, setup.world))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (raises(ValueError("No such thing on a CPU. Buy a GPU.\nOr two.")), "can't: No such thing on a CPU"),
        (raises(ModuleNotFoundError("no module")), "not installed: pip install 'dist_amp[bench]'"),
        (in_float32, "can't: trains in float32"),
        (unsharded, "can't: shards nothing"),
    ],
)
def test_what_a_peer_can_not_do_is_told(make, words):
    cell = replace(TINY, strategy="fsdp") if make is unsharded else TINY
    setup = overhead.build_setup(cell, World())
    assert overhead.followed(setup, make, overhead.steps_of_data(setup), [], may_fail=True)[2] == words


def test_a_loop_of_this_project_may_not_fail():
    setup = overhead.build_setup(TINY, World())
    with pytest.raises(ValueError, match="broken"):
        overhead.followed(setup, raises(ValueError("broken")), [], [], may_fail=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["overhaed"], "there is no bench 'overhaed'; did you mean overhead?"),
        (["overhead", "--workloads", "huge"], "invalid choice: 'huge'"),
        (["overhead", "--rounds", "5"], "--rounds 5 must be at least 6"),
        (["overhead", "--ranks", "0"], "--ranks 0 must be at least 1"),
        (["overhead", "--rouns", "6"], "unrecognized arguments: --rouns 6"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(words, said, capsys):
    assert bench(words) == 64
    assert said in capsys.readouterr().err


def test_the_command_alone_lists_the_benches(capsys):
    assert bench([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in BENCHES)


def sharded_cell(world):
    return overhead.measure(world, Cell("tiny", "fp16", 2, "fsdp"), 1)


@pytest.mark.slow
def test_on_shards_the_update_meets_the_other_ranks_once():
    told = on_ranks(2, sharded_cell)[0]
    assert told["collectives"] == {
        UPDATE: 2,
        OUR_UPDATE: 1,
    }  # the textbook: the norm, and the verdict
    assert told["host_reads"][OUR_UPDATE] == [0]
    assert told["parity"][OUR_UPDATE] < 1e-6
    assert told["parity"]["dist_amp"] < 1e-6


@pytest.mark.slow
def test_the_command_starts_its_own_ranks(tmp_path, capfd):
    words = ["--workloads", "tiny", "--precisions", "fp32", "--ranks", "2", "--strategies", "ddp", "--rounds", "6"]
    assert bench(["overhead", *words, "--out", str(tmp_path)]) == 0
    assert "dist_amp, full telemetry" in capfd.readouterr().out
    (cell,) = json.loads((tmp_path / "overhead.json").read_text())["cells"]
    assert cell["parity"]["dist_amp"] < 1e-6
