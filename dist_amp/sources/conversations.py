"""Chats, prompts with completions, and plain text as tokens, with labels for what is learned.

A row has the column "messages", a chat, of which the assistant's turns are learned; or "prompt"
and "completion", texts or messages, of which the completion is learned; or `data.text_column`, all
of which is learned; or else it is a chat of ShareGPT ("conversations") or Alpaca ("instruction").
"""

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dist_amp.distributed.process import warn
from dist_amp.errors import DataError, Failure, first_line, in_one_line, nearest_name
from dist_amp.settings import DataConfig
from dist_amp.sources.load import load_rows
from dist_amp.sources.mixture import source_configs
from dist_amp.sources.token_shards import IGNORE_INDEX, holds_tokens, read_manifest
from dist_amp.sources.tokenizer import Tokenizer

log = logging.getLogger(__name__)
CHAT_ENCODING = 2  # one more whenever the same chats get other tokens or labels
# Forms of rows: the column that tells -> the others that are read.
LAYOUTS = {
    "messages": ("tools",),
    "prompt": ("completion", "tools"),
    "conversations": ("system", "tools"),
    "instruction": ("input", "output", "system"),
}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SAME_ROLE = {"human": "user", "gpt": "assistant", "model": "assistant"}  # ShareGPT's, Gemma's
OTHER_WEIGHTS = {"train", "training", "trainable", "loss", "loss_mask", "mask"}
THOUGHTS = re.compile(r"(?:<think>)?(.*?)</think>", re.DOTALL)
# The tag with which a template may end a prompt, such as <think> or [THINK].
FORCED = re.compile(r"[<\[][\w:|]*(think|thought|reason)\w*[|>\]]+\s*$", re.IGNORECASE)
# An empty thought, with which a template may end a prompt as well.
NO_THOUGHT = re.compile(r"[<\[]think[>\]]\s*[<\[]/think[>\]]\s*$", re.IGNORECASE)
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
ROWS_TO_TRY = 32
Encoded = tuple[list[int], list[int]]  # token ids, labels
Row = dict[str, Any]
Message = Row
Apply = Callable[..., Any]  # apply_chat_template, with the row's tools


def layout(columns: Sequence[str], text_column: str) -> str:
    """The column that tells the form of rows; "" for none of the forms."""
    needs = {"prompt": "completion", "instruction": "output"}
    for form in ("messages", "prompt", text_column, "conversations", "instruction"):
        if {form, needs.get(form, form)} <= set(columns):
            return form
    return ""


def columns_read(columns: Sequence[str], text_column: str) -> list[str]:
    form = layout(columns, text_column)
    return [name for name in columns if name in (form, *LAYOUTS.get(form, ()))]


def check_rows(rows: Any, split: str, text_column: str, tokenizer: Tokenizer) -> None:
    """Refuse rows of no form, or chats without a template; warn of what works and may surprise."""
    form = layout(rows.column_names, text_column)
    if not form:
        raise DataError(
            f"rows have the columns {', '.join(rows.column_names)}; they need messages, or prompt "
            f"and completion, or data.text_column={text_column}: rename or name a column"
        )
    chats = are_chats(rows, text_column)
    if tokenizer.chat is None and chats:
        raise DataError(
            "rows are chats, but the tokenizer has no chat template; use a chat model's tokenizer, "
            "or prompt and completion as texts"
        )
    if split != "train":
        return
    if form in ("conversations", "instruction"):
        read = columns_read(rows.column_names, text_column)
        others = ", ".join(sorted({*rows.column_names} - {*read})) or "none"
        log.info("data: chats from the columns %s; not read: %s", ", ".join(read), others)
    if tokenizer.end is None:
        warn(
            "the tokenizer has no eos_token, so no sample ends with one, and only what a chat "
            "template writes can teach the model to stop; set eos_token in tokenizer_config.json"
        )
    if chats:
        rows = rows.select_columns(columns_read(rows.column_names, text_column))
        some = rows.__getitems__(list(range(min(len(rows), ROWS_TO_TRY))))
        warn_of_template(some, text_column, tokenizer.chat)


