"""Chats, prompts with completions, and plain text as tokens, with labels for what is learned.

A row has the column "messages", a chat, of which the assistant's turns are learned; or "prompt"
and "completion", texts or messages, of which the completion is learned; or `data.text_column`, all
of which is learned.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dist_amp.distributed.process import warn
from dist_amp.errors import DataError, Failure, first_line, in_one_line
from dist_amp.settings import DataConfig
from dist_amp.sources.load import load_rows
from dist_amp.sources.mixture import source_configs
from dist_amp.sources.token_shards import IGNORE_INDEX, holds_tokens, read_manifest
from dist_amp.sources.tokenizer import Tokenizer

# A chat template that says what the assistant generates.
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
Encoded = tuple[list[int], list[int]]  # token ids, labels


def check_rows(rows: Any, text_column: str, tokenizer: Tokenizer) -> None:
    """Errors: DataError for rows of none of these forms, or chats without a chat template."""
    columns = set(rows.column_names)
    if not {"prompt", "completion"} <= columns and not {"messages", text_column} & columns:
        raise DataError(
            f"rows have the columns {', '.join(rows.column_names)}; they need messages, or prompt "
            f"and completion, or data.text_column={text_column}: rename or name a column"
        )
    if tokenizer.chat is None and are_chats(rows):
        raise DataError(
            "rows are chats, but the tokenizer has no chat template; use a chat model's tokenizer, "
            "or prompt and completion as texts"
        )


def are_chats(rows: Any) -> bool:
    """Whether rows have messages, not texts."""
    columns = set(rows.column_names)
    if not {"prompt", "completion"} <= columns or "messages" in columns:
        return "messages" in columns
    return len(rows) > 0 and isinstance(rows[0]["prompt"], list)


def asks_in_turns(data: DataConfig, tokenizer: Any) -> bool:
    """Whether a prompt is a user's turn: with a chat template, if the rows are chats or unknown."""
    if tokenizer.chat_template is None:
        return False
    source = next(iter(source_configs(data).values()), data)
    try:
        if holds_tokens(source.path):
            splits = read_manifest(Path(source.path)).splits
            return any(split.chats for split in splits.values())
        return are_chats(load_rows(source, "train", "messages", "prompt"))
    except Failure as error:
        why = first_line(error)
        warn(f"the prompt is rendered as a user's turn, but the rows are not known: {why}")
        return True


class RowEncoder:
    """Rows as tokens; of their columns only those that are needed: images, for one, cost time."""

    def __init__(self, rows: Any, tokenizer: Tokenizer, text_column: str):
        needed = ("messages", "prompt", "completion", text_column)
        self.rows = rows.select_columns([name for name in rows.column_names if name in needed])
        self.tokenizer = tokenizer
        self.text_column = text_column

    def encode(self, numbers: Sequence[int]) -> list[Encoded]:
        """(token ids, labels) of rows; a first token is predicted from nothing, so not learned.

        Errors: DataError, with the row's number in its source, for what can't be encoded.
        """
        encoded = []
        rows = self.rows.__getitems__(list(numbers))
        for number, row in zip(numbers, rows, strict=True):
            try:
                ids, labels = encode(row, self.tokenizer, self.text_column)
                largest = max(ids, default=0)
                if largest >= self.tokenizer.vocabulary:  # it would wrap around in a file
                    raise DataError(
                        f"the tokenizer {self.tokenizer.name} makes the id {largest}, and its "
                        f"vocabulary says that ids are below {self.tokenizer.vocabulary}; correct "
                        "the tokenizer"
                    )
            except Exception as error:  # templates raise what they like
                chosen = getattr(self.rows, "_indices", None)  # of a part of a `datasets.Dataset`
                if chosen is not None:
                    number = chosen.column(0)[number].as_py()
                what = f"row {number} can't be encoded: {in_one_line(error)}; correct or remove it"
                if isinstance(error, DataError):
                    what = f"row {number}: {error}"
                raise DataError(what) from error
            encoded.append((ids, [IGNORE_INDEX, *labels[1:]]))
        return encoded


