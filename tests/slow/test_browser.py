"""TensorBoard as a user sees it: a real run of two ranks, a real TensorBoard, a real browser."""

import pytest
from browser import CHROMIUM, PINNED, browser, colours_of_runs, open_pinned, shows, tensorboard

from dist_amp.commands.board import main_tags

NEEDS = "needs chromium: bash tests/engines.sh installs it on Debian"
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.skipif(not CHROMIUM, reason=NEEDS)]

RANKS = ["rank00000", "rank00001"]


def test_the_watch_lines_address_opens_six_pinned_charts_with_a_line_of_each_rank(launch):
    pytest.importorskip("playwright", reason="needs playwright: bash tests/engines.sh installs it")
    words = "--train.steps 12 --metrics.log_every 2 --eval.every 6 --eval.batches 2 --run.dir run"
    words += " --train.micro_batch_size 2 --task.args.sample_bytes 8 --task.args.context 32"
    for done in launch.each(2, *words.split()):  # of the demo's model
        assert done.returncode == 0, done.stderr
    folder = launch.folder / "run/tensorboard"
    with tensorboard(folder, runs=2) as port, browser() as page:
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
