"""Settings to config: tyro checks every value, whatever its source, against its type."""

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dist_amp.errors import ConfigError, nearest_name
from dist_amp.settings import Range

T = TypeVar("T")

# What other libraries call a setting, where no name here is like it.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "batch_size": "train.micro_batch_size",
    "max_steps": "train.steps",
    "num_workers": "data.workers",
    "gradient_accumulation_steps": "train.accumulation_steps",
}


@dataclass(frozen=True)
class Setting:
    """One key's value as text, one word per element, and where it was set."""

    words: tuple[str, ...]
    source: str
    unsplit: bool = False  # the elements of a list are in one word, separated by spaces


Settings = dict[str, Setting]


def build(schema: type[T], settings: Settings) -> T:
    """An instance of the dataclass `schema`, nested ones included: `settings` over its defaults.

    Errors: ConfigError for an unknown, missing, mistyped or out-of-range key, naming its source and
    the fix.
    """
    leaves = {key: (hint, has_default) for key, hint, has_default in _leaves(schema)}
    for key, setting in settings.items():
        if key not in leaves:
            raise ConfigError(f"unknown key {key} {setting.source}{_hint(key, list(leaves))}")
    for key, (_, has_default) in leaves.items():
        if key not in settings and not has_default:
            raise ConfigError(f"{key} is required and not set; add --{key} VALUE")
    parsed = {key: _parse(key, leaves[key][0], setting) for key, setting in settings.items()}
    config = _instance(schema, parsed)
    for key, value in flat_values(config):
        rule = _broken_rule(leaves[key][0], value)
        if rule:
            parts = [value]
            if isinstance(value, tuple | list):
                parts = list(value)
            shown = f"{key}={' '.join(map(str, parts))}"
            if key in settings:
                shown += f" {settings[key].source}"
            raise ConfigError(f"{shown} must be {rule}")
    return config


def _parse(key: str, hint: Any, setting: Setting) -> Any:
    """A setting's value by its type. One at a time, since tyro takes 0.1 s for the whole schema."""
    import tyro

    words = list(setting.words)
    if setting.unsplit and _list_in(hint) is not None:
        words = words[0].split()
    if "bool" in str(hint):
        words = [{"true": "True", "false": "False"}.get(word, word) for word in words]
    args = ["--value", *words]
    if len(words) == 1:  # with "=", since a text may begin with dashes
        args = [f"--value={words[0]}"]
    alone: Any = make_dataclass("Alone", [("value", hint)])
    try:
        # tyro prints a box; our one line also names the source.
        with redirect_stderr(io.StringIO()):
            return tyro.cli(alone, args=args, config=(tyro.conf.FlagConversionOff,)).value
    except SystemExit:
        value = " ".join(setting.words) or "(nothing)"
        said = f"{key}={value} {setting.source} is not {_expected(hint)}"
        raise ConfigError(said) from None


def _instance(schema: type[T], parsed: Mapping[str, Any], prefix: str = "") -> T:
    """The dataclass with these values by dotted key, and its defaults."""
    values = {}
    for name, hint in _hints(schema).items():  # type: ignore[arg-type]
        key = f"{prefix}{name}"
        if is_dataclass(hint):
            values[name] = _instance(hint, parsed, f"{key}.")  # type: ignore[arg-type]
        elif key in parsed:
            values[name] = parsed[key]
    return schema(**values)


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """(dotted key, type, whether it has a default) of every field, nested dataclasses flattened."""
    hints = _hints(schema)
    for item in fields(schema):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        if is_dataclass(hint):
            yield from _leaves(hint, f"{key}.")  # type: ignore[arg-type]
        else:
            yield key, hint, (item.default, item.default_factory) != (MISSING, MISSING)


def flat_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every field of a config, nested ones flattened."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from flat_values(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


def _hint(key: str, known: list[str]) -> str:
    """What an unknown key may be meant for: a name in its section, that name in another one, ..."""
    section, _, name = key.lower().rpartition(".")
    if name in ELSEWHERE:
        return f"; did you mean {ELSEWHERE[name]}?"
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    near = nearest_name(name, [other.rpartition(".")[2] for other in siblings])
    if near:
        return f"; did you mean {section}.{near}?"
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    if len(namesakes) == 1:
        return f"; did you mean {namesakes[0]}?"
    if f"{section}.".startswith("task.args."):
        args = [other for other in known if other.startswith("task.args.")]
        return f"; the task takes {', '.join(args) or 'no arguments'}"
    near = nearest_name(key.lower(), known)
    if near:
        return f"; did you mean {near}?"
    return "; --help lists every key"


def _broken_rule(hint: Any, value: Any) -> str:
    """The rule that a number, or one in a list, breaks; "" if none."""
    if isinstance(value, tuple | list):
        types = [part for part in get_args(_list_in(hint)) if part is not ...]
        if len(types) != len(value):
            types = types[:1] * len(value)
        broken = [_broken_rule(part, item) for part, item in zip(types, value, strict=False)]
        return next(filter(None, broken), "")
    allowed = _range_of(hint)
    if allowed is None or not isinstance(value, int | float) or value in allowed:
        return ""
    if math.isfinite(value):
        return str(allowed)
    return f"finite and {allowed}"


def _list_in(hint: Any) -> Any:
    """The list type in a type or union; None if there is none."""
    for part in (hint, *get_args(hint)):
        if (get_origin(part) or part) in (tuple, list):
            return part
    return None


def _range_of(hint: Any) -> Range | None:
    """The Range of a type or of a member of a union; None if there is none."""
    if get_origin(hint) is Annotated:
        return next((extra for extra in hint.__metadata__ if isinstance(extra, Range)), None)
    ranges = [_range_of(part) for part in get_args(hint)]
    return next((allowed for allowed in ranges if allowed is not None), None)


def _expected(hint: Any) -> str:
    """A type in words, for error messages."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "one text"}
    if get_origin(hint) is Annotated:
        return _expected(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if _list_in(hint) is hint:
        return _expected_list(get_args(hint))
    if get_args(hint):
        return " or ".join(_expected(part) for part in get_args(hint) if part is not type(None))
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _expected_list(types: tuple[Any, ...]) -> str:
    plurals = {"a whole number": "whole numbers", "a number": "numbers", "one text": "texts"}
    if not types:
        return "a list of values"
    kind = plurals.get(_expected(types[0]), "values")
    if len(types) > 1 and ... not in types:
        return f"a list of {len(types)} {kind}"
    return f"a list of {kind}"
