"""A config as TOML that `--config` reads back, or as dotted keys, with secrets masked."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date, time
from enum import Enum
from pathlib import Path
from typing import Any

from dist_amp.errors import MASK, SECRET, DataError, first_line, masked
from dist_amp.settings import Config

# The value after an option such as --task.args.hf-token, in words that are separated by \0.
OPTION = re.compile(rf"(?i)(--(?:[\w-]*\.)*(?:{SECRET})[\0=])[^\0]+")


def to_toml(config: Config) -> str:
    """The config as TOML that `--config` reads back, with secrets masked."""
    import tomli_w

    return masked(tomli_w.dumps(asdict(config, dict_factory=_for_toml)))


def command_line(words: Sequence[str]) -> str:
    """The words quoted for a shell, with secrets masked."""
    shown = OPTION.sub(rf"\1{MASK}", "\0".join(words))
    return shlex.join(map(masked, shown.split("\0")))


def _for_toml(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table without values that TOML can't hold, such as None; they are read as the default."""
    kinds = (str, int, float, list, tuple, dict, date, time)
    kept = {name: value for name, value in items if isinstance(value, kinds)}
    kept |= {name: str(value) for name, value in items if isinstance(value, Path)}
    return kept | {name: value.value for name, value in items if isinstance(value, Enum)}


def flat(toml: str) -> dict[str, Any]:
    """{dotted key: value} of a config in TOML, with secrets masked."""
    return dict(leaves(tomllib.loads(masked(toml))))


def read_flat(path: Path) -> dict[str, Any]:
    """{dotted key: value} of a run's or a checkpoint's config.toml. Raises DataError."""
    try:
        return flat(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"it is not TOML: {first_line(error)}"
        raise DataError(
            f"{path.parent} is not the folder of a run or checkpoint: {path.name}: {reason}; give "
            "the folder that run.dir names, or restore the file from a backup"
        ) from None


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
