"""The config of a command line: defaults < TOML files < environment < arguments."""

import keyword
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dist_amp.config.features import check_features
from dist_amp.config.parse import Setting, Settings, build, word_of
from dist_amp.config.suggestions import up_to_date, with_dashes
from dist_amp.config.task_class import (
    GIVEN,
    args_dataclass,
    args_of,
    check_saved_target,
    find_task,
)
from dist_amp.config.text import leaves
from dist_amp.errors import MASK, ConfigError, nearest_name
from dist_amp.files import present, shipped_folder
from dist_amp.settings import Config, DataConfig, MixedSourceConfig, TaskConfig

ALIASES = {"use_amp": "precision.use_amp"}
ENVIRONMENT_PREFIX = "DIST_AMP_"
DEFAULT_TASK = "tasks.causal_lm"  # a feature
# Used by the launch scripts, set by `dist_amp launch` for its ranks, and by optional features.
NOT_SETTINGS = {"DIST_AMP_PYTHON", "DIST_AMP_LAUNCHER", "DIST_AMP_CACHE", "DIST_AMP_METADATA"}
NOT_SETTINGS |= {"DIST_AMP_COMMAND", "DIST_AMP_FAILED_AT"}  # of a demo; of a restarted rank
MASKED = re.compile(rf"(^|//|=){re.escape(MASK)}(@|&|$)")


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a command line: defaults < `--config` files < environment < other arguments.

    Errors: ConfigError for an unknown, mistyped or out-of-range key, or a missing task.
    """
    settings = collect(argv, environ)
    for key, setting in settings.items():
        if key.startswith("task.args.") and any(map(MASKED.search, setting.words)):
            raise ConfigError(
                f"{key} {setting.source} is masked, because a run writes no secrets; give it on "
                f"the command line, or as {ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}"
            )
    if any(key.startswith("precision.") or key.endswith("_dtype") for key in settings):
        settings.setdefault("precision.dtype", Setting(("bf16",), "by default"))
    task = task_in(settings)
    config: Config = build(schema(task, source_names(settings)), settings)
    check_features(config, task)
    return config


def load_saved(path: Path, argv: Sequence[str], folder: Path | None = None) -> Config:
    """A run's saved config from `path`, under these settings; folder: that it came in, by default
    the file's. Errors: as `load_config`, and ConfigError for a task that came with it.
    """
    folder = (folder or path.parent).resolve()
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    words = [f"--config={path}", *argv]
    target = collect(words).get("task.target")
    if target and target.source.startswith(f"in {path}"):
        check_saved_target(" ".join(target.words), folder)
    return load_config(words)


@cache
def schema(task: type, sources: tuple[str, ...] = ()) -> type[Config]:
    """Config with the task's arguments in task.args, and these tables in data.sources."""
    tables = _derived(object, "Sources", **dict.fromkeys(sources, MixedSourceConfig))
    task_section = _derived(TaskConfig, "TaskConfig", args=args_dataclass(task))
    data_section = _derived(DataConfig, "DataConfig", sources=tables)
    return _derived(Config, "Config", task=task_section, data=data_section)


def with_task(config: Config, task: Any) -> Config:
    """The config of a run whose task is this object: with its class and arguments, by which
    commands build it again; else as the config names it, or GIVEN and the class's name.

    Errors: ConfigError for a class.
    """
    if isinstance(task, type):
        name = task.__name__
        raise ConfigError(f"build_run got the class {name} as its task; give an object: {name}()")
    cls: Any = type(task)
    args = args_of(task, config.data)
    target = config.task.target
    if args is None and target.endswith(f":{cls.__name__}") and target != TaskConfig.target:
        return config
    if args is None:
        named = TaskConfig(f"{GIVEN}{cls.__qualname__}")
        return Config(**{**vars(config), "task": named})
    named = TaskConfig(f"{cls.__module__}:{cls.__name__}", args)
    return schema(cls)(**{**vars(config), "task": named})


