"""A rank slower than the others is named with host, phase and factor; nobody in a clean run."""

import io
import re
from contextlib import redirect_stderr
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import slow_ranks
from ranks import on_ranks

from dist_amp import train
from dist_amp.clock import OWN_PHASES
from dist_amp.diagnostics.slow_ranks import SlowRanks
from dist_amp.telemetry.step_report import INDEX, RANK_METRICS, LogRow


def table(intervals, ranks, seed=0, noise=0.05):
    """[intervals, ranks, phases] seconds per step: 20 ms in each phase, with noise."""
    random = np.random.default_rng(seed)
    return 0.02 * random.lognormal(0, noise, (intervals, ranks, len(OWN_PHASES)))


HOSTS = [f"host{rank}" for rank in range(1000)]


def warned(phases):
    """The warnings of a run whose ranks spend `phases` seconds: [intervals, ranks, phases]."""
    warnings = []
    run = SimpleNamespace(
        world=SimpleNamespace(is_main=True, warn=warnings.append),
        metrics=SimpleNamespace(hosts=HOSTS, write_text=lambda *_: None),
        config=SimpleNamespace(data=SimpleNamespace(workers=2)),
    )
    observer = SlowRanks(run)
    waits = phases.sum(axis=2).max(axis=1)
    for step, (ranks, wait) in enumerate(zip(phases, waits, strict=True)):
        table = np.zeros((len(ranks), len(RANK_METRICS)))
        table[:, INDEX["steps"]] = 1
        table[:, [INDEX[phase] for phase in OWN_PHASES]] = ranks
        table[:, INDEX["communication"]] = wait - ranks.sum(axis=1)
        observer.on_log(LogRow(step, table))
    return warnings


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_a_rank_that_takes_half_as_long_again_is_named_with_phase_and_factor(ranks):
    phases = table(10, ranks)
    phases[:, 1, OWN_PHASES.index("backward")] += 0.05
    (line,) = warned(phases)
    compared = "the median rank" if ranks > 2 else "the other rank"
    found = re.fullmatch(
        rf"rank 1 on host1 takes (.*) times as long as {compared}, not counting waits for other "
        r"ranks: (.*) ms more per step in backward \(up to step \d+\)",
        line,
    )
    # Three standard errors of five intervals, rounded.
    assert float(found[1]) == pytest.approx(1.5, abs=0.15)
    assert float(found[2]) == pytest.approx(50, abs=5)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_nobody_is_named_where_ranks_differ_by_chance_or_in_one_interval(noise):
    assert [warned(table(20, 4, seed, noise)) for seed in range(20)] == [[]] * 20
    phases = table(20, 4, noise=noise)
    phases[7, 2, 0] += 1.0
    assert warned(phases) == []


def test_a_rank_is_named_again_only_after_it_was_as_fast_as_the_others():
    phases = table(80, 4)
    phases[5:25, 2, 0] += 0.1
    phases[27:30, 2, 0] += 0.1  # it stays quiet for ten log steps
    phases[60:, 2, 0] += 0.1
    assert len(warned(phases)) == 2


def test_steps_that_wait_for_data_on_all_ranks_are_warned_of_once():
    phases = table(30, 2, noise=0.01)
    data = OWN_PHASES.index("data")
    phases[:, :, data] += 0.1
    (line,) = warned(phases)
    said = "steps wait for data in 60% of their time (up to step 6): raise data.workers=2, or"
    assert line.startswith(said)
    phases[:, 1, data] -= 0.1
    assert not [line for line in warned(phases) if "wait for data" in line], "of one rank alone"


SLOW = pytest.mark.slow
REST = ("forward", "optimizer", "other")
RUN = ["--train.steps", "40", "--metrics.log_every", "4", "--checkpoint.every", "off"]
RUN += ["--eval.every", "off"]


def said_on_a_clock_of_its_own(world, folder, phase):
    """What a run writes to standard error if nothing takes time but the task's sleep."""
    now = [0.0]

    def advance(seconds):
        now[0] += seconds

    words = ["--task.target", "slow_ranks:SlowRank", "--task.args.phase", phase, *RUN]
    words += ["--task.args.rank", "1", "--parallel.strategy", "ddp", "--run.dir", folder]
    with (
        patch.object(slow_ranks, "sleep", advance),
        patch("time.perf_counter", lambda: now[0]),
        redirect_stderr(io.StringIO()) as stderr,
    ):
        assert train.main(words) == 0
    return stderr.getvalue()


@pytest.mark.bad_input("a rank that is slower than the others by itself")
@pytest.mark.parametrize(
    "phase", ["data", "backward", *(pytest.param(p, marks=SLOW) for p in REST)]
)
def test_the_main_job_names_a_rank_that_takes_twice_as_long(tmp_path, phase):
    said, _ = on_ranks(2, said_on_a_clock_of_its_own, str(tmp_path / "run"), phase)
    (line,) = [line for line in said.splitlines() if "not counting waits for other ranks" in line]
    assert line.startswith("warning: rank 1 on ")
    named = {"data": "data wait", "other": "callbacks and checks"}.get(phase, phase)
    more = f" takes 2.0 times as long as the other rank, .*: 20 ms more per step in {named} "
    assert re.search(more, line), line
