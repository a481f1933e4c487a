"""What every test gets: no stray settings, a home for caches, and this folder on the path of what it launches."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Forked

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


class Launch:
    """launch(ranks, "--key", "value", ...): a real run of the main job in a folder.

    ranks=0 is `python -m dist_amp.train`, forked from a process that has its imports (see forked.py) unless fresh=True;
    above that, torchrun. Returns the finished process: returncode, stdout, stderr. `launch.start` returns it while it
    runs. `launch.each` and `launch.start_each` fork the ranks without torchrun, with the variables that every launcher
    sets, and return a list with one entry per rank: a twentieth of torchrun's processor time.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, ranks: int, *args: object, timeout: float = 300, **options) -> subprocess.CompletedProcess:
        return finish(self.start(ranks, *args, **options), timeout)

    def start(self, ranks: int, *args: object, fresh: bool = False, torchrun: tuple[str, ...] = (), **environment: str):
        words, environ = list(map(str, args)), self.environ(environment)
        if ranks == 0 and not fresh:
            return Forked(words, self.folder, environ)
        alone = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", f"--nproc_per_node={ranks}"]
        return subprocess.Popen(
            [sys.executable, *(["-m", *alone, *torchrun] if ranks else []), "-m", "dist_amp.train", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def module(self, module: str, *args: object, timeout: float = 300, **environment: str):
        """`python -m MODULE ARGS`, forked; the module has a main() that returns the exit status."""
        return finish(Forked(list(map(str, args)), self.folder, self.environ(environment), module), timeout)

    def environ(self, more: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{TESTS}", **more}

    def each(self, ranks: int, *args: object, timeout: float = 300, **environment: str):
        started = self.start_each(ranks, *args, **environment)
        try:
            return [finish(process, timeout) for process in started]
        finally:
            for process in started:
                process.kill()

    def start_each(self, ranks: int, *args: object, **environment: str) -> list[Forked]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), **environment}  # fmt: skip
        return [self.start(0, *args, RANK=str(rank), LOCAL_RANK=str(rank), **world) for rank in range(ranks)]


def finish(process, timeout: float) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def launch(tmp_path):
    return Launch(tmp_path)


@pytest.fixture(scope="module")
def one_thread():
    """Two threads that wait for one another on a busy core take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
