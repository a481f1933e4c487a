"""The config of a command line: defaults < TOML files < environment < arguments."""

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dist_amp.config.features import check_features
from dist_amp.config.task_class import (
    GIVEN,
    args_dataclass,
    args_of,
    check_saved_target,
    find_task,
)
from dist_amp.config.text import leaves
from dist_amp.config.values import (
    INVALID,
    Setting,
    Settings,
    first_valid,
    from_toml,
    from_words,
    kinds_of,
)
from dist_amp.errors import MASK, ConfigError, nearest_name
from dist_amp.files import present, shipped_folder
from dist_amp.settings import Config, TaskConfig

T = TypeVar("T")

ALIASES = {"use_amp": "precision.use_amp"}
ENVIRONMENT_PREFIX = "DIST_AMP_"
DEFAULT_TASK = "tasks.causal_lm"  # a feature
# Used by the launch scripts, set by `dist_amp launch` for its ranks, and by optional features.
NOT_SETTINGS = {"DIST_AMP_PYTHON", "DIST_AMP_LAUNCHER", "DIST_AMP_CACHE", "DIST_AMP_METADATA"}
NOT_SETTINGS |= {"DIST_AMP_NNODES", "DIST_AMP_COMMAND", "DIST_AMP_FAILED_AT"}
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
    args = args_dataclass(task)
    check_known(settings, {"": Config, "task.args.": args})
    config = build(Config, settings)
    return replace(config, task=replace(config.task, args=build(args, settings, "task.args.")))


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
        check_saved_target(str(target), folder)
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
    return str(settings.get("task.target", TaskConfig.target))


def task_in(settings: Settings) -> type:
    """The class that the settings name; `object` where the default is not in this project."""
    if "task.target" in settings or present(DEFAULT_TASK):
        return find_task(target_in(settings))
    return object


# ---- where settings come from


def collect(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of all sources, later ones over earlier ones; keys are not checked yet."""
    command_line, paths = _from_command_line(argv)
    settings: Settings = {}
    for path in paths:
        settings |= from_file(path_of(path))
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            settings[key] = from_words([value], f"in the environment as {name}", in_one_word=True)
    settings |= command_line
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
            from dist_amp.config.suggestions import with_dashes

            hint = with_dashes(argv) or f"write --section.key {word}"
            raise ConfigError(f"{word!r} on the command line belongs to no key; {hint}")
    settings: Settings = {}
    paths: list[str] = []
    for key, words in given:
        if key != "config":
            settings[key] = from_words(words, "on the command line")
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
        source = f"in {path}, line {lines[key]}"
        if Path(path).name == "config.toml":  # of a run, perhaps of an earlier release
            from dist_amp.config.suggestions import removed

            if text := removed(key):
                say_once(f"{key} {source}{text}")
                if (key, value) == ("precision.matmul", "fp8"):
                    settings["precision.dtype"] = from_toml(value, source)
                continue
        settings[key] = from_toml(value, source)
    return settings


@cache
def say_once(text: str) -> None:
    """On the first rank, however often a command reads its settings."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr)


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


# ---- settings as the values of a section


def build(table: type[T], settings: Settings, prefix: str = "") -> T:
    """The dataclass with these settings, of dataclasses inside it too. Errors: ConfigError."""
    values: dict[str, Any] = {}
    hints = get_type_hints(table, include_extras=True)
    for item in fields(table):  # type: ignore[arg-type]
        key = f"{prefix}{item.name}"
        hint: Any = hints[item.name]
        if is_dataclass(hint):
            values[item.name] = build(hint, settings, f"{key}.")  # type: ignore[arg-type]
        elif is_table_of_tables(hint):
            kind = get_args(hint)[1]
            tables = names_below(key, settings)
            values[item.name] = {name: build(kind, settings, f"{key}.{name}.") for name in tables}
        elif key in settings:
            default = item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            values[item.name] = value_of(key, hint, settings[key], default)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{key} is required and not set; add --{key} VALUE")
    return table(**values)


def check_known(settings: Settings, tables: Mapping[str, type]) -> None:
    """Errors: ConfigError for a key that none of the tables has. tables: {prefix: dataclass}."""
    known = [key for prefix in tables for key in keys_of(tables[prefix], settings, prefix)]
    for key, setting in settings.items():
        if key not in known:
            from dist_amp.config.suggestions import removed, suggestion

            name = key if removed(key) else f"unknown key {key}"
            raise ConfigError(f"{name} {setting.source}{suggestion(key, known)}")


def keys_of(table: type, settings: Settings, prefix: str = "") -> Iterator[str]:
    """The dotted key of every field that can be set, of dataclasses inside it too."""
    for name, hint in get_type_hints(table).items():
        key = f"{prefix}{name}"
        if is_dataclass(hint):
            yield from keys_of(hint, settings, f"{key}.")  # type: ignore[arg-type]
        elif is_table_of_tables(hint):
            for part in names_below(key, settings):
                yield from keys_of(get_args(hint)[1], settings, f"{key}.{part}.")
        elif key != "task.args":  # which the task's own table has
            yield key


def is_table_of_tables(hint: Any) -> bool:
    return get_origin(hint) is Mapping and is_dataclass(get_args(hint)[1])


def names_below(key: str, settings: Settings) -> list[str]:
    """The names of the tables that are set below a key, in the order of the settings."""
    below = [name.removeprefix(f"{key}.") for name in settings if name.startswith(f"{key}.")]
    return list(dict.fromkeys(name.partition(".")[0] for name in below))


def value_of(key: str, hint: Any, setting: Setting, default: Any) -> Any:
    """The setting as a value of this type. Errors: ConfigError with what the type accepts."""
    value = first_valid(hint, setting.typed)
    if value is INVALID and not kinds_of(hint) & {"integer", "number"}:
        value = first_valid(hint, setting.untyped)
    if value is INVALID:
        from dist_amp.config.suggestions import rule_for

        shown = str(setting) or "(nothing)"
        rule = rule_for(hint, setting, default)
        raise ConfigError(f"{key}={shown} {setting.source} must be {rule}")
    return value
