"""Encode chats, prompts with completions, and plain text as token ids and labels.

The first of these columns that a row has decides its layout:
messages               a chat; the assistant's turns count in the loss
prompt and completion  texts or messages; the completion counts
data.text_column       a text, all of which counts
conversations          a chat in ShareGPT's format

The chat template turns a chat into text. An answer's tokens are those that the template marks with
{% generation %}, or without such marks, those by which the text grows when the answer is added.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from dist_amp.distributed.process import warn
from dist_amp.errors import DataError
from dist_amp.sources.token_shards import IGNORE_INDEX
from dist_amp.sources.tokenizer import Tokenizer

CHAT_ENCODING = 2  # in fingerprints: increase it if the same chats get other tokens or labels
# The column that identifies a layout -> the other columns that are read with it.
LAYOUTS = {
    "messages": ("tools",),
    "prompt": ("completion", "tools"),
    "conversations": ("system", "tools"),
}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant"}  # ShareGPT's, Gemma's
# Keys by which other trainers leave messages out of the loss; rejected, rather than ignored.
OTHER_WEIGHTS = {"train", "training", "trainable", "loss", "loss_mask", "mask"}
# A tag that opens reasoning, such as <think> or [THINK], at the end of a prompt, but not a tag that
# closes it, such as <|END_THINKING|>.
OPENS_THOUGHT = re.compile(
    r"[<\[](?!\W*end)[\w:|]*(think|thought|reason)\w*[|>\]]+\s*$", re.IGNORECASE
)
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
ROWS_TO_TRY = 32  # chats that are encoded at the start, to warn of answers that can't be trained on
Encoded = tuple[list[int], list[int]]  # token ids, labels
Row = dict[str, Any]
Message = Row
Apply = Callable[..., Any]  # apply_chat_template with the row's tools


def layout(columns: Sequence[str], text_column: str) -> str:
    """The column that decides the layout of rows with these columns; "" if no column does."""
    for form in ("messages", "prompt", text_column, "conversations"):
        if form in columns and (form != "prompt" or "completion" in columns):
            return form
    return ""


def columns_read(rows: Any, text_column: str) -> Any:
    """The rows with only the needed columns, since images, for example, take time to decode."""
    form = layout(rows.column_names, text_column)
    needed = (form, *LAYOUTS.get(form, ()))
    return rows.select_columns([name for name in rows.column_names if name in needed])


def are_chats(rows: Any, text_column: str) -> bool:
    form = layout(rows.column_names, text_column)
    if form == "prompt":
        return len(rows) > 0 and isinstance(rows[0]["prompt"], list)
    return form == "messages" or (form != text_column and form in LAYOUTS)


def check_rows(rows: Any, split: str, text_column: str, tokenizer: Tokenizer) -> None:
    """Reject rows of unknown layout and chats without a template; warn of other problems."""
    form = layout(rows.column_names, text_column)
    if not form:
        raise DataError(
            f"rows have the columns {', '.join(rows.column_names)}; they need messages, or prompt "
            f"and completion, or data.text_column={text_column}; rename or choose a column"
        )
    chats = are_chats(rows, text_column)
    if tokenizer.chat is None and chats:
        raise DataError(
            "rows are chats, but the tokenizer has no chat template; use a chat model's tokenizer, "
            "or prompt and completion as texts"
        )
    if split != "train":
        return
    if tokenizer.end is None:
        warn(
            "the tokenizer has no eos_token, so no sample ends with one, and only what a chat "
            "template writes can teach the model to stop; set eos_token in tokenizer_config.json"
        )
    if not chats:
        return
    rows = columns_read(rows, text_column)
    with suppress(Exception):  # reported with its number when the row is encoded
        for row in rows.__getitems__(list(range(min(len(rows), ROWS_TO_TRY)))):
            messages, trained_from = chat_of(row, text_column)
            answers = len(trained_answers(messages, trained_from))
            _, labels = encode_chat(messages, tokenizer.chat, trained_from, row.get("tools"))
            found = sum(a < 0 <= b for a, b in pairwise([IGNORE_INDEX, *labels]))  # unmasked spans
            if found < answers:
                warn(
                    f"only {found} of the {answers} answers of a chat can be trained on: the chat "
                    "template renders the others differently in a longer chat; to train on all, "
                    "put {% generation %} and {% endgeneration %} around what the assistant writes"
                )
                return


def encode(row: Row, tokenizer: Tokenizer, text_column: str) -> Encoded:
    """Returns (token ids, labels) of a row; a text ends with the end-of-document token."""
    form = layout(list(row), text_column)
    if form == "prompt" and not isinstance(row["prompt"], list):
        return encode_text(text_of(row, "prompt"), text_of(row, "completion"), tokenizer)
    if form == text_column != "messages":
        return encode_text("", text_of(row, text_column), tokenizer)
    messages, trained_from = chat_of(row, text_column)
    return encode_chat(messages, tokenizer.chat, trained_from, row.get("tools"))


def encode_text(prompt: str, text: str, tokenizer: Tokenizer) -> Encoded:
    """Returns (token ids, labels) of a prompt and its text; the prompt's labels are masked."""
    ids = tokenizer.encode(prompt + text)
    start = 0
    if prompt:
        start = common_prefix(ids, tokenizer.encode(prompt))
    if tokenizer.end is not None and ids[-1:] != [tokenizer.end]:
        ids = [*ids, tokenizer.end]
    return ids, [IGNORE_INDEX] * start + ids[start:]