def warn_of_template(rows: list[Any], text_column: str, tokenizer: Any) -> None:
    """Warn if a template keeps answers of these rows from being learned; never fails."""
    for row in rows:
        with suppress(Exception):
            messages, learned_from = chat_of(row, text_column, tokenizer)
            answers = len(to_learn(messages, learned_from))
            _, labels = encode_chat(messages, tokenizer, learned_from, row.get("tools"))
            found = sum(a < 0 <= b for a, b in pairwise([IGNORE_INDEX, *labels]))
            if found < answers:
                warn(
                    f"of the {answers} answers of a chat {found} can be learned: the chat template "
                    "renders the others in another way once more is said; put {% generation %} "
                    "and {% endgeneration %} around what the assistant writes to learn all"
                )
                return


def are_chats(rows: Any, text_column: str) -> bool:
    form = layout(rows.column_names, text_column)
    if form == "prompt":
        return len(rows) > 0 and isinstance(rows[0]["prompt"], list)
    if form == text_column:
        return form == "messages"
    return form in ("messages", "conversations", "instruction")


def asks_in_turns(data: DataConfig, tokenizer: Any) -> bool:
    """Whether a prompt is a user's turn: with a chat template, if the rows are chats or unknown."""
    if tokenizer.chat_template is None:
        return False
    source = next(iter(source_configs(data).values()), data)
    try:
        if holds_tokens(source.path):
            splits = read_manifest(Path(source.path)).splits
            return any(split.chats for split in splits.values())
        return are_chats(load_rows(source, "train", *LAYOUTS), source.text_column)
    except Failure as error:
        why = first_line(error)
        warn(f"the prompt is rendered as a user's turn, but the rows are not known: {why}")
        return True


class RowEncoder:
    """Rows as tokens; of their columns only those that are needed: images, for one, cost time."""

    def __init__(self, rows: Any, tokenizer: Tokenizer, text_column: str):
        self.rows = rows.select_columns(columns_read(rows.column_names, text_column))
        self.tokenizer = tokenizer
        self.text_column = text_column

    def encode(self, numbers: Sequence[int]) -> list[Encoded]:
        """(token ids, labels) of rows; a first token is predicted from nothing, so not learned."""
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


def encode(row: Row, tokenizer: Tokenizer, text_column: str) -> Encoded:
    """(token ids, labels) of one row; a text ends with the tokenizer's end of document, if any."""
    form = layout(list(row), text_column)
    if form == "prompt" and not isinstance(row["prompt"], list):
        return encode_text(text_of(row, "prompt"), text_of(row, "completion"), tokenizer)
    if form == text_column != "messages":
        return encode_text("", text_of(row, text_column), tokenizer)
    messages, learned_from = chat_of(row, text_column, tokenizer.chat)
    return encode_chat(messages, tokenizer.chat, learned_from, row.get("tools"))


def encode_text(prompt: str, text: str, tokenizer: Tokenizer) -> Encoded:
    """(token ids, labels) of a text after a prompt, which is not learned."""
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
            f"the column {column} holds {type(text).__name__}, not text; name a column of text, or "
            "remove such rows"
        )
    return text


def chat_of(row: Row, text_column: str, tokenizer: Any) -> tuple[list[Message], int]:
    """(a row's messages, the number of the first one that may be learned)."""
    form = layout(list(row), text_column)
    if form == "prompt":
        prompt = turns(row, "prompt", tokenizer)
        return prompt + turns(row, "completion", tokenizer), len(prompt)
    if form == "instruction":
        question = text_of(row, "instruction")
        if row.get("input"):
            question += "\n\n" + text_of(row, "input")
        answer = {"role": "assistant", "content": text_of(row, "output")}
        messages = [{"role": "user", "content": question}, answer]
    else:
        messages = turns(row, form, tokenizer)
    if row.get("system") and form != "messages":
        if any(one["role"] == "system" for one in messages):
            raise DataError(
                f"{form} has a message of the system beside the column system; keep one"
            )
        messages.insert(0, {"role": "system", "content": text_of(row, "system")})
    return messages, 0


def turns(row: Row, column: str, tokenizer: Any) -> list[Message]:
    """The messages in a column. Errors: DataError for what is no list of {"role", "content"}."""
    messages = row[column]
    if isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
        return [turn(one, column, str(tokenizer.chat_template)) for one in messages]
    raise not_messages(column, messages)


def not_messages(column: str, content: Any) -> DataError:
    return DataError(
        f"{column} holds {content!s:.100}; make it a list of messages, each with role (system, "
        "user or assistant) and content"
    )


