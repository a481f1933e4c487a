"""What an experiment is: settings of the main job, how many steps, and which figures others have printed for it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError
from dist_amp.settings import Config

TRAIN, INFERENCE = "train", "inference"
MODES = (TRAIN, INFERENCE)
# What a report needs no files, evaluations or other processes for.
UNDISTURBED = (
    *("--run.dir", "unused", "--run.resume", "never", "--parallel.strategy", "single"),
    *("--eval.every", "off", "--checkpoint.every", "off"),
)


# The tutorials' optimizers, as they leave them: no decay, no schedule, nothing clipped.
PLAIN = {"train.clip_by": "off", "optim.weight_decay": 0, "optim.schedule": "constant"}
SGD = PLAIN | {"optim.name": "sgd", "optim.lr": 0.1, "optim.momentum": 0}
ADAM = PLAIN | {"optim.name": "adamw", "optim.lr": 1e-3, "optim.betas": (0.9, 0.999)}


@dataclass(frozen=True)
class Published:
    """A figure that the tutorial behind an experiment prints, of its own device and loop."""

    mode: str
    precision: str  # see recipes.py
    seconds: float
    peak_mb: float = 0.0  # 0: none is given
    loss: float = 0.0


@dataclass(frozen=True)
class Target:
    """What is expected of one H200, at least: the speed over float32's, and the share of its memory that is saved."""

    mode: str
    precision: str
    speed: float
    saving: float = 0.0
    over: str = "fp32"


@dataclass(frozen=True)
class Experiment:
    """A task and its settings, as words of the main job's command line; it reads them once."""

    name: str
    about: str
    words: Sequence[str]
    batches: Sequence[int] = ()  # other micro-batch sizes to train with
    precisions: Sequence[str] = ()  # besides those of recipes.py that all experiments have
    published: Sequence[Published] = ()
    targets: Sequence[Target] = ()
    environ: Mapping[str, str] = field(default_factory=dict)  # under the words, as in the main job
    draws: bool = False  # whether the task's sample(model) is a picture, its left half what it should look like

    def config(self, *more: str) -> Config:
        """The settings with `more` on top. Errors: ConfigError."""
        return load_config([*self.words, *more, *UNDISTURBED], self.environ)

    def shards(self, *more: str) -> bool:
        """Whether the settings ask for more than one process."""
        asked = load_config([*self.words, *more], self.environ).parallel.strategy
        return asked not in ("auto", "single")

    def reduced(self, settings: Mapping[str, Any], batches: Sequence[int] = ()) -> "Experiment":
        """A form for a CPU: what is published for the full one, and expected of it, says nothing of it."""
        return replace(self, words=words_of(settings), batches=batches, published=(), targets=())


def words_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """{"optim.lr": 0.1, "optim.betas": (0.9, 0.999)} -> ("--optim.lr", "0.1", "--optim.betas", "0.9", "0.999")."""
    words = []
    for name, value in settings.items():
        words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return tuple(words)


def own_experiment(words: Sequence[str]) -> Experiment:
    """The experiment of a user's own settings, with their task. Errors: ConfigError."""
    config = load_config(words)
    if config.train.steps < 2:
        raise ConfigError(f"train.steps={config.train.steps} has no loss curve; use at least 2")
    target = config.task.target
    return Experiment(target.rpartition(":")[2], f"`{target}`, as set.", words, environ=os.environ)
