"""What every test gets: no stray settings, a home for caches, and this folder on the path of what it launches."""

import os

import pytest
import torch
from forked import ROOT as ROOT
from forked import TESTS as TESTS
from forked import Launch

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
    return Launch(tmp_path)


@pytest.fixture(scope="module")
def one_thread():
    """Two threads that wait for one another on a busy core take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
