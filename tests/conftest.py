"""What every test gets, and the choice of a sample of the slow tests."""

import hashlib
import logging
import os
import shlex
import sys

import pytest
import tiny  # noqa: F401
import torch
from forked import FOLDERS, Launch
from forked import ROOT as ROOT
from forked import TESTS as TESTS

from dist_amp.files import present

sys.path += map(str, FOLDERS)


def needs(feature: str) -> pytest.MarkDecorator:
    """For a test's row that needs a file, such as "optimizers.muon", which a project may lack."""
    return pytest.mark.skipif(not present(feature), reason=f"needs {feature}")


# Two threads that wait for each other on a busy core take ten times as long.
torch.set_num_threads(1)

# Need tests/engines.sh. DIST_AMP_ENGINES=required, as in .ci/run: a skip is a failure.
ENGINES = {
    *("test_browser", "test_container", "test_follow_trackers", "test_kubernetes", "test_launch"),
    *("test_optim", "test_ray", "test_site", "test_slurm", "test_sources_s3", "test_uv"),
}
REQUIRED = os.environ.get("DIST_AMP_ENGINES") == "required"


def pytest_addoption(parser):
    group = parser.getgroup("slow tests")
    group.addoption(
        "--slow-sample",
        type=float,
        metavar="N",
        help="with -m slow: run N of the slow tests (below 1: that share), and all marked `engine`",
    )
    group.addoption(
        "--slow-seed",
        default="",
        metavar="TEXT",
        help="what chooses them: a commit's hash, for instance",
    )


def sample_of(tests, amount, seed):
    """`amount` of the tests (below 1: that share), those whose hash with the seed is lowest."""
    count = round(amount * len(tests)) if amount < 1 else int(amount)
    by_hash = sorted(tests, key=lambda test: hashlib.sha256(f"{seed} {test}".encode()).digest())
    return by_hash[:count]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    amount = config.getoption("slow_sample")
    if amount is None:
        return
    slow = [
        item.nodeid
        for item in items
        if item.get_closest_marker("slow") and not item.get_closest_marker("engine")
    ]
    left_out = set(slow) - set(sample_of(slow, amount, config.getoption("slow_seed")))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_report_collectionfinish(config, items):
    if (amount := config.getoption("slow_sample")) is None:
        return []
    seed = shlex.quote(config.getoption("slow_seed"))
    again = f"bash launch/test.sh -m slow --slow-sample {amount:g} --slow-seed {seed}"
    lines = [
        f"{len(items)} tests, chosen by: {again}",
        "one of them again: bash launch/test.sh -m slow NAME",
    ]
    return [*lines, *(f"  {shlex.quote(item.nodeid)}" for item in items)]


def pytest_runtest_protocol(item):
    # A test before it may have left another number, with which sums round differently.
    torch.set_num_threads(1)


def pytest_runtest_setup():
    os.environ.pop("DIST_AMP_ENGINES", None)  # it is no setting of what the tests launch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if REQUIRED and report.skipped and item.path.stem in ENGINES:
        report.outcome = "failed"
        report.longrepr = f"DIST_AMP_ENGINES=required, and skipped: {report.longrepr[2]}"
    return report


@pytest.fixture
def say(record_property):
    """say(line): shown at the end of the test run, also by pytest-xdist's workers."""
    return lambda line: record_property("said", line)


def pytest_terminal_summary(terminalreporter):
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        lines = [line for name, line in getattr(report, "user_properties", []) if name == "said"]
        if lines and report.when == "call":
            terminalreporter.write_line("\n  ".join([f"{report.nodeid}:", *lines]))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("DIST_AMP_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def fresh_log():
    """A main job that ran in this process has set up the log of its rank."""
    logging.disable(logging.NOTSET)  # as the benchmarks leave it
    log = logging.getLogger("dist_amp")
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


@pytest.fixture
def launch(tmp_path):
    return Launch(tmp_path)