def text_of(row: Row, column: str) -> str:
    text = row[column]
    if not isinstance(text, str):
        raise DataError(
            f"the column {column} holds {type(text).__name__}, not text; name a text column, or "
            "remove such rows"
        )
    return text


def chat_of(row: Row, text_column: str) -> tuple[list[Message], int]:
    """Returns (a row's messages, the index of the first message that may be trained on)."""
    form = layout(list(row), text_column)
    if form == "prompt":
        prompt = turns(row, "prompt")
        return prompt + turns(row, "completion"), len(prompt)
    messages = turns(row, form)
    if row.get("system") and form == "conversations":
        if any(message["role"] == "system" for message in messages):
            raise DataError("the row has a system column and a system message; keep one of them")
        messages.insert(0, {"role": "system", "content": text_of(row, "system")})
    return messages, 0


def turns(row: Row, column: str) -> list[Message]:
    """The messages in a column, checked: with known roles, contents as one string each, and without
    the nulls that Arrow adds. Raises DataError for anything else.
    """
    messages = without_nulls(row[column])
    problem = DataError(
        f"{column} holds {row[column]!s:.100}; make it a list of messages, each with role (system, "
        "user or assistant) and content, a text"
    )
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise problem
    for message in messages:
        if "from" in message and "role" not in message:  # ShareGPT
            message["role"] = message.pop("from")
            message["content"] = message.pop("value", None)
        role = message["role"] = ROLE_ALIASES.get(message.get("role"), message.get("role"))
        content = message.get("content")
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        message["content"] = content
        is_call = content is None and "tool_calls" in message
        if not isinstance(role, str) or not (isinstance(content, str) or is_call):
            raise problem
        if role not in ROLES:
            raise DataError(f"{column} has the unknown role {role}; use one of {', '.join(ROLES)}")
        weight = message.get("weight", 0)
        unread = OTHER_WEIGHTS & message.keys()
        if unread or weight not in (0, 1) or (weight and role != "assistant"):
            raise DataError(
                f"{column} has {', '.join(unread) or f'weight {weight!r}'} in a message of the "
                f"{role}; use only weight, 0 (not trained on) or 1, in the assistant's messages"
            )
    return messages  # type: ignore[no-any-return]


def without_nulls(value: Any) -> Any:
    """A copy without nulls: Arrow gives each dict of a column the keys of all, with null values."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def trained_answers(messages: list[Message], trained_from: int) -> list[int]:
    """The indices of the assistant's messages that are trained on: not empty, nor of weight 0."""
    return [
        number
        for number, message in enumerate(messages)
        if number >= trained_from
        and message["role"] == "assistant"
        and message.get("weight", 1)
        and (message["content"] or message.get("tool_calls"))
    ]


