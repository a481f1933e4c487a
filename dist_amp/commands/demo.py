"""python -m dist_amp.demo [TORCHRUN'S OPTIONS] [--section.key VALUE ...]: train a small GPT on the
source of Python's standard library.

    python -m dist_amp.demo
        on all GPUs, or in two CPU processes: two to three minutes on two cores
    python -m dist_amp.demo --train.steps 50 --precision.dtype fp16

It is dist_amp launch --config demo, with a precision that is native on this machine: emulated bf16
is ten times slower.

Docs: docs/recipes.md
"""

import os
import sys
from collections.abc import Mapping, Sequence

from dist_amp.distributed.signals import end_on_ctrl_c

if __name__ == "__main__":
    end_on_ctrl_c()  # before torch's import, which takes seconds

import torch

from dist_amp.config.help import show_if_asked
from dist_amp.config.load import collect
from dist_amp.distributed.machine import native_precision
from dist_amp.errors import ConfigError
from dist_amp.files import missing, present, shipped_folder
from dist_amp.supervise.command_line import command

PRECISION: dict[str, list[str]] = {
    "bf16": [],
    "fp16": ["--precision.dtype", "fp16"],
    "float32": ["--use_amp", "false"],
}


@command()
def main(argv: Sequence[str]) -> None:
    asks_for_help = {"-h", "--help"} & {*argv}
    if asks_for_help and show_if_asked(argv, "python -m dist_amp.demo", __doc__ or ""):
        return
    if not present("commands.launch"):
        raise ConfigError(f"dist_amp demo: {missing('commands.launch')}")
    config = str(shipped_folder() / "configs/demo.toml")
    words = ["--config", config, *precision_settings(argv), *argv]
    # In place of this process: a CUDA context that it may have made can't be forked by launch.
    os.execv(sys.executable, [sys.executable, "-m", "dist_amp.launch", *words])


def precision_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Settings for the machine's native precision, named on stderr; none if a precision is set."""
    try:
        keys = collect(argv, environ)
    except ConfigError:
        return []  # dist_amp.launch reports it
    if any(key == "use_amp" or key.startswith("precision.") for key in keys):
        return []
    dtype, reason = native_precision("cuda" if torch.cuda.is_available() else "cpu")
    choice = "choose with --precision.dtype bf16|fp16 or --use_amp false"
    print(f"precision  {dtype}: {reason}; {choice}", file=sys.stderr)
    return PRECISION[dtype]


if __name__ == "__main__":
    sys.exit(main())