def encode(row: dict[str, Any], tokenizer: Tokenizer, text_column: str) -> Encoded:
    """(token ids, labels) of one row; a text ends with the tokenizer's end of document, if any."""
    if "messages" in row:
        return encode_chat(turns(row, "messages"), tokenizer.chat)
    if "prompt" not in row or "completion" not in row:
        return encode_text("", text_of(row, text_column), tokenizer)
    if isinstance(row["prompt"], list):
        prompt = turns(row, "prompt")
        return encode_chat(prompt + turns(row, "completion"), tokenizer.chat, len(prompt))
    return encode_text(text_of(row, "prompt"), text_of(row, "completion"), tokenizer)


def encode_text(prompt: str, text: str, tokenizer: Tokenizer) -> Encoded:
    """(token ids, labels) of a text after a prompt, which is not learned."""
    ids = tokenizer.encode(prompt + text)
    start = 0
    if prompt:
        start = common_prefix(ids, tokenizer.encode(prompt))
    if tokenizer.end is not None and ids[-1:] != [tokenizer.end]:
        ids = [*ids, tokenizer.end]
    return ids, [IGNORE_INDEX] * start + ids[start:]


def text_of(row: dict[str, Any], column: str) -> str:
    """Errors: DataError for what is no text."""
    text = row[column]
    if not isinstance(text, str):
        raise DataError(
            f"the column {column} holds {type(text).__name__}, not text; name a column of text, or "
            "remove such rows"
        )
    return text


def turns(row: dict[str, Any], column: str) -> list[Any]:
    """The messages in a column. Errors: DataError for what is no list of {"role", "content"}."""
    messages = row[column]
    if isinstance(messages, list):
        needed = {"role", "content"}
        if all(isinstance(one, dict) and needed <= one.keys() for one in messages):
            return messages
    raise DataError(
        f"{column} holds {messages!s:.100}; make it a list of messages, each with role (system, "
        "user or assistant) and content"
    )


def encode_chat(messages: list[Any], tokenizer: Any, learned_from: int = 0) -> Encoded:
    """(token ids, labels) of a chat; of its messages from `learned_from` on, answers are learned.

    Errors: DataError for a chat with answers of which nothing would be learned.
    """
    encode_with = encode_unmarked
    if MARKS_ANSWERS.search(str(tokenizer.chat_template)):
        encode_with = encode_marked
    ids, labels = encode_with(messages, tokenizer, learned_from)
    answered = any(one["role"] == "assistant" and one["content"] for one in messages[learned_from:])
    if answered and all(label == IGNORE_INDEX for label in labels):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} finds no token of the assistant's "
            "answers; put {% generation %} and {% endgeneration %} around what the assistant writes"
        )
    return ids, labels


def encode_marked(messages: list[Any], tokenizer: Any, learned_from: int) -> Encoded:
    """By the template's own marks of what the assistant generates."""
    chat = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = chat["input_ids"]
    start = common_prefix(ids, rendered(messages[:learned_from], tokenizer))
    learned = [0] * start + chat["assistant_masks"][start:]
    return ids, [token if one else IGNORE_INDEX for token, one in zip(ids, learned, strict=True)]


def encode_unmarked(messages: list[Any], tokenizer: Any, learned_from: int) -> Encoded:
    """An answer is what the chat gets longer by when the turn is added.

    Not learned: turns that the template renders in another way later on, or after another prompt.
    """
    ids = rendered(messages, tokenizer)
    labels = [IGNORE_INDEX] * len(ids)
    for number in range(learned_from, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        prompt = rendered(messages[:number], tokenizer, add_generation_prompt=True)
        start = common_prefix(ids, prompt)
        if start < len(prompt):
            # What opens an answer may differ, but not what was said before; its last token may
            # merge with the next.
            before = rendered(messages[:number], tokenizer)
            if common_prefix(ids, before) < len(before) - 1:
                continue
        end = common_prefix(ids, rendered(messages[: number + 1], tokenizer))
        labels[start:end] = ids[start:end]
    return ids, labels


def rendered(messages: list[Any], tokenizer: Any, **options: Any) -> list[int]:
    """The token ids of a chat; of none, none: some templates fail on it."""
    if not messages:
        return []
    return tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first elements are equal."""
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return length
