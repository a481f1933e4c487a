"""Chats, prompts with completions, and plain text as tokens, with labels for what is to be learned."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dist_amp.errors import DataError, Failure, first_line, in_one_line
from dist_amp.settings import DataConfig
from dist_amp.sources.load import load_split, warn

NOT_LEARNED = -100  # the label that cross-entropy ignores
CHATS, TEXTS = "messages", "prompt"  # columns of rows in place of data.text_column
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")  # a chat template that says what the assistant generates


def tokenized(data: DataConfig, split: str, tokenizer: Any, length: int) -> Any:
    """A split's rows as samples {"input_ids", "labels"}, each of at most `length` tokens; None without such a split.

    Columns: "messages", a chat, of which the assistant's turns are learned; or "prompt" and "completion", texts or
    messages, of which the completion is learned; or `data.text_column`, all of it. Samples with nothing to learn are
    left out, with a warning. Errors: DataError for a row or tokenizer that does not fit, and if nothing is left.
    """
    rows = load_split(data, split, CHATS, TEXTS)
    if rows is None:
        return None
    columns = rows.column_names
    if not {CHATS, data.text_column} & set(columns) and "completion" not in columns:
        raise DataError(
            f"rows have the columns {', '.join(columns)}; they need messages, or prompt and completion, or "
            f"data.text_column={data.text_column}: rename the columns, or name another text column"
        )
    if are_chats(rows) and tokenizer.chat_template is None:
        raise DataError(
            "rows are chats, but the tokenizer has no chat template; use a chat model's tokenizer, or prompt and "
            "completion as texts"
        )
    if tokenizer.eos_token_id is None and split == "train":
        warn(
            "the tokenizer has no eos_token, so no sample ends with one, and only what a chat template writes can "
            "teach the model to stop; set eos_token in tokenizer_config.json"
        )
    options = {"tokenizer": tokenizer, "text_column": data.text_column, "length": length}
    samples = rows.map(encode_rows, with_indices=True, batched=True, remove_columns=columns, fn_kwargs=options)
    if len(samples) == 0:
        raise DataError(
            f"none of the {len(rows)} rows has anything to learn within task.args.length={length} tokens; use longer "
            "samples, and check that the assistant's turns or completions are not empty"
        )
    if len(samples) < len(rows):
        warn(
            f"{len(rows) - len(samples)} of {len(rows)} {split} rows are left out: within task.args.length={length} "
            "tokens they have no answer to learn, because there is none or it comes later"
        )
    return samples.with_format("torch")


def are_chats(rows: Any) -> bool:
    """Whether a `datasets.Dataset` has messages, not texts."""
    columns = set(rows.column_names)
    return CHATS in columns or ({TEXTS, "completion"} <= columns and len(rows) > 0 and isinstance(rows[0][TEXTS], list))


def asks_in_turns(data: DataConfig, tokenizer: Any) -> bool:
    """Whether a prompt is a user's turn: the tokenizer has a chat template, and the rows are chats or can't be read."""
    if tokenizer.chat_template is None:
        return False
    try:
        return are_chats(load_split(data, "train", CHATS, TEXTS))
    except Failure as error:
        warn(f"the prompt is rendered as a user's turn, but the rows are not known: {first_line(error)}")
        return True


def encode_rows(
    rows: dict[str, list[Any]], indices: Sequence[int], tokenizer: Any, text_column: str, length: int
) -> dict[str, list[list[int]]]:
    """Columns of rows as columns of samples."""
    samples = []
    for number, values in zip(indices, zip(*rows.values(), strict=True), strict=True):
        row = dict(zip(rows, values, strict=True))
        try:
            ids, labels = encode(row, tokenizer, text_column)
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
        except Exception as error:  # templates raise what they like
            raise DataError(f"row {number} can't be encoded: {in_one_line(error)}; correct or remove it") from error
        if any(label != NOT_LEARNED for label in labels[1:length]):  # the first token is predicted from nothing
            samples.append((ids[:length], labels[:length]))
    return {"input_ids": [ids for ids, _ in samples], "labels": [labels for _, labels in samples]}


def encode(row: dict[str, Any], tokenizer: Any, text_column: str) -> tuple[list[int], list[int]]:
    """(token ids, labels) of one row."""
    if CHATS in row:
        return encode_chat(turns(row, CHATS), tokenizer)
    pair = TEXTS in row and "completion" in row
    if pair and isinstance(row[TEXTS], list):
        asked = turns(row, TEXTS)
        return encode_chat(asked + turns(row, "completion"), tokenizer, learned_from=len(asked))
    prompt, text = (row[TEXTS], row[TEXTS] + row["completion"]) if pair else ("", row[text_column])
    ids = tokenizer(text)["input_ids"]
    start = common_prefix(ids, tokenizer(prompt)["input_ids"]) if prompt else 0
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
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
    gets longer when the turn is added; a template that renders earlier turns in another way later loses those turns.
    """
    if MARKS_ANSWERS.search(str(tokenizer.chat_template)):
        chat = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = chat["input_ids"], chat["assistant_masks"]
        start = common_prefix(ids, rendered(messages[:learned_from], tokenizer))
        return ids, [
            one if here and n >= start else NOT_LEARNED for n, (one, here) in enumerate(zip(ids, mask, strict=True))
        ]
    ids = rendered(messages, tokenizer)
    labels = [NOT_LEARNED] * len(ids)
    for number in range(learned_from, len(messages)):
        if messages[number]["role"] == "assistant":
            start = common_prefix(ids, rendered(messages[:number], tokenizer, add_generation_prompt=True))
            end = common_prefix(ids, rendered(messages[: number + 1], tokenizer))
            labels[start:end] = ids[start:end]
    return ids, labels


def rendered(messages: list[Any], tokenizer: Any, **options: Any) -> list[int]:
    """The token ids of a chat; of none, none: some templates fail on it."""
    return tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"] if messages else []


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first elements are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def padded(samples: Sequence[dict[str, Tensor]], pad_id: int) -> dict[str, Tensor]:
    """A batch, padded on the right to the longest sample: input_ids, attention_mask and labels, each [B, T] int64."""
    ids, labels = [sample["input_ids"] for sample in samples], [sample["labels"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=NOT_LEARNED),
    }
