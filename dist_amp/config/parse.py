"""Settings to config: every value is converted to its key's type, whatever its source."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import EnumType
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dist_amp.config.suggestions import for_value, suggestion
from dist_amp.errors import ConfigError
from dist_amp.settings import Range

T = TypeVar("T")

IN_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "one text",
    bool: "true or false",
    dict: "left out, as no setting can be a dict; take its values as arguments of their own",
}
NAMES: dict[Any, Mapping[str, Any]] = {
    bool: {"true": True, "True": True, "false": False, "False": False},
    NoneType: {"None": None},
}


class Quoted(str):
    """A text in quotes, as in TOML: it is no number."""


def word_of(value: Any) -> str:
    """A value of a TOML file as a word."""
    if isinstance(value, str):
        return Quoted(value)
    return str(value)


@dataclass(frozen=True)
class Setting:
    """One key's value as text, one word per element, and where it was set."""

    words: tuple[str, ...]
    source: str
    unsplit: bool = False  # the elements of a list are in one word, separated by spaces


Settings = dict[str, Setting]


class WrongType(Exception):
    """The message is the type in words."""


class OutOfRange(Exception):
    """The message is the rule."""


def build(schema: type[T], settings: Settings) -> T:
    """The dataclass `schema`, nested ones included, with these settings. Errors: ConfigError."""
    known = list(keys_of(schema))
    for key, setting in settings.items():
        if key not in known:
            raise ConfigError(f"unknown key {key} {setting.source}{suggestion(key, known)}")
    return _instance(schema, settings)


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """The dotted key of every field, nested dataclasses flattened."""
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint):
            yield from keys_of(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}"


def _instance(schema: type[T], settings: Settings, prefix: str = "") -> T:
    hints = get_type_hints(schema, include_extras=True)
    values = {}
    for item in fields(schema):  # type: ignore[arg-type]
        key = f"{prefix}{item.name}"
        hint = hints[item.name]
        if is_dataclass(hint):
            values[item.name] = _instance(hint, settings, f"{key}.")  # type: ignore[arg-type]
        elif key in settings:
            default = item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            values[item.name] = _converted(key, hint, settings[key], default)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{key} is required and not set; add --{key} VALUE")
    return schema(**values)


def _converted(key: str, hint: Any, setting: Setting, default: Any) -> Any:
    words: Sequence[str] = setting.words
    if setting.unsplit and _holds_a_list(hint):
        words = words[0].split()
    try:
        return value_of(hint, words)
    except (WrongType, OutOfRange) as error:
        shown = " ".join(setting.words) or "(nothing)"
        more = for_value(setting.words, str(error), default)
        raise ConfigError(f"{key}={shown} {setting.source} must be {error}{more}") from None


def _holds_a_list(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return kind in (tuple, list) or any(map(_holds_a_list, get_args(hint)))


def value_of(hint: Any, words: Sequence[str]) -> Any:
    """The words as a value of this type. Errors: WrongType, OutOfRange."""
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if kind is Annotated:
        value = value_of(parts[0], words)
        for rule in parts[1:]:
            if isinstance(rule, Range) and abs(value) > sys.float_info.max:
                raise OutOfRange(f"finite and {rule}")
            if isinstance(rule, Range) and value not in rule:
                raise OutOfRange(rule)
        return value
    if kind in (Union, UnionType):
        return _first_that_fits(parts, words)
    if isinstance(kind, type) and issubclass(kind, Sequence) and not issubclass(kind, str):
        types = parts
        if kind is not tuple or ... in parts or not parts:  # of any length
            types = (*parts, str)[:1] * len(words)
        if len(types) != len(words):
            raise WrongType(f"{len(types)} values, separated by spaces")
        values = [value_of(part, [word]) for part, word in zip(types, words, strict=True)]
        if kind is list:
            return values
        return tuple(values)
    return _scalar(kind, parts, words)


def _first_that_fits(types: Sequence[Any], words: Sequence[str]) -> Any:
    """The words as a value of one of the types: the first, but None before a text."""
    expected = []
    for part in sorted(types, key=lambda part: part is not NoneType):
        try:
            return value_of(part, words)
        except WrongType as error:
            expected.append(str(error))
        except OutOfRange as error:
            literals = [get_args(other) for other in types if get_origin(other) is Literal]
            choices = [str(choice) for literal in literals for choice in literal]
            raise OutOfRange(" or ".join([str(error), *choices])) from None
    raise WrongType(" or ".join(expected))


def _scalar(kind: Any, choices: Sequence[Any], words: Sequence[str]) -> Any:
    """One word as a value of a type, or as one of a Literal's choices."""
    names = NAMES.get(kind, {})
    if kind is Literal:
        names = {str(choice): choice for choice in choices}
    elif isinstance(kind, EnumType):
        names = kind.__members__
    expected = IN_WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    if len(names) == 1:
        (expected,) = names
    elif names and kind not in IN_WORDS:
        expected = f"one of {', '.join(names)}"
    if len(words) != 1 or (names and words[0] not in names):
        raise WrongType(expected)
    if kind in (int, float, bool) and isinstance(words[0], Quoted):
        raise WrongType(f"{expected}, without quotes")
    if names:
        return names[words[0]]
    try:
        return kind(os.path.expanduser(words[0]))  # of the task's arguments, too
    except (TypeError, ValueError):
        raise WrongType(expected) from None
