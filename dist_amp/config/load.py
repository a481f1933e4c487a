"""The config of a command line: defaults < TOML files < environment < arguments."""

import keyword
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dist_amp.config.parse import Setting, Settings, build
from dist_amp.config.task_class import args_dataclass, find_task
from dist_amp.errors import ConfigError
from dist_amp.settings import Config, DataConfig, MixedSourceConfig, TaskConfig

ALIASES = {"use_amp": "precision.use_amp"}

# Settings of earlier releases, and what to do now.
REMOVED = {
    "data.revision": "append it to data.name, as user/name@REVISION",
    "data.validation_fraction": "set data.validation_split to it",
    "data.mix_by": "the weights of a mixture count rows; remove it",
    "data.map_up_to_gib": "set data.view=parquet, or data.view=map",
    "data.shuffle_groups": "the rows of two row groups are shuffled together; remove it",
    "precision.scaler.min_scale": "a run ends if its loss scale falls below 1; remove it",
    "compile.backend": "set compile.mode=aot_eager or eager to generate no code, or remove it",
    "compile.fullgraph": "graph breaks are reported and allowed; remove it",
    "compile.dynamic": "set compile.blocks=dynamic, or remove it",
    "train.gc_every": "garbage is collected every 50 steps; remove it",
    "optim.decay_ratio": "wsd decays in the last fifth; a task's schedule(step) can differ",
    "debug.ranks": "debug.profile records all ranks; remove it",
    "debug.check_every": "ranks are compared every 100 steps; remove it",
    "debug.memory_snapshot": "debug.profile records GPU memory too; set debug.profile=1",
}
OLD_VALUES = {("checkpoint.on_failure", "go_on"): "continue"}

ENVIRONMENT_PREFIX = "DIST_AMP_"
# Used by the launch scripts, and set by `dist_amp launch` for its ranks.
NOT_SETTINGS = ("DIST_AMP_PYTHON", "DIST_AMP_LAUNCHER")


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a command line: defaults < `--config` files < environment < other arguments.

    Errors: ConfigError for an unknown, mistyped or out-of-range key, and for a task that can't be
    found.
    """
    settings = collect(argv, environ)
    for key, setting in settings.items():
        fix = REMOVED.get(_as_single_source(key))
        if fix:
            raise ConfigError(f"{key} {setting.source} is no longer a setting: {fix}")
    return build(schema(target_in(settings), source_names(settings)), settings)


def schema(target: str, sources: tuple[str, ...] = ()) -> type[Config]:
    """Config with the task's constructor arguments as the fields of task.args.

    target: names the task. sources: the names of the tables in data.sources.
    """
    return _schema(target, args_dataclass(find_task(target)), sources)


@cache  # so that two configs of one task have the same type and can be compared
def _schema(target: str, args: type, sources: tuple[str, ...]) -> type[Config]:
    tables = _derived(object, "Sources", dict.fromkeys(sources, MixedSourceConfig))
    sections = {
        "task": _derived(TaskConfig, "TaskConfig", {"args": args}, target=target),
        "data": _derived(DataConfig, "DataConfig", {"sources": tables}),
    }
    return _derived(Config, "Config", sections)


def _derived(base: type, name: str, parts: Mapping[str, type], **values: str) -> Any:
    """A dataclass with other dataclasses as some of its fields, and other defaults for texts."""
    items = [(key, part, field(default_factory=part)) for key, part in parts.items()]
    items += [(key, str, field(default=value)) for key, value in values.items()]
    about = {"__doc__": base.__doc__}
    return make_dataclass(name, items, bases=(base,), frozen=True, namespace=about)


def target_of(words: Sequence[str]) -> str:
    """The task that a command line names."""
    return target_in(collect(words))


def target_in(settings: Settings) -> str:
    words: tuple[str, ...] = (TaskConfig.target,)
    if "task.target" in settings:
        words = settings["task.target"].words
    return " ".join(words[:1])


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


def defaults_of(config: Config) -> str:
    """The same task's default config, as TOML; "" if the task has required arguments."""
    try:
        return to_toml(type(config)())
    except TypeError:
        return ""


def to_toml(config: Config) -> str:
    """The config as TOML that `--config` reads back."""
    import tomli_w

    return tomli_w.dumps(asdict(config, dict_factory=_without_none))


def _without_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """TOML has no null, and no paths."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in items}
    return {name: value for name, value in plain.items() if value is not None}


def flat(toml: str) -> dict[str, Any]:
    """{dotted key: value} of a config in TOML."""
    return dict(_leaves(tomllib.loads(toml)))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def collect(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of all sources, later ones over earlier ones; keys are not checked yet."""
    command_line, paths = _from_command_line(argv)
    settings: Settings = {}
    for path in paths:
        settings |= _from_file(path)
    settings |= _from_environment(environ)
    settings |= command_line
    for (key, old), new in OLD_VALUES.items():
        if key in settings and settings[key].words == (old,):
            settings[key] = replace(settings[key], words=(new,))
    return settings


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
            raise ConfigError(
                f"{word!r} on the command line belongs to no key; write --section.key {word}"
            )
    settings, paths = {}, []
    for key, words in given:
        if key != "config":
            settings[key] = Setting(tuple(words), "on the command line")
        elif words:
            paths += words
        else:
            raise ConfigError("--config names no file; give the path of a TOML file")
    return settings, paths


def _from_file(path: str) -> Settings:
    try:
        text = Path(path).read_text(encoding="utf-8")
        # With a line break, so that an error in the last line has a line number too.
        table = tomllib.loads(text + "\n")
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; give the path of a TOML file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}; give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        what = str(error)
        number = re.search(r"line (\d+)", what)
        if number:
            what += f" `{text.splitlines()[int(number[1]) - 1].strip()}`"
        raise ConfigError(f"{path} is not TOML: {what}; fix that line") from None
    settings = {key: Setting(_words(value), f"in {path}") for key, value in _leaves(table)}
    if Path(path).name == "config.toml":  # of a run, perhaps of an earlier release
        settings = {k: v for k, v in settings.items() if _as_single_source(k) not in REMOVED}
    return settings


def _as_single_source(key: str) -> str:
    """data.sources.wiki.path -> data.path; other keys as they are."""
    return re.sub(r"^data\.sources\.\w+\.", "data.", key)


def _words(value: Any) -> tuple[str, ...]:
    """A TOML value as on the command line."""
    if isinstance(value, list):
        return tuple(word for item in value for word in _words(item))
    if isinstance(value, bool):
        return (str(value).lower(),)
    return (str(value),)


def _from_environment(environ: Mapping[str, str]) -> Settings:
    settings = {}
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            settings[key] = Setting((value,), f"in the environment as {name}", unsplit=True)
    return settings
