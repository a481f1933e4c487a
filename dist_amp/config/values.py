"""Turns settings into a dataclass; pydantic checks all of them at once and words the errors.

Values in a file have types. Words on a command line or in the environment have none, so pydantic
tries several readings of them in turn: as a TOML value, as a list of one item, as text.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dist_amp.config.suggestions import expected_text
from dist_amp.errors import ConfigError

CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "None": None}
LIST_ERRORS = ("list_type", "tuple_type", "set_type")  # pydantic's errors: the value is no list
UNKNOWN = ("unexpected_keyword_argument", "dataclass_type")  # no such key, or it is a section


@dataclass(frozen=True)
class Setting:
    """One key's value as written, where it was written, and its readings, the likeliest first."""

    text: str
    source: str
    readings: Sequence[Any]


Settings = dict[str, Setting]


class UnknownKey(Exception):
    """No field has this dotted key."""


def from_words(words: Sequence[str], source: str, split: bool = False) -> Setting:
    """A setting from a command line; or, with `split`, from a variable, split at spaces."""
    texts = [os.path.expanduser(word) for word in words]
    items = texts[0].split() if split else texts
    typed = [as_typed(item) for item in items]
    text = " ".join(words) or "(nothing)"
    if len(texts) != 1:
        return Setting(text, source, [typed, items])
    return Setting(text, source, [as_typed(texts[0]), typed, texts[0], items])


def as_typed(word: str) -> Any:
    """A word as a number, bool or None if it looks like one, else as text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return CONSTANTS.get(word, word)


def from_toml(value: Any, source: str) -> Setting:
    """A setting in a TOML file, where "None" may stand for None."""
    text = json.dumps(value, default=str)
    if value == "None":
        return Setting(text, source, [None, value])
    return Setting(text, source, [os.path.expanduser(value) if isinstance(value, str) else value])


def read(kind: Any, settings: Settings, prefix: str = "") -> Any:
    """An instance of the dataclass `kind` from settings whose keys all begin with `prefix`.

    If a reading of a value is invalid, its next reading is tried. Raises UnknownKey or ConfigError
    for a value that is invalid in all readings, or for a required field without a value.
    """
    for key in settings:
        if inner := [path for path in settings if path.startswith(f"{key}.")]:
            raise UnknownKey(inner[0])
    indices = dict.fromkeys(settings, 0)  # {key: which of its readings to try}
    reported: dict[str, list[Any]] = {}  # {key: the problems that an error message shows}
    while True:
        values = {key: settings[key].readings[index] for key, index in indices.items()}
        try:
            text = json.dumps(nested(values, prefix), default=str)  # dates become text
            return adapter(kind).validate_json(text, strict=True)
        except ValidationError as error:
            problems = by_key(error.errors(include_url=False), settings, prefix)
        for key, found in problems.items():
            # Report the first reading's problems, unless they only say that the value is no list.
            if key not in reported or reported[key][0]["type"] in LIST_ERRORS:
                reported[key] = found
            setting = settings[key]
            indices[key] += 1
            if indices[key] == len(setting.readings):
                expected = expected_text(reported[key], setting.text)
                raise ConfigError(f"{key}={setting.text} {setting.source} must be {expected}")


@cache
def adapter(kind: Any) -> Any:
    return TypeAdapter(kind)


def nested(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """{dotted key: value} as nested tables, without the prefix."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key[len(prefix) :].split(".")
        table = tree
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return tree


def by_key(problems: Sequence[Any], settings: Settings, prefix: str) -> dict[str, list[Any]]:
    """{a setting's key: pydantic's problems with it}. Raises UnknownKey or ConfigError."""
    found = defaultdict(list)
    for problem in problems:
        path = list(map(str, problem["loc"]))  # the key's parts; then maybe an index or a type
        keys = [f"{prefix}{'.'.join(path[:end])}".strip(".") for end in range(len(path), 0, -1)]
        key = next((key for key in keys if key in settings), "")
        if key and problem["type"] not in UNKNOWN:
            found[key].append(problem)
        elif problem["type"] == "missing":
            raise ConfigError(f"{keys[0]} is required and not set; add --{keys[0]} VALUE")
        else:  # an unknown key, or one below a key that is no section
            starts = tuple(f"{key}." for key in keys)
            raise UnknownKey(key or next(key for key in settings if key.startswith(starts)))
    return found
