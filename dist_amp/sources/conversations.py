"""Chats, prompts with completions, and plain text as tokens, with labels for what is to be learned.

A row has the columns "messages", a chat, of which the assistant's turns are learned; or "prompt" and "completion",
texts or messages, of which the completion is learned; or `data.text_column`, all of which is learned.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from dist_amp.errors import DataError, Failure, first_line, in_one_line
from dist_amp.settings import DataConfig
from dist_amp.sources.load import load_rows, warn
from dist_amp.sources.mixture import source_config, tables_of
from dist_amp.sources.token_shards import NOT_LEARNED, holds_tokens, read_manifest
from dist_amp.sources.tokenizer import Tokenizer

MESSAGES_COLUMN, PROMPT_COLUMN, COMPLETIONS = (
    "messages",
    "prompt",
    "completion",
)  # columns of rows in place of data.text_column
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")  # a chat template that says what the assistant generates


def check_rows(rows: Any, text_column: str, tokenizer: Tokenizer) -> None:
    """Errors: DataError for rows that have none of the forms above, or are chats where there is no chat template."""
    columns = rows.column_names
    if not {MESSAGES_COLUMN, text_column} & set(columns) and not {PROMPT_COLUMN, COMPLETIONS} <= set(columns):
        raise DataError(
            f"rows have the columns {', '.join(columns)}; they need messages, or prompt and completion, or "
            f"data.text_column={text_column}: rename the columns, or name another text column"
        )
    if tokenizer.chat is None and are_chats(rows):
        raise DataError(
            "rows are chats, but the tokenizer has no chat template; use a chat model's tokenizer, or prompt and "
            "completion as texts"
        )


def are_chats(rows: Any) -> bool:
    """Whether rows have messages, not texts."""
    columns = set(rows.column_names)
    return MESSAGES_COLUMN in columns or (
        {PROMPT_COLUMN, COMPLETIONS} <= columns and len(rows) > 0 and isinstance(rows[0][PROMPT_COLUMN], list)
    )


def needed_columns(rows: Any, text_column: str) -> Any:
    """The rows with those columns alone that `encode` reads: others, such as images, cost time."""
    needed = (MESSAGES_COLUMN, PROMPT_COLUMN, COMPLETIONS, text_column)
    return rows.select_columns([column for column in rows.column_names if column in needed])


def asks_in_turns(data: DataConfig, tokenizer: Any) -> bool:
    """Whether a prompt is a user's turn: the tokenizer has a chat template, and the rows are chats or can't be read."""
    if tokenizer.chat_template is None:
        return False
    for name, table in tables_of(data).items():
        data = source_config(data, name, table)
        break
    try:
        if holds_tokens(data.path):
            return any(split.chats for split in read_manifest(Path(data.path)).splits.values())
        return are_chats(load_rows(data, "train", MESSAGES_COLUMN, PROMPT_COLUMN))
    except Failure as error:
        warn(f"the prompt is rendered as a user's turn, but the rows are not known: {first_line(error)}")
        return True


def encode_row(number: int, row: dict[str, Any], tokenizer: Tokenizer, text_column: str) -> tuple[list[int], list[int]]:
    """`encode`, with the row's number in its errors: DataError for what can't be encoded."""
    try:
        return encode(row, tokenizer, text_column)
    except DataError as error:
        raise DataError(f"row {number}: {error}") from error
    except Exception as error:  # templates raise what they like
        raise DataError(f"row {number} can't be encoded: {in_one_line(error)}; correct or remove it") from error


def encode(row: dict[str, Any], tokenizer: Tokenizer, text_column: str) -> tuple[list[int], list[int]]:
    """(token ids, labels) of one row. A text ends with the tokenizer's end of document, if it has one."""
    if MESSAGES_COLUMN in row:
        return encode_chat(turns(row, MESSAGES_COLUMN), tokenizer.chat)
    pair = PROMPT_COLUMN in row and COMPLETIONS in row
    if pair and isinstance(row[PROMPT_COLUMN], list):
        asked = turns(row, PROMPT_COLUMN)
        return encode_chat(asked + turns(row, COMPLETIONS), tokenizer.chat, learned_from=len(asked))
    for column in (PROMPT_COLUMN, COMPLETIONS) if pair else (text_column,):
        if not isinstance(row[column], str):
            raise DataError(
                f"the column {column} holds {type(row[column]).__name__}, not text; name a column of text, or remove "
                "such rows"
            )
    prompt, text = (row[PROMPT_COLUMN], row[PROMPT_COLUMN] + row[COMPLETIONS]) if pair else ("", row[text_column])
    ids = tokenizer.encode(text)
    start = common_prefix(ids, tokenizer.encode(prompt)) if prompt else 0
    if tokenizer.end is not None and ids[-1:] != [tokenizer.end]:
        ids = [*ids, tokenizer.end]
    return ids, [NOT_LEARNED] * start + ids[start:]


def turns(row: dict[str, Any], column: str) -> list[Any]:
    """The messages in a column. Errors: DataError for what is no list of {"role", "content"}."""
    if not isinstance(row[column], list):
        raise DataError(f"{column} is {type(row[column]).__name__}; make it a list of messages with role and content")
    for message in row[column]:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            what = f"the keys {', '.join(message)}" if isinstance(message, dict) else f"type {type(message).__name__}"
            raise DataError(
                f"a message in {column} has {what}; it needs role (system, user or assistant) and content: rename or "
                "convert them"
            )
    return row[column]


def encode_chat(messages: list[Any], tokenizer: Any, learned_from: int = 0) -> tuple[list[int], list[int]]:
    """(token ids, labels) of a chat; of its messages from `learned_from` on, the assistant's are learned.

    A template with {% generation %} says which tokens are the assistant's. Without, they are those by which the chat
    gets longer when the turn is added; turns that a template renders in another way later, or after a prompt that it
    renders in another way, are not learned.
    Errors: DataError for a chat with answers of which nothing would be learned.
    """
    if marked := bool(MARKS_ANSWERS.search(str(tokenizer.chat_template))):
        chat = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = chat["input_ids"], chat["assistant_masks"]
        start = common_prefix(ids, rendered(messages[:learned_from], tokenizer))
        pairs = enumerate(zip(ids, mask, strict=True))
        labels = [one if here and n >= start else NOT_LEARNED for n, (one, here) in pairs]
    else:
        ids = rendered(messages, tokenizer)
        labels = [NOT_LEARNED] * len(ids)
        for number in range(learned_from, len(messages)):
            if messages[number]["role"] == "assistant":
                prompt = rendered(messages[:number], tokenizer, add_generation_prompt=True)
                start = common_prefix(ids, prompt)
                if start < len(prompt):  # what opens an answer may differ, but not what was said before
                    before = rendered(messages[:number], tokenizer)
                    if common_prefix(ids, before) < len(before) - 1:  # its last token may merge with the next
                        continue
                end = common_prefix(ids, rendered(messages[: number + 1], tokenizer))
                labels[start:end] = ids[start:end]
    answered = any(one["role"] == "assistant" and one["content"] for one in messages[learned_from:])
    if answered and all(label == NOT_LEARNED for label in labels):
        why = "its {% generation %} marks none" if marked else "it renders them in another way than the prompt before"
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} finds no token of the assistant's answers: {why}; put "
            "{% generation %} and {% endgeneration %} around what the assistant writes"
        )
    return ids, labels


def rendered(messages: list[Any], tokenizer: Any, **options: Any) -> list[int]:
    """The token ids of a chat; of none, none: some templates fail on it."""
    return tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"] if messages else []


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first elements are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
