"""The config of a command line: defaults < TOML files < environment < arguments."""

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_amp.config.features import check_features
from dist_amp.config.suggestions import removal_note, unknown_key_text
from dist_amp.config.task_class import (
    GIVEN,
    args_dataclass,
    args_of,
    check_saved_target,
    find_task,
)
from dist_amp.config.text import leaves
from dist_amp.config.values import Settings, UnknownKey, from_toml, from_words, read
from dist_amp.errors import MASK, ConfigError
from dist_amp.files import present, shipped_folder
from dist_amp.settings import Config, TaskConfig

ALIASES = {"use_amp": "precision.use_amp"}
ENVIRONMENT_PREFIX = "DIST_AMP_"
DEFAULT_TASK = "tasks.causal_lm"  # the feature that contains the default task
# Environment variables of launch scripts, `dist_amp launch` and optional features.
NOT_SETTINGS = {"DIST_AMP_PYTHON", "DIST_AMP_LAUNCHER", "DIST_AMP_CACHE", "DIST_AMP_METADATA"}
NOT_SETTINGS |= {"DIST_AMP_NNODES", "DIST_AMP_FAILED_AT"}


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a command line: defaults < `--config` files < environment < other arguments.

    Raises ConfigError for an unknown key, a value of a wrong type or range, or a missing task.
    """
    settings = collect(argv, environ)
    # With any precision setting, precision.dtype=auto means bf16, even if the CPU emulates it.
    if any(key.startswith("precision.") or key.endswith("_dtype") for key in settings):
        settings.setdefault("precision.dtype", from_toml("bf16", "by default"))
    for key, setting in settings.items():
        if key.startswith("task.args.") and MASK in setting.text:
            raise ConfigError(
                f"{key} {setting.source} is masked, because runs do not save secrets; give it on "
                f"the command line, or as {ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}"
            )
    task = task_in(settings)
    config = config_of(settings, task)
    check_features(config, task)
    return config


def config_of(settings: Settings, task: type) -> Config:
    """The config of these settings for a task's class. Raises ConfigError."""
    task_args = {key: settings[key] for key in settings if f"{key}.".startswith("task.args.")}
    try:
        config: Config = read(
            Config, {key: settings[key] for key in settings if key not in task_args}
        )
        args = read(args_dataclass(task), task_args, "task.args.")
    except UnknownKey as error:
        from dist_amp.config.schema import described, json_schema

        key = str(error)
        sources = [key.split(".")[2] for key in settings if key.startswith("data.sources.")]
        known = list(described(json_schema(task), sources))
        raise ConfigError(unknown_key_text(key, settings[key].source, known)) from None
    return replace(config, task=replace(config.task, args=args))


def load_saved(path: Path, argv: Sequence[str]) -> Config:
    """A saved config, overridden by `argv`. Raises as load_config and check_saved_target."""
    folder = path.parent.resolve()
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    words = [f"--config={path}", *argv]
    target = collect(words).get("task.target")
    if target and target.source == f"in {path}":
        check_saved_target(target.readings[0], folder)
    return load_config(words)


def with_task(config: Config, task: Any) -> Config:
    """The config with this task object's class and arguments, from which commands rebuild it. If
    they are unknown: the config's target if it names such a class, else GIVEN + the class's name.
    """
    if isinstance(task, type):
        name = task.__name__
        raise ConfigError(f"build_run got the class {name} as its task; give an object: {name}()")
    cls: Any = type(task)
    if (args := args_of(task)) is not None:
        return replace(config, task=TaskConfig(f"{cls.__module__}:{cls.__name__}", args))
    target = config.task.target
    if target.endswith(f":{cls.__name__}") and target != TaskConfig.target:
        return config
    return replace(config, task=TaskConfig(f"{GIVEN}{cls.__qualname__}"))


def task_in(settings: Settings) -> type:
    """The class of task.target, or the default; `object` if this project lacks the default."""
    if "task.target" in settings:
        return find_task(str(settings["task.target"].readings[0]))
    return find_task(TaskConfig.target) if present(DEFAULT_TASK) else object


# ---- where settings come from


def collect(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of all sources, where later ones override earlier ones; keys are unchecked."""
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
                f"{word!r} on the command line belongs to no key; write --section.key VALUE"
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
    """The file of a word after --config, which is a path, or a shipped config's name like demo."""
    if "/" in word or word.endswith(".toml") or Path(word).is_file():
        return word
    paths = {path.stem: str(path) for path in shipped_folder().glob("configs/*.toml")}
    if word not in paths:
        raise ConfigError(
            f"--config {word}: neither a file here nor a shipped config; give the path of a TOML "
            f"file, or one of {', '.join(sorted(paths))}"
        )
    return paths[word]


def from_file(path: str) -> Settings:
    """The settings in a TOML file. Raises ConfigError."""
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
        # A run's saved config may come from an earlier release: ignore removed settings.
        if Path(path).name == "config.toml" and (note := removal_note(key)):
            if os.environ.get("RANK", "0") == "0":
                print(f"note: {key} {source}{note}", file=sys.stderr)
            if (key, value) == ("precision.matmul", "fp8"):
                settings["precision.dtype"] = from_toml(value, source)
        else:
            settings[key] = from_toml(value, source)
    return settings
