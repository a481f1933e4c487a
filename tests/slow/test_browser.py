"""TensorBoard as a user sees it: a real run of two ranks, a real TensorBoard, a real browser."""

import json

import pytest
from browser import (
    CHROMIUM,
    PINNED,
    browser,
    colours_of_runs,
    data,
    open_pinned,
    shows,
    tensorboard,
)
from forked import Launch

from dist_amp.commands.board import main_tags

NEEDS = "needs chromium: bash tests/engines.sh installs it on Debian"
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.skipif(not CHROMIUM, reason=NEEDS)]

RANKS = ["rank00000", "rank00001"]
WORDS = ["--train.steps", "12", "--metrics.log_every", "2", "--eval.every", "6"]
WORDS += ["--eval.batches", "2", "--train.micro_batch_size", "2"]
WORDS += ["--task.args.sample_bytes", "8", "--task.args.context", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run of two ranks, of the demo's model."""
    pytest.importorskip("playwright", reason="needs playwright: bash tests/engines.sh installs it")
    launch = Launch(tmp_path_factory.mktemp("run"))
    for done in launch.each(2, *WORDS, "--run.dir", "run"):
        assert done.returncode == 0, done.stderr
    return launch.folder / "run"


@pytest.fixture(scope="module")
def port(folder):
    with tensorboard(folder / "tensorboard", runs=2) as port:
        yield port


def test_the_watch_lines_address_opens_six_pinned_charts_with_a_line_of_each_rank(port):
    with browser() as page:
        open_pinned(page, port)
        titles = [card.get_attribute("title") for card in page.locator(f"{PINNED} .tag").all()]
        assert titles == main_tags(has_tokens=True)
        colours = colours_of_runs(page)
        assert list(colours) == RANKS
        assert len(set(colours.values())) == 2, "a colour per rank"
        charts = dict(zip(titles, page.locator(f"{PINNED} line-chart canvas").all(), strict=True))
        for title, chart in charts.items():  # equal values hide one another; memory's never do
            seen = [shows(chart, colour) for colour in colours.values()]
            assert all(seen) if title == "memory/peak_GiB" else any(seen), title
        for title in ("throughput/tokens_per_second", "memory/peak_GiB", "time/local_seconds"):
            table = page.locator(f"{PINNED}:has(.tag[title='{title}'])").inner_text()
            assert all(rank in table for rank in RANKS), title


def test_its_data_endpoints_have_every_ranks_tags(port, folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tags = data(port, "timeseries/tags")["scalars"]
    assert sorted(tags["runTagInfo"]) == RANKS
    logged = next(line for line in lines if "train/loss" in line)
    assert set(logged["ranks"][1]) <= set(tags["runTagInfo"][RANKS[1]])
    tags_of_all = set(logged) - {"step", "ranks", "spent_seconds", "unix_time"}
    assert tags_of_all <= set(tags["runTagInfo"][RANKS[0]])
    points = data(port, f"scalars/scalars?run={RANKS[0]}&tag=train/loss")
    assert [(step, value) for _, step, value in points] == [
        (line["step"], pytest.approx(line["train/loss"], rel=1e-6))
        for line in lines
        if "train/loss" in line
    ]
