"""The config of a command line: all sources, and the arguments of the task that they name."""

import keyword
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from dist_amp.config import parse
from dist_amp.config.sources import Settings, collect
from dist_amp.config.task_class import args_dataclass, find_task
from dist_amp.errors import ConfigError
from dist_amp.runtime.process import quiet_on_closed_pipe
from dist_amp.settings import Config, DataConfig, MixedSourceConfig, TaskConfig

_SOURCES = "data.sources."
ALIASES = {"use_amp": "precision.use_amp"}

EXAMPLES = """\
examples:
  dist_amp train --config configs/sinusoid.toml                     one process
  dist_amp launch --task.target my_file:MyTask --run.dir runs/mine  all GPUs, or two CPU processes
  dist_amp train --help optim                                       one section of the settings below"""


def schema(target: str, sources: tuple[str, ...] = ()) -> type[Config]:
    """Config with the constructor arguments of the task that `target` names as the fields of task.args.

    sources: the names of the tables in data.sources.
    """
    return _schema(target, args_dataclass(find_task(target)), sources)


@cache  # so that two configs of one task have the same type and can be compared
def _schema(target: str, args: type, sources: tuple[str, ...]) -> type[Config]:
    task_fields = [("target", str, field(default=target)), ("args", args, field(default_factory=args))]
    task = make_dataclass("TaskConfig", task_fields, bases=(TaskConfig,), frozen=True)
    tables = [(name, MixedSourceConfig, field(default_factory=MixedSourceConfig)) for name in sources]
    mixture = make_dataclass("Sources", tables, frozen=True)
    data_fields = [("sources", mixture, field(default_factory=mixture))]
    data = make_dataclass("DataConfig", data_fields, bases=(DataConfig,), frozen=True)
    sections = [("task", task, field(default_factory=task)), ("data", data, field(default_factory=data))]
    return make_dataclass("Config", sections, bases=(Config,), frozen=True, namespace={"__doc__": Config.__doc__})


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a command line: defaults < its `--config` files < environment < its other arguments.

    Errors: ConfigError for an unknown, mistyped or out-of-range key, and for a task that can't be found.
    """
    settings = collect(argv, environ, ALIASES)
    return parse.build(schema(_named(settings), _sources(settings)), settings)


def show_if_asked(argv: Sequence[str], prog: str, description: str) -> bool:
    """Print what --help [SECTION] (with the arguments of the task that `argv` names) or --print_config asks for.

    Returns whether one was there. Errors: ConfigError for a section that is not there.
    """
    words, asked, section = _without_questions(argv)
    if not asked:
        return False
    with quiet_on_closed_pipe():
        if "help" in asked:
            about = "" if section else f"{EXAMPLES}\n\n{description.strip()}"
            settings = collect(words, aliases=ALIASES)
            keys = schema(_named(settings), _sources(settings) or ("NAME",))  # a table to show what one can have
            print(parse.show_help(keys, prog, about, section))
        else:
            print(to_toml(load_config(words)), end="")
    return True


def _without_questions(argv: Sequence[str]) -> tuple[list[str], set[str], str]:
    """(the other words, which of help and print_config are asked for, the section after --help or "")."""
    names = {"_h": "help", "__help": "help", "__print_config": "print_config"}
    words, asked, section = [], set(), ""
    for before, word in zip(("", *argv), argv, strict=False):
        if (name := names.get(word.replace("-", "_"))) is not None:
            asked.add(name)
        elif names.get(before.replace("-", "_")) == "help" and not word.startswith("-"):
            section = word
        else:
            words.append(word)
    return words, asked, section


def target_of(words: Sequence[str]) -> str:
    """The task that a command line names."""
    return _named(collect(words, aliases=ALIASES))


def _named(settings: Settings) -> str:
    words = settings["task.target"].words if "task.target" in settings else (TaskConfig.target,)
    return words[0] if words else ""


def _sources(settings: Settings) -> tuple[str, ...]:
    """The names of the mixture's sources. Errors: ConfigError for one that is no name."""
    found = {key: key.removeprefix(_SOURCES).partition(".")[0] for key in settings if key.startswith(_SOURCES)}
    for key, name in found.items():
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigError(
                f"{key} {settings[key].source}: {name!r} can't name a source; use letters, digits and _, as in "
                "data.sources.wiki.path"
            )
    return tuple(dict.fromkeys(found.values()))


def defaults_of(config: Config) -> str:
    """The same task's default config, as TOML; "" if the task has required arguments."""
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
