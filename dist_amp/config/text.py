"""A config as TOML that `--config` reads back, and as dotted keys; without secrets."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date, time
from enum import Enum
from pathlib import Path
from typing import Any

from dist_amp.errors import MASK, DataError, first_line, masked
from dist_amp.settings import Config

# A task's arguments with such names are not written.
SECRET = re.compile(
    r"(^|_)(password|passwd|pwd|passphrase|secret|credentials?|api_?key|"
    r"(access|account|private|secret)_key|(access|api|auth|hf|sas)_token)$|^token$"
)


def to_toml(config: Config) -> str:
    """The config as TOML that `--config` reads back, without secrets."""
    import tomli_w

    return tomli_w.dumps(hidden(asdict(config, dict_factory=_for_toml)))


def hidden(value: Any, name: str = "") -> Any:
    """Settings without secrets: those that are named so, and passwords in addresses."""
    if isinstance(value, dict):
        return {key: hidden(part, key) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(part, name) for part in value]
    if isinstance(value, str) and value:
        return MASK if SECRET.search(name) else masked(value)
    return value


def command_line(words: Sequence[str]) -> str:
    """The words quoted for a shell, without the values of secret settings."""
    shown = []
    key = ""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            key = name.replace("-", "_").strip("_").rpartition(".")[2]
            shown.append(name + equals + hidden(value, key))
        else:
            shown.append(hidden(word, key))
    return shlex.join(shown)


def _for_toml(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Leaves out what TOML can't hold, such as None: no setting can give it, so it is a default."""
    kinds = (str, int, float, list, tuple, dict, date, time)
    kept = {name: value for name, value in items if isinstance(value, kinds)}
    kept |= {name: str(value) for name, value in items if isinstance(value, Path)}
    return kept | {name: value.value for name, value in items if isinstance(value, Enum)}


def flat(toml: str) -> dict[str, Any]:
    """{dotted key: value} of a config in TOML, without secrets."""
    return dict(leaves(hidden(tomllib.loads(toml))))


def read_flat(path: Path) -> dict[str, Any]:
    """{dotted key: value} of a run's config.toml. Errors: DataError."""
    try:
        return flat(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"it is not TOML: {first_line(error)}"
        raise DataError(
            f"{path.parent} is not the folder of a run: {path.name}: {reason}; give the folder "
            "that run.dir names"
        ) from None


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
