"""launch/ray_train.py: a run by Ray Train ends as one without Ray does, bit for bit."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from chaos import differences
from forked import ROOT, TESTS

SLOW = """
    --task.target tiny:Slow --train.steps 100 --train.micro_batch_size 2 --metrics.log_every 1
    --checkpoint.every 20 --checkpoint.keep 9
""".split()

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """start("--section.key", "value", ...): launch/ray_train.py in an empty folder."""
    home = tempfile.mkdtemp(prefix="ray")  # short: Ray keeps sockets in it
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": home, "RAY_TMPDIR": home}
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = []

    def started(*words, path=""):
        environ["PYTHONPATH"] = f"{path}:{ROOT}:{TESTS}"
        command = [sys.executable, ROOT / "launch/ray_train.py", *map(str, words)]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environ, **output))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(home, ignore_errors=True)


def finished(process):
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


@pytest.fixture
def with_ray():
    pytest.importorskip("ray", reason="needs Ray: bash tests/engines.sh installs it")


@pytest.mark.engine
def test_a_ray_run_ends_as_one_without_ray_bit_for_bit_also_when_a_worker_is_killed(
    with_ray, start, launch, tmp_path
):
    for rank in launch.each(2, *SLOW, "--run.dir", "without"):
        assert rank.returncode == 0, rank.stderr

    def check(name):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["stopped_by"], summary["exit_code"]) == ("completed", 0)
        assert (summary["steps"], summary["world_size"]) == (100, 2)
        assert differences(tmp_path / name, tmp_path / "without") == []
        return summary

    status, said = finished(start(*SLOW, "--run.dir", "by_ray"))
    assert status == 0, said
    check("by_ray")
    assert said.count("done: 100 steps (100 applied, 0 skipped)") == 1, "each line is said once"

    killed = start("--workers", 2, "--restarts", 1, *SLOW, "--run.dir", "killed")
    deadline = time.monotonic() + 600
    while not (tmp_path / "killed/checkpoints/step_00000040").is_dir():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rank_0 = int((tmp_path / "killed/.lock").read_text().split()[1])  # "process 123 on host"
    os.kill(rank_0, signal.SIGKILL)
    status, said = finished(killed)
    assert status == 0, said
    assert check("killed")["resumed_from_step"] >= 40


def test_a_failure_of_the_ranks_is_rays_too(with_ray, start, tmp_path):
    words = "--task.target tiny:AlwaysNan --train.max_skips_in_a_row 3 --run.dir run".split()
    status, said = finished(start(*SLOW, *words))
    assert status == 1, said
    assert "error: 3 steps in a row were not finite and were skipped" in said
    assert "dist_amp.train ended with status 70; see the error above or in the run's folder" in said
    assert json.loads((tmp_path / "run/summary.json").read_text())["exit_code"] == 70


@pytest.mark.bad_input("Ray is missing, or has no room for the number of workers")
@pytest.mark.parametrize("workers", [0, 1_000_000])
def test_a_number_of_workers_that_the_cluster_cannot_hold_is_refused(with_ray, start, workers):
    status, said = finished(start("--workers", workers, *SLOW))
    told = rf"error: --workers={workers} must be between 1 and \d+, the [CG]PUs of Ray's cluster"
    assert re.fullmatch(told, said.splitlines()[-1])
    assert status == 1


def test_a_setting_that_is_wrong_is_told_before_ray_starts_anything(with_ray, start):
    said = "error: unknown key train.stps on the command line; did you mean train.steps?\n"
    assert finished(start("--train.stps", 3)) == (1, said)


def test_without_ray_it_says_how_to_get_it(start, tmp_path):
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")")
    fix = "pip install -c launch/constraints.txt -e '.[ray]' brings Ray Train"
    said = f"error: No module named 'ray'; {fix}\n"
    assert finished(start(*SLOW, path=tmp_path)) == (1, said)
