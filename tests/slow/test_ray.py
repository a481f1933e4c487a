"""launch/ray_train.py: a run by Ray Train ends as one without Ray does, bit for bit."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time

import pytest
from chaos import Process, differences
from forked import ROOT, TESTS

SLOW = """
    --task.target tiny:Slow --train.steps 100 --train.micro_batch_size 2 --metrics.log_every 1
    --checkpoint.every 20 --checkpoint.keep 9
""".split()

NEEDS_RAY = "needs Ray: bash tests/engines.sh installs it"

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """start("--section.key", "value", ...): launch/ray_train.py in an empty folder."""
    home = tempfile.mkdtemp(prefix="ray")  # short: Ray keeps sockets in it
    environ = {"HOME": home, "RAY_TMPDIR": home, "RAY_USAGE_STATS_ENABLED": "0"}
    started = []

    def start(*words, path=""):
        paths = {"PYTHONPATH": f"{path}:{ROOT}:{TESTS}"}
        command = [sys.executable, ROOT / "launch/ray_train.py", *map(str, words)]
        started.append(Process(command, tmp_path, environ | paths))
        return started[-1]

    yield start
    for job in started:
        job.process.kill()
        job.process.wait()
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.engine
def test_a_ray_run_ends_as_one_without_ray_bit_for_bit_also_when_a_worker_is_killed(
    start, launch, tmp_path
):
    pytest.importorskip("ray", reason=NEEDS_RAY)
    for rank in launch.each(2, *SLOW, "--run.dir", "without"):
        assert rank.returncode == 0, rank.stderr

    def check(name):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["stopped_by"], summary["exit_code"]) == ("completed", 0)
        assert (summary["steps"], summary["world_size"]) == (100, 2)
        assert differences(tmp_path / name, tmp_path / "without") == []
        return summary

    job = start(*SLOW, "--run.dir", "by_ray")
    assert job.end() == 0, job.text
    check("by_ray")
    assert job.text.count("done: 100 steps (100 applied, 0 skipped)") == 1, "each line is said once"

    killed = start("--workers", 2, "--restarts", 1, *SLOW, "--run.dir", "killed")
    deadline = time.monotonic() + 600
    while not (tmp_path / "killed/checkpoints/step_00000040").is_dir():
        assert killed.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rank_0 = int((tmp_path / "killed/.lock").read_text().split()[1])  # "process 123 on host"
    os.kill(rank_0, signal.SIGKILL)
    assert killed.end() == 0, killed.text
    assert check("killed")["resumed_from_step"] >= 40


@pytest.mark.bad_input("Ray is missing, or has no room for the number of workers")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--workers 1000000", "error: --workers=1000000 must be between 1 and "),
        ("--train.stps 3", "error: unknown key train.stps on the command line; did you mean"),
        ("--task.target tiny:AlwaysNan --train.max_skips_in_a_row 3", "ended with status 70"),
    ],
)
def test_what_cannot_be_run_and_what_fails_ends_ray_with_status_1(words, told, start):
    pytest.importorskip("ray", reason=NEEDS_RAY)
    job = start(*SLOW, *words.split())
    assert job.end() == 1
    assert told in job.text


def test_without_ray_it_says_how_to_get_it(start, tmp_path):
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")")
    fix = "pip install -c launch/constraints.txt -e '.[ray]' brings Ray Train"
    job = start(*SLOW, path=tmp_path)
    assert (job.end(), job.text) == (1, f"error: No module named 'ray'; {fix}\n")
