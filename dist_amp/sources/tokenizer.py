"""Stand-in until the real one is merged: bytes alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dist_amp.errors import ConfigError, DataError


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back."""

    name: str
    vocabulary: int
    end: int | None
    identity: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    chat: Any = None


def open_tokenizer(name: str) -> Tokenizer:
    if name != "bytes":
        raise ConfigError(f"data.tokenizer={name}")
    return Tokenizer(
        name, 256, 0, name, lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace")
    )


def of_transformers(tokenizer: Any, name: str = "") -> Tokenizer:
    def encode(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    vocabulary = len(tokenizer)
    return Tokenizer(name, vocabulary, tokenizer.eos_token_id, name, encode, tokenizer.decode)


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    if tokenizer.vocabulary > rows:
        raise DataError(f"the tokenizer {tokenizer.name} has {tokenizer.vocabulary} tokens")
