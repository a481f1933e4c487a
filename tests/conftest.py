"""What every test gets: no stray settings, a home for caches, and this folder on the path of what it launches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ENGINES = {"test_container", "test_kubernetes", "test_launch", "test_ray", "test_slurm"}
"""What runs the files of launch/. DIST_AMP_ENGINES=required, as .ci/run sets it: a skipped test in these has failed."""
REQUIRED = os.environ.pop("DIST_AMP_ENGINES", "") == "required"  # it is no setting of what the tests launch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if REQUIRED and report.skipped and item.path.stem in ENGINES:
        report.outcome, report.longrepr = "failed", f"DIST_AMP_ENGINES=required, and skipped: {report.longrepr[2]}"
    return report


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("DIST_AMP_"):
            monkeypatch.delenv(name)


@pytest.fixture
def launch(tmp_path):
    """launch(ranks, "--key", "value", ...): a real run of the main job in an empty folder.

    ranks=0 is `python -m dist_amp.train`; above that, torchrun. Returns the finished process: returncode, stdout,
    stderr; `launch.start` returns it while it runs.
    """

    def command(ranks: int, *args: str, torchrun: tuple[str, ...] = ()) -> list[str]:
        job = ["-m", "dist_amp.train", *map(str, args)]
        if ranks == 0:
            return [sys.executable, *job]
        alone = ["--standalone", "--local-addr", "127.0.0.1", f"--nproc_per_node={ranks}"]
        return [sys.executable, "-m", "torch.distributed.run", *alone, *torchrun, *job]

    def start(ranks: int, *args: str, torchrun: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            command(ranks, *args, torchrun=torchrun),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{TESTS}", **environment},
        )

    def run(ranks: int, *args: str, timeout: float = 120, **options) -> subprocess.CompletedProcess:
        process = start(ranks, *args, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    run.start = start
    return run


@pytest.fixture(scope="module")
def one_thread():
    """Two threads that wait for one another on a busy core take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
