"""A config from a command line: the sources, and the arguments of the task that they name."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from dist_amp.config import parse as settings
from dist_amp.config import sources
from dist_amp.config.task_class import args_dataclass, find_task
from dist_amp.settings import (
    Config,
    TaskConfig,
)

ALIASES = {"use_amp": "precision.use_amp"}


def schema(target: str) -> type[Config]:
    """Config, with the constructor arguments of the task that `target` names as the fields of task.args."""
    return _schema(target, args_dataclass(find_task(target)))


@cache  # so that two configs of one task are of one type, and compare
def _schema(target: str, args: type) -> type[Config]:
    about_task = [("target", str, field(default=target)), ("args", args, field(default_factory=args))]
    task = make_dataclass("TaskConfig", about_task, bases=(TaskConfig,), frozen=True)
    doc = {"__doc__": Config.__doc__}
    section = ("task", task, field(default_factory=task))
    return make_dataclass("Config", [section], bases=(Config,), frozen=True, namespace=doc)


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a command line, with its `--config` files and the environment under it.

    Errors: ConfigError for what is unknown, mistyped or out of range, and for a task that can't be found.
    """
    given = sources.collect(argv, environ, ALIASES)
    return settings.build(schema(_target(given)), given)


def show_help(argv: Sequence[str], prog: str, description: str) -> str:
    """The text of --help, with the arguments of the task that `argv` names."""
    words = [word for word in argv if word not in ("-h", "--help")]
    return settings.show_help(schema(_target(sources.collect(words, aliases=ALIASES))), prog, description)


def _target(given: sources.Settings) -> str:
    words = given["task.target"].words if "task.target" in given else (TaskConfig.target,)
    return words[0] if words else ""


def defaults_of(config: Config) -> str:
    """The same task's config with nothing set, as TOML; "" where the task has arguments that must be."""
    try:
        return to_toml(type(config)())
    except TypeError:
        return ""


def to_toml(config: Config) -> str:
    """The config as TOML that `--config` reads back."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            inside = {item.name: plain(getattr(value, item.name)) for item in fields(value)}
            return {name: part for name, part in inside.items() if part is not None}  # TOML has no null
        if isinstance(value, tuple | list):
            return [plain(part) for part in value]
        return str(value) if isinstance(value, Path) else value

    return tomli_w.dumps(plain(config))