def turn(message: Message, column: str, template: str) -> Message:
    """A message with the keys and the role that templates know, without Arrow's nulls."""
    kept = without_nulls(message)
    if "from" in kept and "role" not in kept:  # ShareGPT
        kept["role"] = kept.pop("from")
        kept["content"] = kept.pop("value", None)
    role = kept.get("role")
    content = kept.get("content")
    if not isinstance(role, str) or (content is None and not kept.get("tool_calls")):
        raise not_messages(column, [message])
    role = SAME_ROLE.get(role, role)
    if role not in ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", template):
        near = nearest_name(role.lower(), (*ROLES, *SAME_ROLE))
        raise DataError(
            f"{column} has the unknown role {role}{near and f' (is it {near}?)'}; use one of "
            f"{', '.join(ROLES)}, or a chat template that names it"
        )
    if isinstance(content, list):
        with suppress(TypeError, KeyError):  # of another part, which is refused below
            if all(part["type"] == "text" for part in content):
                content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise DataError(
            f"{column} has the content {content!s:.100}, which is not text; this task reads text "
            "alone"
        )
    calls = kept.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
        raise DataError(f"{column} has the tool_calls {calls!s:.100}; make them a list of objects")
    weight = kept.get("weight", int(role == "assistant"))
    if isinstance(weight, str) or weight not in (0, 1) or (weight and role != "assistant"):
        raise DataError(
            f"{column} has the weight {weight!r} at a message of the {role}; of the assistant's "
            "it may be 0 (not learned) or 1, of others 0 or absent"
        )
    if others := OTHER_WEIGHTS & kept.keys():
        raise DataError(
            f"{column} has the key {min(others)}, which is not read; for messages of the assistant "
            "that are not learned use weight 0"
        )
    return {**kept, "role": role, "content": content}


def without_nulls(value: Any) -> Any:
    """Arrow gives each of a column's dicts the keys of all, with nulls."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def to_learn(messages: list[Message], learned_from: int) -> list[int]:
    """The numbers of the assistant's messages that are learned: not those that say nothing."""
    return [
        number
        for number, one in enumerate(messages)
        if number >= learned_from
        and one["role"] == "assistant"
        and one.get("weight", 1)
        and (one["content"] or one.get("tool_calls"))
    ]


def encode_chat(
    messages: list[Message], tokenizer: Any, learned_from: int = 0, tools: Any = None
) -> Encoded:
    """(token ids, labels) of a chat with tools; from `learned_from` on, answers are learned."""
    if not messages:
        return [], []  # some templates fail on it
    learned = to_learn(messages, learned_from)
    messages = [{key: one[key] for key in one if key != "weight"} for one in messages]
    apply = partial(tokenizer.apply_chat_template, tools=tools_of(tools, tokenizer))
    text = apply(messages, tokenize=False)
    check_nothing_is_dropped(messages, learned, text, tokenizer)
    if MARKS_ANSWERS.search(str(tokenizer.chat_template)):
        ids, labels = encode_marked(messages, learned, apply)
    else:
        ids, labels = encode_unmarked(messages, learned, text, tokenizer, apply)
    if learned and all(label == IGNORE_INDEX for label in labels):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} finds no token of the assistant's "
            "answers; put {% generation %} and {% endgeneration %} around what the assistant writes"
        )
    return ids, labels


def tools_of(tools: Any, tokenizer: Any) -> list[Message] | None:
    """A row's tools as the template takes them. Errors: DataError for what is no list of dicts."""
    found = tools
    if isinstance(tools, str) and tools.strip():
        with suppress(ValueError, RecursionError):
            found = json.loads(tools)
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(
            f"tools holds {tools!s:.100}; make it a list of JSON schemas of functions, or its JSON"
        )
    if "tools" not in str(tokenizer.chat_template):
        raise DataError(
            f"the row has tools, which the chat template of {tokenizer.name_or_path} leaves out; "
            "use a template that writes them, or remove the column"
        )
    return without_nulls(found)  # type: ignore[no-any-return]


