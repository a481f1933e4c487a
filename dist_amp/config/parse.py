"""Configuration: defaults, then TOML files, then the environment, then the command line; the last one wins.

Every value, wherever it stands, becomes one `Setting` and goes through one validator: tyro, which reads the
dataclasses' types. The dataclasses live in the files that they configure; nothing here knows their names.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from dist_amp.config.range import Range
from dist_amp.config.sources import Settings
from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError

T = TypeVar("T")


def build(schema: type[T], settings: Settings, prog: str = "dist_amp") -> T:
    """An instance of the dataclass `schema`, nested ones included, with `settings` over its defaults.

    Errors: ConfigError for an unknown, missing, mistyped or out-of-range key, naming its source and the mend.
    """
    leaves = dict(_leaves(schema))
    for key, setting in settings.items():
        if key not in leaves:
            raise ConfigError(f"unknown key {key} {setting.source}{_nearest(key, leaves)}")
    for key, (_, default) in leaves.items():
        if default is MISSING and key not in settings:
            raise ConfigError(f"{key} is required and not set; add --{key} VALUE")
    hints = {key: hint for key, (hint, _) in leaves.items()}
    config = _parse(schema, settings, hints, prog)
    if config is None:
        raise _culprit(settings, hints, prog)
    for key, value in flat_values(config):
        if rule := _broken_rule(hints[key], value):
            where = f" {settings[key].source}" if key in settings else ""
            shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else value
            raise ConfigError(f"{key}={shown}{where} must be {rule}")
    return config


def show_help(schema: type, prog: str, description: str) -> str:
    """The text of `--help`: every key with its type, default and meaning."""
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        tyro.cli(schema, args=["--help"], prog=prog, description=description, use_underscores=True, config=_TYRO)
    return text.getvalue()


_TYRO = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)


def _parse(schema: type[T], settings: Settings, hints: Mapping[str, Any], prog: str) -> T | None:
    """What tyro makes of the settings; None where it refuses one."""
    args: list[str] = []
    for key, setting in settings.items():
        words = list(setting.words)
        if setting.unsplit and _list_in(hints[key]) is not None:
            words = words[0].split()
        if "bool" in str(hints[key]):
            words = [{"true": "True", "false": "False"}.get(word, word) for word in words]
        # With "=", since a text may begin with dashes.
        args += [f"--{key}={words[0]}"] if len(words) == 1 else [f"--{key}", *words]
    try:
        with redirect_stderr(io.StringIO()):  # tyro prints a box; our one line names the source as well
            return tyro.cli(schema, args=args, prog=prog, use_underscores=True, config=_TYRO)
    except SystemExit:
        return None


def _culprit(settings: Settings, hints: Mapping[str, Any], prog: str) -> ConfigError:
    """Name the setting that tyro refuses: the first that it refuses on its own."""
    for key, setting in settings.items():
        alone = make_dataclass("Alone", [("value", hints[key])])
        if _parse(alone, {"value": setting}, {"value": hints[key]}, prog) is None:
            value = " ".join(setting.words) or "(nothing)"
            return ConfigError(f"{key}={value} {setting.source} is not {_expected(hints[key])}")
    return ConfigError(f"these settings do not go together: {', '.join(settings)}")


def _leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(dotted key, (type, default or MISSING)) of every field, nested dataclasses taken apart."""
    hints = get_type_hints(schema, include_extras=True)
    for item in fields(schema):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        if is_dataclass(hint):
            yield from _leaves(hint, f"{key}.")  # type: ignore[arg-type]
        else:
            yield key, (hint, item.default if item.default_factory is MISSING else item.default_factory)


def flat_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every field of a config, nested ones taken apart."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from flat_values(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


def _nearest(key: str, leaves: Iterable[str]) -> str:
    leaves = list(leaves)
    section, _, last = key.lower().rpartition(".")
    last_names = {leaf: leaf.rpartition(".")[2] for leaf in leaves}
    inside = {name: leaf for leaf, name in last_names.items() if leaf == f"{section}.{name}"}
    same_name = [leaf for leaf, name in last_names.items() if name == last]
    match = inside.get(nearest_name(last, inside)) or (same_name[0] if len(same_name) == 1 else "")
    if not match and f"{section}.".startswith("task.args."):
        args = ", ".join(leaf for leaf in leaves if leaf.startswith("task.args."))
        return f"; the task takes {args or 'no arguments'}"
    match = match or nearest_name(key.lower(), leaves)
    return f"; did you mean {match}?" if match else "; --help lists every key"


def _broken_rule(hint: Any, value: Any) -> str:
    """What a number, or one in a list, should have been; empty if all is well."""
    if isinstance(value, tuple | list) and (list_type := _list_in(hint)) is not None:
        parts = [part for part in get_args(list_type) if part is not ...]
        parts = parts if len(parts) == len(value) else parts[:1] * len(value)
        return next((rule for rule in map(_broken_rule, parts, value) if rule), "")
    allowed = _range_of(hint)
    if allowed is None or not isinstance(value, int | float) or value in allowed:
        return ""
    return str(allowed) if math.isfinite(value) else f"finite and {allowed}"


def _is_list(hint: Any) -> bool:
    return (get_origin(hint) or hint) in (tuple, list)


def _list_in(hint: Any) -> Any:
    """The list in a type that is one, or a union of one and a word; None where there is none."""
    return next((part for part in (hint, *get_args(hint)) if _is_list(part)), None)


def _range_of(hint: Any) -> Range | None:
    """The Range in a type, through unions."""
    if get_origin(hint) is Annotated:
        return next((extra for extra in hint.__metadata__ if isinstance(extra, Range)), None)
    return next((found for part in get_args(hint) if (found := _range_of(part)) is not None), None)


def _expected(hint: Any) -> str:
    """A type in words, for error messages."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "one text"}
    if get_origin(hint) is Annotated:
        return _expected(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if _is_list(hint):
        parts = get_args(hint)
        many = {"a whole number": "whole numbers", "a number": "numbers", "one text": "texts"}
        kind = many.get(_expected(parts[0]) if parts else "", "values")
        length = "" if get_origin(hint) is not tuple or ... in parts else f"{len(parts)} "
        return f"a list of {length}{kind}"
    if get_args(hint):
        return " or ".join(_expected(part) for part in get_args(hint) if part is not type(None))
    return words.get(hint, getattr(hint, "__name__", str(hint)))
