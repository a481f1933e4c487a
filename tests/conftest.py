"""Fixtures, the shares of the slow tests, and what a failed test and the end of a run show."""

import logging
import os
import shlex
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
import tiny  # noqa: F401
import torch
from forked import FOLDERS, PRELOADED, Launch, context
from forked import ROOT as ROOT
from forked import TESTS as TESTS

from dist_amp.files import present

sys.path += map(str, FOLDERS)

# .ci/run runs one share of the slow tests per landing: each test within ten.
SHARES = 10
# New interpreters that the default tests should start at most: one costs 3 to 15 s of processor
# time. Not met yet, so it is only printed.
MOST_LAUNCHED = 15
DEFAULT_MARKS = "not slow and not gpu"  # as in pyproject.toml
launched: list[str] = []


def needs(feature: str) -> pytest.MarkDecorator:
    """For a test's row that needs a file, such as "optimizers.muon", which a project may lack."""
    return pytest.mark.skipif(not present(feature), reason=f"needs {feature}")


# Two threads that wait for each other on a busy core take ten times as long.
torch.set_num_threads(1)

# Need tests/engines.sh. DIST_AMP_ENGINES=required, as in .ci/run: a skip is a failure.
ENGINES = {
    *("test_browser", "test_container", "test_follow_trackers", "test_kubernetes", "test_launch"),
    *("test_optim", "test_ray", "test_site", "test_sources_s3", "test_uv"),
}
REQUIRED = os.environ.get("DIST_AMP_ENGINES") == "required"


def pytest_addoption(parser):
    parser.addoption(
        "--slow-share",
        metavar="N",
        type=int,
        help=f"with -m slow: share N (modulo {SHARES}) of {SHARES}, and all marked `engine`",
    )


def share_of(test: str) -> int:
    """The share of the slow tests that a test is in: 0 to SHARES - 1, whatever tests there are."""
    return zlib.crc32(test.encode()) % SHARES


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if (share := config.getoption("slow_share")) is None:
        return
    left_out = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and not item.get_closest_marker("engine")
        and share_of(item.nodeid) != share % SHARES
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_collectionfinish(config, items):
    if (share := config.getoption("slow_share")) is None:
        return []
    return [
        f"{len(items)} tests, chosen by: bash launch/test.sh -m slow --slow-share {share}",
        "one of them again: bash launch/test.sh -m slow NAME",
        *(f"  {shlex.quote(item.nodeid)}" for item in items),
    ]


def pytest_runtest_protocol(item):
    # A test before it may have left another number, with which sums round differently.
    torch.set_num_threads(1)
    # A run with loader workers sets other modules: a server that starts after it would have none of
    # these, and each fork would import torch again.
    context.set_forkserver_preload(PRELOADED)


def count_interpreters(event: str, args: tuple) -> None:
    """An audit hook that notes each Python process that a test starts; forks are not counted."""
    if event == "subprocess.Popen":
        executable, words, *_ = args
        program = Path(os.fsdecode(executable or words[0])).name
        if program.startswith(("python", "dist_amp", "torchrun")):
            launched.append(os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0])


sys.addaudithook(count_interpreters)


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):  # one of pytest-xdist's processes
        config.workeroutput["launched"] = launched


def selected(config: pytest.Config) -> bool:
    """Whether the command line chooses tests; otherwise the run is the default one."""
    chosen = config.option.keyword or config.args_source is not config.ArgsSource.TESTPATHS
    return bool(chosen) or config.option.markexpr != DEFAULT_MARKS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    launched.extend(getattr(node, "workeroutput", {}).get("launched", []))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and (launch := item.funcargs.get("launch")):
        report.sections += [(f"output of {run}", text) for run, text in launch.outputs()]
    if REQUIRED and report.skipped and item.path.stem in ENGINES:
        report.outcome = "failed"
        report.longrepr = f"DIST_AMP_ENGINES=required, and skipped: {report.longrepr[2]}"
    return report


@pytest.fixture
def say(record_property):
    """say(line): shown at the end of the test run, also by pytest-xdist's workers."""
    return lambda line: record_property("said", line)


def pytest_terminal_summary(terminalreporter, config):
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        lines = [line for name, line in getattr(report, "user_properties", []) if name == "said"]
        if lines and report.when == "call":
            terminalreporter.write_line("\n  ".join([f"{report.nodeid}:", *lines]))
    if not selected(config):
        counts = Counter(launched).most_common(5)
        most = ", ".join(f"{count} by {test}" for test, count in counts)
        line = f"{len(launched)} Python processes launched; the budget is {MOST_LAUNCHED}"
        terminalreporter.write_line(f"{line}; most: {most}")


def remove_settings():
    for name in list(os.environ):
        if name.startswith("DIST_AMP_"):
            del os.environ[name]


@pytest.fixture(autouse=True, scope="module")
def clean_environment_of_fixtures():
    """No setting of the shell reaches what a module's fixtures launch."""
    remove_settings()


@pytest.fixture(autouse=True)
def clean_environment():
    remove_settings()  # a test before it may have set one


@pytest.fixture(autouse=True)
def fresh_log():
    """A main job that ran in this process has set up the log of its rank."""
    logging.disable(logging.NOTSET)  # as the benchmarks leave it
    log = logging.getLogger("dist_amp")
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


@pytest.fixture
def own_cache(monkeypatch, tmp_path_factory):
    """An empty cache of `datasets`; the folder in which it has tokens."""
    import datasets

    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    return folder / "dist-amp/tokens"


@pytest.fixture
def launch(tmp_path):
    return Launch(tmp_path)