def check_nothing_is_dropped(
    messages: list[Message], learned: list[int], text: str, tokenizer: Any
) -> None:
    """Errors: DataError for messages, calls or the last answer's thoughts that the text lacks."""
    template = f"the chat template of {tokenizer.name_or_path}"
    for one in messages:
        quoted = json.dumps(one["content"] or "", ensure_ascii=False)[1:-1]  # as of a tool
        said = ((one["content"] or "").strip(), quoted.strip())
        if one["role"] != "assistant" and not any(content in text for content in said):
            raise DataError(
                f"{template} leaves out the message of the {one['role']} {said[0]:.40}; use one "
                "that writes it, or remove such messages"
            )
    for call in (call for one in messages for call in one.get("tool_calls", ())):
        if "tool_calls" not in str(tokenizer.chat_template):
            raise DataError(
                f"{template} leaves out tool_calls; use one that writes them, or remove such rows"
            )
        arguments = call.get("function", call).get("arguments")
        if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in text:
            raise DataError(
                f"{template} puts the arguments {arguments:.60} of a tool call into quotes once "
                "more; make them an object, not its JSON"
            )
    for number in learned[-1:]:
        answer = messages[number]
        found = THOUGHTS.match(answer["content"] or "")
        thoughts = found[1] if found else ""
        for key in ("reasoning_content", "reasoning", "thinking"):
            thoughts = str(answer.get(key, "")) or thoughts
        if thoughts.strip() not in text:
            raise DataError(
                f"{template} drops the thoughts of an answer, {thoughts.strip()[:40]!r}; use one "
                "that keeps them, or remove them from the rows"
            )


def encode_marked(messages: list[Message], learned: list[int], apply: Apply) -> Encoded:
    """By the template's own marks of what the assistant generates."""
    chat = apply(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = chat["input_ids"]
    wanted = chat["assistant_masks"]
    answers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    if learned != answers:
        # Of each token, how many marked stretches have begun: the answer's number.
        begun = list(accumulate(int(a < b) for a, b in pairwise([0, *wanted])))
        if max(begun, default=0) != len(answers):
            raise DataError(
                f"the chat template marks {max(begun, default=0)} stretches of {len(answers)} "
                "answers, so those that are not to be learned can't be told; mark each answer once"
            )
        numbers = zip(wanted, begun, strict=True)
        wanted = [one and answers[number - 1] in learned for one, number in numbers]
    return ids, [token if one else IGNORE_INDEX for token, one in zip(ids, wanted, strict=True)]


def encode_unmarked(
    messages: list[Message], learned: list[int], text: str, tokenizer: Any, apply: Apply
) -> Encoded:
    """An answer is what the chat's text gets longer by when the turn is added.

    Not learned: turns that the template renders in another way later on, or after another prompt.
    """
    ids = ids_of(text, tokenizer)
    labels = [IGNORE_INDEX] * len(ids)
    for number in learned:
        asked = prompt_of(messages, number, apply)
        prompt = ids_of(asked, tokenizer)
        start = common_prefix(ids, prompt)
        if start < len(prompt) and NO_THOUGHT.search(asked):  # the answer has thoughts
            prompt = ids_of(NO_THOUGHT.sub("", asked), tokenizer)
            start = common_prefix(ids, prompt)
        if number and start < len(prompt):
            # What opens an answer may differ, but not what was said before; its last token may
            # merge with the next.
            before = ids_of(apply(messages[:number], tokenize=False), tokenizer)
            if common_prefix(ids, before) < len(before) - 1:
                continue
        end = common_prefix(ids, ids_of(apply(messages[: number + 1], tokenize=False), tokenizer))
        labels[start:end] = ids[start:end]
    return ids, labels


def prompt_of(messages: list[Message], number: int, apply: Apply) -> str:
    """The text before an answer, without a tag of thoughts that the template forces: it is learned.

    Templates fail on a chat without messages: before a first message is what another one has too.
    """
    if number:
        return FORCED.sub("", apply(messages[:number], tokenize=False, add_generation_prompt=True))
    other = "1" if (messages[0]["content"] or "").strip().startswith("0") else "0"
    same = apply(messages[:1], tokenize=False)
    replaced = apply([{"role": "assistant", "content": other}], tokenize=False)
    same = same[: common_prefix(same, replaced)]
    ask = [{"role": "user", "content": "0"}]
    asked = apply(ask, tokenize=False)
    opening = apply(ask, tokenize=False, add_generation_prompt=True).removeprefix(asked)
    opening = FORCED.sub("", opening)
    place = same.rfind(opening)
    return FORCED.sub("", same) if place < 0 else same[: place + len(opening)]


def ids_of(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[no-any-return]


def common_prefix(a: Any, b: Any) -> int:
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (of any sequences)