@cache  # so that two configs of one task have the same type and can be compared
def _derived(base: type, name: str, **parts: type) -> Any:
    """A dataclass with other dataclasses as some of its fields; objects of it can be pickled."""

    def reduce(self: Any) -> Any:
        return _restored, (base, name, [*parts], vars(self))

    items = [(key, part, field(default_factory=part)) for key, part in parts.items()]
    about = {"__doc__": base.__doc__, "__reduce__": reduce}
    return make_dataclass(name, items, bases=(base,), frozen=True, namespace=about)


def _restored(base: type, name: str, parts: Sequence[str], values: Mapping[str, Any]) -> Any:
    types: Any = {part: type(values[part]) for part in parts}
    return _derived(base, name, **types)(**values)


def target_in(settings: Settings) -> str:
    """The task that the settings name."""
    if "task.target" in settings:
        return " ".join(settings["task.target"].words)
    return TaskConfig.target


def task_in(settings: Settings) -> type:
    """The class that the settings name; `object` where the default is not in this project."""
    if "task.target" in settings or present(DEFAULT_TASK):
        return find_task(target_in(settings))
    return object


def source_names(settings: Settings) -> tuple[str, ...]:
    """The names of the mixture's sources. Errors: ConfigError for one that can't be a name."""
    names = []
    for key, setting in settings.items():
        if key.startswith("data.sources."):
            name = key.split(".")[2]
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ConfigError(
                    f"{key} {setting.source}: {name!r} can't name a source; use letters, digits "
                    "and _, as in data.sources.wiki.path"
                )
            names.append(name)
    return tuple(dict.fromkeys(names))


def collect(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of all sources, later ones over earlier ones; keys are not checked yet."""
    command_line, paths = _from_command_line(argv)
    settings: Settings = {}
    for path in paths:
        settings |= from_file(path_of(path))
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            settings[key] = Setting((value,), f"in the environment as {name}", unsplit=True)
    settings |= command_line
    return up_to_date(settings)


def _from_command_line(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """(settings, config files) from `--key value ...` and `--key=value`."""
    given: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            given.append((ALIASES.get(key, key), []))
            if equals:
                given[-1][1].append(value)
        elif given:
            given[-1][1].append(word)
        else:
            hint = with_dashes(argv) or f"write --section.key {word}"
            raise ConfigError(f"{word!r} on the command line belongs to no key; {hint}")
    settings: dict[str, Setting] = {}
    paths: list[str] = []
    for key, words in given:
        if key != "config":
            settings[key] = Setting(tuple(words), "on the command line")
        elif words:
            paths += map(os.path.expanduser, words)
        else:
            raise ConfigError("--config names no file; give the path of a TOML file")
    return settings, paths


def path_of(word: str) -> str:
    """The file that a word after --config names: its path, or a shipped config's name, as demo.

    Errors: ConfigError for a name that none has.
    """
    if "/" in word or word.endswith(".toml") or Path(word).is_file():
        return word
    folder = shipped_folder() / "configs"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if word in names:
        return str(folder / f"{word}.toml")
    hint = ""
    if near := nearest_name(word, names):
        hint = f"did you mean {near}? "
    raise ConfigError(
        f"--config {word}: neither a file here nor a shipped config; {hint}give the path of a TOML "
        f"file, or one of {', '.join(names)}"
    )


def from_file(path: str) -> Settings:
    """{key: its setting} of a TOML file. Errors: ConfigError."""
    try:
        # With a line break, so that an error in the last line has a line number too.
        text = Path(path).read_text(encoding="utf-8") + "\n"
        values = dict(leaves(tomllib.loads(text)))
        lines = line_numbers(text)
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; give the path of a TOML file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}; fix that line") from None
    settings = {}
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        settings[key] = Setting(tuple(map(word_of, items)), f"in {path}, line {lines[key]}")
    return settings


def line_numbers(toml: str) -> dict[str, int]:
    """{dotted key: the line on which it is set} of valid TOML."""
    lines: dict[str, int] = {}
    header = statement = ""
    begin = 1
    for number, line in enumerate(toml.split("\n"), start=1):
        statement += f"{line}\n"
        with suppress(tomllib.TOMLDecodeError):  # a value that goes on in the next line
            if statement.lstrip().startswith("["):
                header, statement = statement, ""
            table = tomllib.loads(header + statement)
            lines |= dict.fromkeys(dict(leaves(table)), begin)
            begin = number + 1
            statement = ""
    return lines
