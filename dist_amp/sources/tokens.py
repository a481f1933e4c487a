"""Documents as tokens: from files of tokens, from rows tokenized ahead of time, or from rows as they are read."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import DataConfig
from dist_amp.sources.conversations import (
    MESSAGES_COLUMN,
    PROMPT_COLUMN,
    are_chats,
    check_rows,
    encode_row,
    needed_columns,
)
from dist_amp.sources.load import load_rows, warn
from dist_amp.sources.token_shards import FORMAT, NOT_LEARNED, TokenShards, holds_tokens, read_manifest
from dist_amp.sources.tokenizer import Tokenizer, open_tokenizer
from dist_amp.sources.tokenizing import SHARD_TOKENS, source_fingerprint, tokenize

log = logging.getLogger(__name__)
# Settings of rows, which have no effect on tokens that were made before.
CHOSEN_BEFORE = ("name", "split", "validation_split", "validation_fraction", "text_column", "view")


def token_documents(data: DataConfig, split: str, tokenizer: Tokenizer, rows: Any = None) -> Any:
    """A split's documents as {"input_ids" [n], "labels" [n]} int64; None without such a split.

    rows: in place of those that `data` names, as what a task ships with.
    labels: the ids, or NOT_LEARNED (-100) where a token does not count. The dataset also has
    `fingerprint` and, but for a Parquet view's rows, which are tokenized as they are read, `lengths` and `firsts`.
    Errors: DataError for rows or tokens that do not fit; ConfigError for tokens of another tokenizer.
    """
    if data.tokenizer not in ("auto", tokenizer.name):
        other = open_tokenizer(data.tokenizer)
        if other.identity != tokenizer.identity:
            raise ConfigError(
                f"data.tokenizer={data.tokenizer} ({other.identity}) is not the task's own, {tokenizer.name} "
                f"({tokenizer.identity}); leave data.tokenizer out"
            )
    if data.format == "tokens" or (data.format == "auto" and holds_tokens(data.path)):
        for name in CHOSEN_BEFORE:
            if (value := getattr(data, name)) != getattr(DataConfig, name):
                raise ConfigError(
                    f"data.{name}={value} has no effect: data.path={data.path} holds tokens, whose rows "
                    "dist_amp.tokenize chose; remove it"
                )
        return _opened(Path(data.path.removeprefix("file://")), split, tokenizer)
    if rows is not None and data.view == "parquet":
        raise ConfigError("data.view=parquet reads files, and the task's own text is used; set data.path")
    if rows is None:
        rows = load_rows(data, split, MESSAGES_COLUMN, PROMPT_COLUMN)
    if rows is None:
        return None
    check_rows(rows, data.text_column, tokenizer)
    if tokenizer.end is None and split == "train":
        warn(
            "the tokenizer has no eos_token, so no sample ends with one, and only what a chat template writes can "
            "teach the model to stop; set eos_token in tokenizer_config.json"
        )
    if not hasattr(rows, "map"):
        return TokenizedWhenRead(rows, tokenizer, data.text_column)
    folder = cache_folder(split, rows, tokenizer, data.text_column)
    tokenize(folder, {split: rows}, tokenizer, data.text_column, log.info, data.workers)
    return _opened(folder, split, tokenizer)


def _opened(folder: Path, split: str, tokenizer: Tokenizer) -> TokenShards | None:
    manifest = read_manifest(folder)
    if manifest.identity != tokenizer.identity:
        raise ConfigError(
            f"data.path={folder} holds tokens of the tokenizer {manifest.tokenizer} ({manifest.identity}), not of "
            f"{tokenizer.name} ({tokenizer.identity}); set data.tokenizer={manifest.tokenizer}, or make them again"
        )
    if split == "validation" and manifest.splits and split not in manifest.splits:
        return None
    shards = TokenShards(folder, split)
    log.info("data: %s: %s (%s)", split, shards.of, folder)
    return shards


def cache_folder(split: str, rows: Any, tokenizer: Tokenizer, text_column: str) -> Path:
    """Where the tokens of these rows are kept, beside the cache of the `datasets` library."""
    import datasets

    facts = (split, source_fingerprint(rows), tokenizer.identity, text_column, FORMAT, SHARD_TOKENS)
    key = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:32]
    return Path(datasets.config.HF_DATASETS_CACHE).parent / "dist_amp" / "tokens" / key


class TokenizedWhenRead:
    """Rows that are tokenized when they are read: no lengths are known, and rows without anything to learn stay in."""

    def __init__(self, rows: Any, tokenizer: Tokenizer, text_column: str):
        if tokenizer.chat is not None and "strftime_now" in str(tokenizer.chat.chat_template) and are_chats(rows):
            raise ConfigError(
                "the chat template writes today's date (strftime_now), so rows that are tokenized as they are read "
                "(data.view=parquet) would differ after a resume; tokenize them first, by python -m dist_amp.tokenize"
            )
        self.rows, self.tokenizer, self.text_column = needed_columns(rows, text_column), tokenizer, text_column
        facts = f"{source_fingerprint(rows)}\n{tokenizer.identity}\n{text_column}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:32]
        if hasattr(self.rows, "shuffled"):  # not that of `rows`, which would set up a view that nothing reads
            self.shuffled = self.rows.shuffled

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Tensor]]:
        return [
            self._encoded(number, row) for number, row in zip(numbers, self.rows.__getitems__(numbers), strict=True)
        ]

    def _encoded(self, number: int, row: dict[str, Any]) -> dict[str, Tensor]:
        ids, labels = encode_row(number, row, self.tokenizer, self.text_column)
        if not ids:
            raise DataError(f"row {number} has no tokens; remove it, or use dist_amp.tokenize, which leaves it out")
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor([NOT_LEARNED, *labels[1:]])}
