"""The config of a command line: defaults < TOML files < environment < arguments."""

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dist_amp.config.features import check_features
from dist_amp.config.suggestions import removed, unknown, with_dashes
from dist_amp.config.task_class import (
    GIVEN,
    args_dataclass,
    args_of,
    check_saved_target,
    find_task,
)
from dist_amp.config.text import leaves
from dist_amp.config.values import Settings, UnknownKey, from_toml, from_words, read
from dist_amp.errors import MASK, ConfigError, nearest_name
from dist_amp.files import present, shipped_folder
from dist_amp.settings import Config, TaskConfig

ALIASES = {"use_amp": "precision.use_amp"}
ENVIRONMENT_PREFIX = "DIST_AMP_"
DEFAULT_TASK = "tasks.causal_lm"  # a feature
# Used by the launch scripts, set by `dist_amp launch` for its ranks, and by optional features.
NOT_SETTINGS = {"DIST_AMP_PYTHON", "DIST_AMP_LAUNCHER", "DIST_AMP_CACHE", "DIST_AMP_METADATA"}
NOT_SETTINGS |= {"DIST_AMP_NNODES", "DIST_AMP_COMMAND", "DIST_AMP_FAILED_AT"}


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a command line: defaults < `--config` files < environment < other arguments.

    Errors: ConfigError for an unknown, mistyped or out-of-range key, or a missing task.
    """
    settings = collect(argv, environ)
    for key, setting in settings.items():
        if key.startswith("task.args.") and MASK in setting.text:
            raise ConfigError(
                f"{key} {setting.source} is masked, because a run writes no secrets; give it on "
                f"the command line, or as {ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}"
            )
    if any(key.startswith("precision.") or key.endswith("_dtype") for key in settings):
        settings.setdefault("precision.dtype", from_toml("bf16", "by default"))
    task = task_in(settings)
    config = config_of(settings, task)
    check_features(config, task)
    return config


def config_of(settings: Settings, task: type) -> Config:
    """The config of these settings for a task's class. Errors: ConfigError."""
    for key, setting in settings.items():
        if key.startswith("data.sources.") and not (name := key.split(".")[2]).isidentifier():
            raise ConfigError(
                f"{key} {setting.source}: {name!r} can't name a source; use letters, digits and _, "
                "as in data.sources.wiki.path"
            )
    of_task = {key: settings[key] for key in settings if f"{key}.".startswith("task.args.")}
    try:
        config: Config = read(
            Config, {key: settings[key] for key in settings if key not in of_task}
        )
        args = read(args_dataclass(task), of_task, "task.args.")
    except UnknownKey as error:
        from dist_amp.config.schema import described, json_schema

        key = str(error)
        sources = [key.split(".")[2] for key in settings if key.startswith("data.sources.")]
        known = list(described(json_schema(task), sources))
        raise ConfigError(unknown(key, settings[key].source, known)) from None
    return replace(config, task=replace(config.task, args=args))


def load_saved(path: Path, argv: Sequence[str], folder: Path | None = None) -> Config:
    """A run's saved config from `path`, under these settings; folder: that it came in, by default
    the file's. Errors: as `load_config`, and ConfigError for a task that came with it.
    """
    folder = (folder or path.parent).resolve()
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    words = [f"--config={path}", *argv]
    target = collect(words).get("task.target")
    if target and target.source == f"in {path}":
        check_saved_target(target.readings[0], folder)
    return load_config(words)


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
        return replace(config, task=TaskConfig(f"{GIVEN}{cls.__qualname__}"))
    return replace(config, task=TaskConfig(f"{cls.__module__}:{cls.__name__}", args))


def target_in(settings: Settings) -> str:
    """The task that the settings name."""
    if "task.target" in settings:
        return str(settings["task.target"].readings[0])
    return TaskConfig.target


def task_in(settings: Settings) -> type:
    """The class that the settings name; `object` where the default is not in this project."""
    if "task.target" in settings or present(DEFAULT_TASK):
        return find_task(target_in(settings))
    return object


# ---- where settings come from


def collect(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of all sources, later ones over earlier ones; keys are not checked yet."""
    arguments: list[tuple[str, list[str]]] = []  # (key, the words after it)
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            arguments.append((ALIASES.get(key, key), [value] if equals else []))
        elif arguments:
            arguments[-1][1].append(word)
        else:
            raise ConfigError(
                f"{word!r} on the command line belongs to no key; {with_dashes(argv)}"
            )
    settings: Settings = {}
    for key, words in arguments:
        if key == "config" and not words:
            raise ConfigError("--config names no file; give the path of a TOML file")
        for word in words if key == "config" else ():
            settings |= from_file(path_of(os.path.expanduser(word)))
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            settings[key] = from_words([value], f"in the environment as {name}", split=True)
    for key, words in arguments:
        if key != "config":
            settings[key] = from_words(words, "on the command line")
    return settings


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
    near = nearest_name(word, names)
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(
        f"--config {word}: neither a file here nor a shipped config; {hint}give the path of a TOML "
        f"file, or one of {', '.join(names)}"
    )


def from_file(path: str) -> Settings:
    """{key: its setting} of a TOML file. Errors: ConfigError."""
    try:
        values = dict(leaves(tomllib.loads(Path(path).read_text(encoding="utf-8"))))
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; give the path of a TOML file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}; fix that line") from None
    source = f"in {path}"
    settings = {}
    for key, value in values.items():
        # The config of a run may be of an earlier release.
        if Path(path).name == "config.toml" and (text := removed(key)):
            say_once(f"{key} {source}{text}")
            if (key, value) == ("precision.matmul", "fp8"):
                settings["precision.dtype"] = from_toml(value, source)
        else:
            settings[key] = from_toml(value, source)
    return settings


@cache
def say_once(text: str) -> None:
    """Print a note on the first rank, once however often a command reads its settings."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr)
