"""python -m dist_amp.board RUN|FOLDER [OPTIONS]: show a run, or a folder of runs, in TensorBoard.

It prints the address to open in a browser, where the main charts are pinned at the top, and serves
until Ctrl-C. OPTIONS are TensorBoard's, such as --bind_all: see tensorboard --help.

Docs: docs/metrics.md
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn
from urllib.parse import quote, urlencode

from dist_amp.errors import ConfigError
from dist_amp.supervise.command_line import Parser, command, run_folder

PORT = 6006  # TensorBoard's own default

# A single run is coloured by rank, several runs by run: TensorBoard has only seven colours.
COLOURS = r"regex:^(.+)/tensorboard/|(rank\d+)$"


def main_tags(has_tokens: bool) -> list[str]:
    what = "tokens" if has_tokens else "items"
    return [
        "train/loss",
        "eval/loss",
        f"throughput/{what}_per_second",
        "memory/peak_GiB",
        "time/local_seconds",
        "amp/skipped_in_interval",
    ]


def pinned_url(has_tokens: bool, port: int | str = PORT) -> str:
    cards = [{"plugin": "scalars", "tag": tag} for tag in main_tags(has_tokens)]
    query = {
        "pinnedCards": json.dumps(cards, separators=(",", ":")),
        "runColorGroup": COLOURS,
        "smoothing": "0",  # the default, 0.6, hides jumps of the loss scale and skipped steps
    }
    return f"http://localhost:{port}/?{urlencode(query, safe=':,/', quote_via=quote)}#timeseries"


@command()
def main(argv: Sequence[str]) -> NoReturn:
    parser = Parser("python -m dist_amp.board", __doc__)
    parser.add_argument("folder", type=run_folder, metavar="RUN|FOLDER")
    parser.add_argument("--port", default=str(PORT))
    options, words = parser.parse_known_args(argv)
    folder = options.folder
    logs = folder / "tensorboard"
    if not logs.is_dir():
        logs = folder
        if not any(folder.glob("*/tensorboard")):
            raise ConfigError(
                f"{folder} holds no run; give a run's folder, or a folder that contains runs"
            )
    metrics = [*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]
    has_tokens = any("throughput/tokens_per_second" in path.read_text() for path in metrics)
    print(pinned_url(has_tokens, options.port), flush=True)
    command_line = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs)]
    os.execv(sys.executable, [*command_line, "--port", options.port, *words])


if __name__ == "__main__":
    sys.exit(main())