def encode_chat(
    messages: list[Message], tokenizer: Any, trained_from: int = 0, tools: Any = None
) -> Encoded:
    """Returns (token ids, labels) of a chat; trains on its answers from `trained_from` on."""
    if not messages:
        return [], []  # some templates fail on an empty chat
    trained = trained_answers(messages, trained_from)
    messages = [{key: each[key] for key in each if key != "weight"} for each in messages]
    if isinstance(tools, str) and tools.strip():
        tools = json.loads(tools)
    tools = without_nulls(tools) or None
    apply = partial(tokenizer.apply_chat_template, tools=tools)
    text = apply(messages, tokenize=False)
    check_tools(messages, tools, text, tokenizer)
    if MARKS_ANSWERS.search(str(tokenizer.chat_template)):
        ids, labels = encode_marked(messages, trained, apply)
    else:
        ids, labels = encode_unmarked(messages, trained, text, tokenizer, apply)
    if trained and all(label == IGNORE_INDEX for label in labels):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} identifies no token of the assistant's "
            "answers; put {% generation %} and {% endgeneration %} around what the assistant writes"
        )
    return ids, labels


def check_tools(messages: list[Message], tools: Any, text: str, tokenizer: Any) -> None:
    """Raises DataError if the template leaves out tools or calls, or quotes arguments twice."""
    template = f"the chat template of {tokenizer.name_or_path}"
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for key, content in (("tools", tools), ("tool_calls", calls)):
        if content and key not in str(tokenizer.chat_template):
            raise DataError(
                f"{template} leaves out {key}; use one that writes them, or remove such rows"
            )
    for call in calls:
        arguments = call.get("function", call).get("arguments")
        if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in text:
            raise DataError(
                f"{template} quotes the arguments {arguments:.60} of a tool call once more; make "
                "them an object, not a JSON string"
            )


def encode_marked(messages: list[Message], trained: list[int], apply: Apply) -> Encoded:
    """Encode a chat whose template marks the answers by {% generation %}."""
    chat = apply(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = chat["input_ids"]
    mask = chat["assistant_masks"]
    answers = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
    if trained != answers:
        # At each token, how many marked spans have begun: the number of its answer, from 1 on.
        begun = list(accumulate(int(a < b) for a, b in pairwise([0, *mask])))
        if max(begun, default=0) != len(answers):
            raise DataError(
                f"the chat template marks {max(begun, default=0)} stretches of {len(answers)} "
                "answers, so the answers to leave out can't be identified; mark each answer once"
            )
        pairs = zip(mask, begun, strict=True)
        mask = [marked and answers[number - 1] in trained for marked, number in pairs]
    pairs = zip(ids, mask, strict=True)
    return ids, [token if marked else IGNORE_INDEX for token, marked in pairs]


def encode_unmarked(
    messages: list[Message], trained: list[int], text: str, tokenizer: Any, apply: Apply
) -> Encoded:
    """Encode a chat without marks; an answer is what the text grows by when the answer is added.

    Reasoning is part of the answer, with the tag that opens it, even where a template puts that tag
    at the end of the prompt, alone or in an empty block. Only tokens that are the same in the whole
    chat and in the chat that ends with the answer count, and only if the turns before are, too.
    """
    ids = ids_of(text, tokenizer)
    labels = [IGNORE_INDEX] * len(ids)
    for number in trained:
        if number:
            prompt_text = apply(messages[:number], tokenize=False, add_generation_prompt=True)
        else:  # no turn before it, and templates fail on an empty chat: compare two answers instead
            other = "1" if (messages[0]["content"] or "").strip().startswith("0") else "0"
            prompt_text = apply([{"role": "assistant", "content": other}], tokenize=False)
        shared = text[: common_prefix(text, prompt_text)]
        start = common_prefix(ids, ids_of(OPENS_THOUGHT.sub("", shared), tokenizer))
        if number and shared != prompt_text:
            # What opens an answer may differ, but not the turns before it, except for their last
            # token, which may merge with what follows.
            before = ids_of(apply(messages[:number], tokenize=False), tokenizer)
            if common_prefix(ids, before) < len(before) - 1:
                continue
        end = common_prefix(ids, ids_of(apply(messages[: number + 1], tokenize=False), tokenizer))
        labels[start:end] = ids[start:end]
    return ids, labels


def ids_of(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[no-any-return]


def common_prefix(a: Any, b: Any) -> int:
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (of any sequences)
