"""Settings to config: the words of a key become a value that its type accepts.

A file's values have types. The words of a command line have none, so they are read as TOML would
read them, and as text where the type accepts no number. Pydantic says which reading is valid, and
suggestions.py what the type accepts, in words that are made of its JSON Schema.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

NAMED = {"true": True, "True": True, "false": False, "False": False, "None": None}


@dataclass(frozen=True)
class Setting:
    """One key's value as it was written, where, and as what it may be read, likeliest first."""

    words: tuple[str, ...]
    source: str
    typed: tuple[Any, ...]
    untyped: tuple[Any, ...] = ()  # for a type that accepts no number

    def __str__(self) -> str:
        return " ".join(self.words)


Settings = dict[str, Setting]


def from_words(words: Sequence[str], source: str, in_one_word: bool = False) -> Setting:
    """A setting of a command line; in_one_word: of the environment, where spaces separate items."""
    texts = [os.path.expanduser(word) for word in words]
    items = texts[0].split() if in_one_word else texts
    typed = [as_typed(text) for text in texts]
    typed_items = [as_typed(item) for item in items]
    if len(texts) != 1:
        return Setting(tuple(words), source, (typed_items,), (items,))
    return Setting(tuple(words), source, (*typed, typed_items), (*texts, items))


def as_typed(word: str) -> Any:
    """The value that a word is without quotes."""
    if word in NAMED:
        return NAMED[word]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def from_toml(value: Any, source: str) -> Setting:
    """A setting of a file. A single value may stand for a list of one."""
    items = value if isinstance(value, list) else [value]
    items = [os.path.expanduser(item) if isinstance(item, str) else item for item in items]
    words = tuple(map(as_word, items))
    if isinstance(value, list):
        return Setting(words, source, (items,))
    return Setting(words, source, (*([None] if value == "None" else []), *items, items))


def as_word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


INVALID = object()


def first_valid(hint: Any, readings: Sequence[Any]) -> Any:
    """The first reading that is valid, as a value of the type; INVALID if none is."""
    from pydantic import ValidationError

    validator = validator_of(hint)
    for reading in readings if validator else ():
        text = json.dumps(reading, default=str)  # of dates
        with suppress(ValidationError):
            return validator.validate_json(text, strict=True)
    return INVALID


def schema_of(hint: Any) -> dict[str, Any]:
    """A type's JSON Schema; {} for one whose values no setting can give."""
    from pydantic import PydanticUserError

    validator = validator_of(hint)
    with suppress(PydanticUserError):
        return validator.json_schema() if validator else {}
    return {}


def validator_of(hint: Any) -> Any:
    """Pydantic's validator of a type; None for one that it can't check, such as a Protocol."""
    from pydantic import TypeAdapter

    config: Any = {"arbitrary_types_allowed": True, "allow_inf_nan": not has_range(hint)}
    try:
        return TypeAdapter(hint, config=config)
    except Exception:  # pydantic's, its core's, or of a hint's own hooks
        return None


def parts_of(hint: Any) -> list[dict[str, Any]]:
    """The JSON Schema of each type of a union, or of the type alone."""
    schema = schema_of(hint)
    return schema.get("anyOf", [schema])


def kinds_of(hint: Any) -> set[str]:
    return {part.get("type", "") for part in parts_of(hint)}


def has_range(hint: Any) -> bool:
    return get_origin(hint) is Annotated or any(map(has_range, get_args(hint)))
