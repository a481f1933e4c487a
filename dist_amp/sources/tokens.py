"""Documents as tokens.

Tokens can be produced in three ways: from pre-tokenized files, from rows that are tokenized once
into the cache, or from rows as they are read.
"""

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
from dist_amp.sources.token_shards import (
    FORMAT,
    IGNORE_INDEX,
    TokenShards,
    holds_tokens,
    read_manifest,
)
from dist_amp.sources.tokenizer import Tokenizer, open_tokenizer
from dist_amp.sources.tokenizing import SHARD_TOKENS, source_fingerprint, tokenize

log = logging.getLogger(__name__)
# Settings of rows, which have no effect on tokens that were made before.
ROW_SETTINGS = ("name", "split", "validation_split", "text_column", "view")


def token_documents(data: DataConfig, split: str, tokenizer: Tokenizer, rows: Any = None) -> Any:
    """A split's documents as {"input_ids" [n], "labels" [n]} int64; None without such a split.

    rows: in place of those that `data` names, such as what a task ships with. labels: the ids, or
    IGNORE_INDEX (-100) where a token is not learned. The dataset also has `fingerprint` and, except
    where a Parquet view's rows are tokenized as they are read, `lengths` and `firsts`. Errors:
    DataError for rows or tokens that do not fit; ConfigError for tokens of another tokenizer.
    """
    check_tokenizer(data, tokenizer)
    if data.format == "tokens" or (data.format == "auto" and holds_tokens(data.path)):
        for name in ROW_SETTINGS:
            if (value := getattr(data, name)) != getattr(DataConfig, name):
                raise ConfigError(
                    f"data.{name}={value} has no effect: data.path={data.path} holds tokens, whose "
                    "rows dist_amp.tokenize chose; remove it"
                )
        return open_shards(Path(data.path.removeprefix("file://")), split, tokenizer)
    if rows is not None and data.view == "parquet":
        raise ConfigError(
            "data.view=parquet reads files, and the task's own text is used; set data.path"
        )
    if rows is None:
        rows = load_rows(data, split, MESSAGES_COLUMN, PROMPT_COLUMN)
    if rows is None:
        return None
    check_rows(rows, data.text_column, tokenizer)
    if tokenizer.end is None and split == "train":
        warn(
            "the tokenizer has no eos_token, so no sample ends with one, and only what a chat "
            "template writes can teach the model to stop; set eos_token in tokenizer_config.json"
        )
    if not hasattr(rows, "map"):
        return TokenizedWhenRead(rows, tokenizer, data.text_column)
    folder = cache_folder(split, rows, tokenizer, data.text_column)
    tokenize(folder, {split: rows}, tokenizer, data.text_column, log.info, data.workers)
    return open_shards(folder, split, tokenizer)


def check_tokenizer(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Errors: ConfigError if data.tokenizer is not the task's tokenizer."""
    if data.tokenizer in ("auto", tokenizer.name):
        return
    other = open_tokenizer(data.tokenizer)
    if other.identity != tokenizer.identity:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer} ({other.identity}) is not the task's own, "
            f"{tokenizer.name} ({tokenizer.identity}); leave data.tokenizer out"
        )


def open_shards(folder: Path, split: str, tokenizer: Tokenizer) -> TokenShards | None:
    """The tokens of a split; None if no validation split was made."""
    manifest = read_manifest(folder)
    if manifest.identity != tokenizer.identity:
        raise ConfigError(
            f"data.path={folder} holds tokens of the tokenizer {manifest.tokenizer} "
            f"({manifest.identity}), not of {tokenizer.name} ({tokenizer.identity}); set "
            f"data.tokenizer={manifest.tokenizer}, or make them again"
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
    key = short_hash(*facts)
    return Path(datasets.config.HF_DATASETS_CACHE).parent / "dist_amp" / "tokens" / key


def short_hash(*facts: Any) -> str:
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:32]


class TokenizedWhenRead:
    """Rows that are tokenized when they are read: their lengths are not known in advance.

    Rows without anything to learn stay in.
    """

    def __init__(self, rows: Any, tokenizer: Tokenizer, text_column: str):
        template = getattr(tokenizer.chat, "chat_template", "")
        if "strftime_now" in str(template) and are_chats(rows):
            raise ConfigError(
                "the chat template writes today's date (strftime_now), so rows that are tokenized "
                "as they are read (data.view=parquet) would differ after a resume; tokenize them "
                "first, by python -m dist_amp.tokenize"
            )
        self.rows = needed_columns(rows, text_column)
        self.tokenizer = tokenizer
        self.text_column = text_column
        self.fingerprint = short_hash(source_fingerprint(rows), tokenizer.identity, text_column)
        if hasattr(self.rows, "shuffled"):
            self.shuffled = self.rows.shuffled

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Tensor]]:
        rows = self.rows.__getitems__(numbers)
        return [self._encoded(number, row) for number, row in zip(numbers, rows, strict=True)]

    def _encoded(self, number: int, row: dict[str, Any]) -> dict[str, Tensor]:
        ids, labels = encode_row(number, row, self.tokenizer, self.text_column)
        if not ids:
            raise DataError(
                f"row {number} has no tokens; remove it, or use dist_amp.tokenize, which leaves it "
                "out"
            )
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor([IGNORE_INDEX, *labels[1:]])}
