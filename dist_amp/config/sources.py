"""Where settings come from: TOML files, the environment, the command line; the last one wins."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_amp.errors import ConfigError

ENVIRONMENT_PREFIX = "DIST_AMP_"

NOT_SETTINGS = {"DIST_AMP_PYTHON", "DIST_AMP_LAUNCHER"}  # used by the launch scripts; from `dist_amp launch` to ranks


@dataclass(frozen=True)
class Setting:
    """One key's value as text, one word per element, and where it was set."""

    words: tuple[str, ...]
    source: str
    unsplit: bool = False  # the elements of a list are in one word, separated by spaces


Settings = dict[str, Setting]


def collect(argv: Sequence[str], environ: Mapping[str, str] = os.environ, aliases: Mapping[str, str] = {}) -> Settings:
    """The settings of all sources, later ones over earlier ones; keys are not checked yet."""
    command_line, paths = _from_command_line(argv, aliases)
    settings: Settings = {}
    for path in paths:
        settings |= _from_file(path)
    settings |= _from_environment(environ)
    return settings | command_line


def _from_command_line(argv: Sequence[str], aliases: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """(settings, config paths) from `--key value ...` and `--key=value`; `--config` takes one or more files."""
    given: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            given.append((aliases.get(key, key), [value] if equals else []))
        elif given:
            given[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} on the command line belongs to no key; write --section.key {word}")
    if ("config", []) in given:
        raise ConfigError("--config names no file; give the path of a TOML file")
    paths = [path for key, words in given if key == "config" for path in words]
    return {key: Setting(tuple(words), "on the command line") for key, words in given if key != "config"}, paths


def _from_file(path: str) -> Settings:
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text + "\n")  # so that an error in the last line has a line number too
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}; give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        number = re.search(r"line (\d+)", str(error))
        line = f" `{text.splitlines()[int(number[1]) - 1].strip()}`" if number else ""
        raise ConfigError(f"{path} is not TOML: {error}{line}; fix that line") from None
    return {key: Setting(words, f"in {path}") for key, words in _flatten(table)}


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, tuple(map(_word, value)) if isinstance(value, list) else (_word(value),)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _from_environment(environ: Mapping[str, str]) -> Settings:
    names = [name for name in environ if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS]
    keys = {name: name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".") for name in names}
    return {key: Setting((environ[name],), f"in the environment as {name}", unsplit=True) for name, key in keys.items()}
