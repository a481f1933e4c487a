"""python -m dist_amp.demo [TORCHRUN'S OPTIONS] [--section.key VALUE ...]: train a small GPT on the
source of Python's standard library.

    python -m dist_amp.demo
        on all GPUs, or in two CPU processes: two to three minutes on two cores
    python -m dist_amp.demo --train.steps 50 --precision.dtype fp16

Short for dist_amp launch --config demo. The run's folder is runs/<UTC time>-<id>, or --run.dir.

Docs: docs/recipes.md
"""

import os
import sys
from collections.abc import Sequence

from dist_amp.config.help import show_if_asked
from dist_amp.errors import ConfigError
from dist_amp.files import missing, present, shipped_folder
from dist_amp.supervise.command_line import command


@command()
def main(argv: Sequence[str]) -> None:
    asks_for_help = {"-h", "--help"} & {*argv}
    if asks_for_help and show_if_asked(argv, "python -m dist_amp.demo", __doc__ or ""):
        return
    if not present("commands.launch"):
        raise ConfigError(f"dist_amp demo: {missing('commands.launch')}")
    config = str(shipped_folder() / "configs/demo.toml")
    os.execv(sys.executable, [sys.executable, "-m", "dist_amp.launch", "--config", config, *argv])


if __name__ == "__main__":
    sys.exit(main())
