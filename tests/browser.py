"""TensorBoard in a real browser: Debian's Chromium, by Playwright. It makes the pictures in
docs/images, too:

python tests/browser.py RUN docs/images/tensorboard.png  # the pinned charts of a run
"""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

from dist_amp.commands.board import pinned_url

CHROMIUM = shutil.which("chromium") or ""
MILLISECONDS = 120_000  # for anything to appear: TensorBoard starts in 5 s on a quiet machine
PINNED = "metrics-pinned-view card-view"


@contextmanager
def tensorboard(logdir, runs=1):
    """TensorBoard's port, once it has loaded so many runs. Ends it afterwards."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
    log = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        address = next(
            found[1] for line in log.stderr if (found := re.search(r" at (http://\S+)", line))
        )
        port = urlsplit(address).port
        deadline = time.monotonic() + MILLISECONDS / 1000
        while len(data(port, "timeseries/tags")["scalars"]["runTagInfo"]) < runs:
            assert time.monotonic() < deadline, f"fewer than {runs} runs of {logdir} are shown"
            time.sleep(0.5)
        yield port
    finally:
        log.terminate()
        log.communicate()


def data(port, path):
    address = f"http://localhost:{port}/data/plugin/{path}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def browser(width=1500, height=1000):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = chromium.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(MILLISECONDS)
        yield page
        chromium.close()


def open_pinned(page, port):
    """Open the address that `dist_amp board` prints, and wait until its six charts are drawn."""
    page.goto(pinned_url(True, port))
    page.locator(f"{PINNED} line-chart canvas").nth(5).wait_for()
    if page.get_by_label("Close side pane").count():
        page.get_by_label("Close side pane").click()
    page.wait_for_function(
        "selector => [...document.querySelectorAll(selector)].every(card => "
        "!card.querySelector('mat-spinner'))",
        arg=PINNED,
    )
    colours = colours_of_runs(page).values()
    deadline = time.monotonic() + MILLISECONDS / 1000
    for chart in page.locator(f"{PINNED} line-chart canvas").all():
        while not any(shows(chart, colour) for colour in colours):
            assert time.monotonic() < deadline, "a chart stays empty"
            page.wait_for_timeout(200)
    page.wait_for_timeout(1000)  # charts move to their places


def shows(element, colour):
    """Whether an element has a pixel of almost a colour (red, green, blue): edges are smoothed."""
    from PIL import Image

    image = Image.open(BytesIO(element.screenshot())).convert("RGB")
    found = (other for _, other in image.getcolors(image.width * image.height))
    return any(max(abs(a - b) for a, b in zip(colour, other, strict=True)) <= 8 for other in found)


def colours_of_runs(page):
    """{run: (red, green, blue)}, as the list of runs shows them."""
    rows = page.evaluate(
        """() => [...document.querySelectorAll('runs-data-table tb-data-table-content-row')].map(
            row => [row.innerText.trim(),
                    getComputedStyle(row.querySelector('.run-color-swatch')).backgroundColor])"""
    )
    return {name: tuple(map(int, re.findall(r"\d+", colour)[:3])) for name, colour in rows}


if __name__ == "__main__":
    run, picture = sys.argv[1:]
    with tensorboard(Path(run) / "tensorboard") as port, browser(1400, 1010) as page:
        open_pinned(page, port)
        page.screenshot(path=picture)
