"""Settings to config: every value, whatever its source, is checked by tyro against the types of the dataclasses.

Nothing here knows the dataclasses' names; they are in settings.py.
"""

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from dist_amp.config.range import Range
from dist_amp.config.sources import Settings
from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError

T = TypeVar("T")


def build(schema: type[T], settings: Settings) -> T:
    """An instance of the dataclass `schema`, nested ones included, with `settings` over its defaults.

    Errors: ConfigError for an unknown, missing, mistyped or out-of-range key, naming its source and the fix.
    """
    leaves = dict(_leaves(schema))
    for key, setting in settings.items():
        if key not in leaves:
            raise ConfigError(f"unknown key {key} {setting.source}{_hint(key, list(leaves))}")
    for key, (_, default) in leaves.items():
        if default is MISSING and key not in settings:
            raise ConfigError(f"{key} is required and not set; add --{key} VALUE")
    types = {key: kind for key, (kind, _) in leaves.items()}
    config = _parse(schema, settings, types)
    if config is None:
        raise _type_error(settings, types)
    for key, value in flat_values(config):
        if rule := _broken_rule(types[key], value):
            where = f" {settings[key].source}" if key in settings else ""
            shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else value
            raise ConfigError(f"{key}={shown}{where} must be {rule}")
    return config


def show_help(schema: type, prog: str, description: str, section: str = "") -> str:
    """The text of `--help`: every key, or those of a section, with type, default and meaning.

    Errors: ConfigError for a section that is not there.
    """
    shown = make_dataclass("Settings", [*(() if section else ALONE), *_fields_of(schema, section)])
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        tyro.cli(shown, args=["--help"], prog=prog, description=description, use_underscores=True, config=_TYRO)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def completion(commands: Mapping[str, type], prog: str, shell: str) -> str:
    """A script for bash, zsh or fish that completes `prog COMMAND --key`; a class's docstring is its command's help."""
    text = io.StringIO()
    asked = ["--tyro-print-completion", shell]
    with redirect_stdout(text), suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            dict(commands), prog=prog, use_underscores=True, config=_TYRO[:1], args=asked
        )
    return text.getvalue()


def command_line_of(schema: type, meaning: str) -> type:
    """What a command line of settings may have, for `completion`: the keys, and the options that are none."""
    return make_dataclass("Settings", [*ALONE, *_fields_of(schema)], namespace={"__doc__": meaning})


def _fields_of(schema: type, section: str = "") -> list[tuple[str, Any, Any]]:
    """(name, type, field) of the dataclass, for make_dataclass; only of one section, such as optim or precision.scaler.

    Errors: ConfigError for a section that is not there.
    """
    name, _, inner = section.partition(".")
    hints = get_type_hints(schema, include_extras=True)
    found = []
    for item in fields(schema):
        default = item.default if item.default_factory is MISSING else MISSING
        again = field(default_factory=item.default_factory) if default is MISSING else field(default=default)
        if name in ("", item.name):
            found.append((item.name, hints[item.name], again))
    if name and not any(is_dataclass(hint) for _, hint, _ in found):
        known = [item.name for item in fields(schema) if is_dataclass(hints[item.name])]
        hint = f"did you mean {near}?" if (near := nearest_name(name, known)) else f"there are {', '.join(known)}"
        raise ConfigError(f"--help {section}: there is no such section; {hint}")
    if inner:
        only = make_dataclass("Section", _fields_of(hints[name], inner))
        return [(name, only, field(default_factory=only))]
    return found


# Options of the command line that are no keys of the config.
ALONE: list[tuple[str, Any, Any]] = [
    ("config", Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.toml ...", help_behavior_hint="",
        help="TOML files of settings; later ones override earlier ones, and the command line all.")],
     field(default=())),
    ("print_config", Annotated[bool, tyro.conf.arg(metavar="", help_behavior_hint="",
        help="Print all settings as TOML, as they would be used, and exit.")], field(default=False)),
    ("use_amp", Annotated[bool, tyro.conf.arg(help="Short for --precision.use_amp.")], field(default=True)),
]  # fmt: skip
_TYRO = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)


def _parse(schema: type[T], settings: Settings, types: Mapping[str, Any]) -> T | None:
    """The settings as tyro parses them; None if it rejects one."""
    args: list[str] = []
    for key, setting in settings.items():
        words = list(setting.words)
        if setting.unsplit and _list_in(types[key]) is not None:
            words = words[0].split()
        if "bool" in str(types[key]):
            words = [{"true": "True", "false": "False"}.get(word, word) for word in words]
        # With "=", since a text may begin with dashes.
        args += [f"--{key}={words[0]}"] if len(words) == 1 else [f"--{key}", *words]
    try:
        with redirect_stderr(io.StringIO()):  # tyro prints a box; our one line also names the source
            return tyro.cli(schema, args=args, use_underscores=True, config=_TYRO)
    except SystemExit:
        return None


def _type_error(settings: Settings, types: Mapping[str, Any]) -> ConfigError:
    """Names the first setting that tyro rejects by itself."""
    for key, setting in settings.items():
        alone = make_dataclass("Alone", [("value", types[key])])
        if _parse(alone, {"value": setting}, {"value": types[key]}) is None:
            value = " ".join(setting.words) or "(nothing)"
            return ConfigError(f"{key}={value} {setting.source} is not {_expected(types[key])}")
    return ConfigError(f"these settings do not go together: {', '.join(settings)}")


def _leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(dotted key, (type, default or MISSING)) of every field, nested dataclasses flattened."""
    hints = get_type_hints(schema, include_extras=True)
    for item in fields(schema):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        if is_dataclass(hint):
            yield from _leaves(hint, f"{key}.")  # type: ignore[arg-type]
        else:
            yield key, (hint, item.default if item.default_factory is MISSING else item.default_factory)


def flat_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every field of a config, nested ones flattened."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from flat_values(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


# What other libraries call a setting, where no name here is like it.
ELSEWHERE = {"learning_rate": "optim.lr", "batch_size": "train.micro_batch_size", "max_steps": "train.steps",
             "num_workers": "data.workers", "gradient_accumulation_steps": "train.accumulation_steps"}  # fmt: skip


def _hint(key: str, leaves: list[str]) -> str:
    """What the user may have meant by an unknown key: a name in the same section, the same name in another, ..."""
    section, _, name = key.lower().rpartition(".")
    siblings = {leaf.removeprefix(f"{section}."): leaf for leaf in leaves if leaf.rpartition(".")[0] == section}
    if name in ELSEWHERE:
        return f"; did you mean {ELSEWHERE[name]}?"
    namesakes = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    match = siblings.get(nearest_name(name, siblings)) or (namesakes[0] if len(namesakes) == 1 else "")
    if not match and f"{section}.".startswith("task.args."):
        args = ", ".join(leaf for leaf in leaves if leaf.startswith("task.args."))
        return f"; the task takes {args or 'no arguments'}"
    match = match or nearest_name(key.lower(), leaves)
    return f"; did you mean {match}?" if match else "; --help lists every key"


def _broken_rule(hint: Any, value: Any) -> str:
    """The rule that a number, or one in a list, breaks; "" if none."""
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
    """The list type in a type or union; None if there is none."""
    return next((part for part in (hint, *get_args(hint)) if _is_list(part)), None)


def _range_of(hint: Any) -> Range | None:
    """The Range of a type or of a member of a union; None if there is none."""
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
