"""Shared by export and sample: a trained model from a path on the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from dist_amp.checkpoint.format import CONFIG
from dist_amp.checkpoint.resume import checkpoints_at, newest_valid
from dist_amp.commands.command_line import Parser
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.meta import build_whole
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import Config
from dist_amp.task import Task
from dist_amp.world import World

MODEL = "model.safetensors"


class PathParser(Parser):
    """Parses a path, the command's own options, and config settings. Errors: ConfigError, ending with the usage."""

    def __init__(self, prog: str, usage: str, description: str | None):
        super().__init__(prog, description)
        self.usage = f"{prog} {usage}"

        self.add_argument(
            "--weights",
            default="auto",
            choices=("auto", "model"),
            help="auto: the moving average where the checkpoint has one (optim.ema); model: the parameters themselves",
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.format_usage().strip()}")

    def read(self, argv: Sequence[str]) -> tuple[Path, argparse.Namespace, list[str]]:
        """(path, own options, settings). The path comes first, because a setting takes all values that follow it."""
        options, rest = self.parse_known_args(argv)
        if not rest or rest[0].startswith("-"):
            self.error(f"the path must come before {rest[0]}" if rest else "no path is given")
        if rest[1:] and not rest[1].startswith("--"):
            self.error(f"{rest[1]!r} belongs to no key")
        return Path(rest[0]), options, rest[1:]


def find_checkpoint(path: Path, accepted: str = "a run's folder or RUN/checkpoints/step_N") -> Path:
    """The checkpoint at `path`, or the newest valid one of the run there; every file's hash is verified.

    Errors: DataError if there is none or none is valid, naming what is `accepted`.
    """
    valid = newest_valid(checkpoints_at(path, str(path), accepted), World())
    assert valid is not None  # newest_valid raises if none of the paths is valid
    return valid


def load_config_of(folder: Path, settings: Sequence[str]) -> Config:
    """The config of a checkpoint or an export, overridden by settings as on the command line."""
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder} has no {CONFIG}; export it again, or copy it from the run")
    try:
        return load_config([f"--config={folder / CONFIG}", *settings])
    except ConfigError as error:
        no_task = str(error).startswith("task.target=")
        hint = f"; {folder} needs its task: start in the run's working directory, or give --task.target"
        raise ConfigError(f"{error}{hint if no_task else ''}") from error


def build_model(task: Task, config: Config) -> nn.Module:
    """The task's model in evaluation mode, for a checkpoint's weights; seeded as in the run, for what is not saved."""
    seed_all(config.run.seed)
    return build_whole(task, torch.device("cpu"), resumes=True).eval()
