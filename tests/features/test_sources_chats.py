"""Chats as tokens under the templates of popular models: what is learned, and what is refused."""

import json
import re
from itertools import groupby

import chat_templates
import datasets
import pytest

pytest.importorskip("transformers")
from messages import message_of
from test_sources_tokens import source
from tiny_hf import MARKED_TEMPLATE, TEMPLATE, make_tokenizer

from dist_amp.settings import DataConfig
from dist_amp.sources.conversations import IGNORE_INDEX, check_rows, encode
from dist_amp.sources.packing import Packing
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import token_documents, tokenize

pytestmark = pytest.mark.usefixtures("own_cache")
HI = {"role": "user", "content": "hi"}
ONE = {"role": "assistant", "content": "one"}
MORE = {"role": "user", "content": "more"}
TWO = {"role": "assistant", "content": "two"}
THINKING = {"role": "assistant", "content": "<think>\nhmm\n</think>\n\ntwo"}
REASONED = {**TWO, "reasoning_content": "hmm"}
FULL = "<think>\nhmm\n</think>\n\ntwo<|im_end|>\n"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def open_with(tmp_path_factory):
    """A template's name, or the template -> its tokenizer, as it is read from a folder."""
    opened = {}

    def open_one(template):
        if template not in opened:
            folder = tmp_path_factory.mktemp("tokenizer")
            make_tokenizer(folder, getattr(chat_templates, template, template))
            opened[template] = open_tokenizer(str(folder))
        return opened[template]

    return open_one


def texts(ids, labels, tokenizer):
    """(the whole text, the stretches of it that are learned)."""
    stretches = groupby(zip(ids, labels, strict=True), lambda pair: pair[1] != IGNORE_INDEX)
    learned = [[label for _, label in stretch] for is_learned, stretch in stretches if is_learned]
    return tokenizer.decode(ids), [tokenizer.decode(stretch) for stretch in learned]


def learned(row, tokenizer):
    return texts(*encode(row, tokenizer, "text"), tokenizer)[1]


# The answers "one" and "two" of a chat, by template.
ANSWERS = {
    "QWEN": ["one<|im_end|>\n", "two<|im_end|>\n"],
    "LLAMA3": ["one<|eot_id|>", "two<|eot_id|>"],
    "MISTRAL": [" one</s>", " two</s>"],
    MARKED_TEMPLATE: ["one</s>", "two</s>"],
    # They render the thoughts of the last turn alone, which are empty here.
    "QWEN3": ["<think>\n\n</think>\n\ntwo<|im_end|>\n"],
    "QWEN_THINKING": ["<think>\n\n</think>\n\ntwo<|im_end|>\n"],
}


@pytest.mark.parametrize("template", ANSWERS)
def test_answers_are_learned_with_their_ends_under_popular_templates(template, open_with):
    tokenizer, answers = open_with(template), ANSWERS[template]
    assert learned({"messages": [HI, ONE, MORE, TWO]}, tokenizer) == answers
    assert learned({"prompt": [HI, ONE, MORE], "completion": [TWO]}, tokenizer) == answers[-1:]
    # A weight of 1 is the default; other messages have a weight of 0.
    weighted = [{**HI, "weight": 0}, {**ONE, "weight": 0}, MORE, {**TWO, "weight": 1}]
    assert learned({"messages": weighted}, tokenizer) == answers[-1:]
    if len(answers) > 1:
        messages = [HI, ONE, MORE, {**TWO, "weight": 0.0}]
        assert learned({"messages": messages}, tokenizer) == answers[:1]


@pytest.mark.parametrize("template", ["QWEN", "LLAMA3", MARKED_TEMPLATE, TEMPLATE])
@pytest.mark.parametrize("first", ["one", "0"])
def test_a_chat_that_begins_with_the_assistant_learns_its_content_and_end_alone(
    template, first, open_with
):
    tokenizer = open_with(template)
    end = {"QWEN": "<|im_end|>\n", "LLAMA3": "<|eot_id|>"}.get(template, "</s>")
    messages = [{"role": "assistant", "content": first}, MORE, TWO]
    assert learned({"messages": messages}, tokenizer) == [first + end, "two" + end]
    assert learned({"prompt": [], "completion": messages[:1]}, tokenizer) == [first + end]


# A prompt that ends with an empty thought does not keep the tag of a real one from being learned.
FORCED_EMPTY = chat_templates.QWEN_THINKING.replace(
    "assistant\\n<think>\\n", "assistant\\n<think>\\n\\n</think>\\n\\n"
)


@pytest.mark.parametrize("tag", ["think", "START_THINKING"])
@pytest.mark.parametrize("template", ["QWEN3", "QWEN_THINKING", FORCED_EMPTY])
def test_thoughts_are_learned_with_the_tag_that_a_template_forces_unless_they_are_empty(
    template, tag, open_with
):
    def tagged(text):
        text = text.replace("<think>", f"<{tag}>")
        return text.replace("</think>", f"</{tag}>" if tag == "think" else "<|END_THINKING|>")

    tokenizer = open_with(tagged(getattr(chat_templates, template, template)))
    for answer in (REASONED, THINKING) if tag == "think" else (REASONED,):
        for messages in ([HI, answer], [HI, answer, MORE, answer]):
            assert learned({"messages": messages}, tokenizer) == [tagged(FULL)]
    if template == FORCED_EMPTY:
        assert learned({"messages": [HI, TWO]}, tokenizer) == ["two<|im_end|>\n"]


def test_what_a_template_writes_before_an_answer_is_learned_where_the_prompt_lacks_it(open_with):
    (answer,) = learned({"messages": [HI, {**TWO, "thinking": "hmm"}]}, open_with("GPT_OSS"))
    assert answer.startswith("<|channel|>analysis<|message|>hmm<|end|><|start|>assistant")
    assert answer.endswith("<|channel|>final<|message|>two<|return|>")


@pytest.mark.bad_input("a chat template that changes earlier answers")
def test_answers_that_can_not_be_learned_are_warned_of_once(open_with, capsys):
    rows = datasets.Dataset.from_list([{"messages": [HI, ONE, MORE, TWO]}] * 3)
    for template in ANSWERS:
        for split in ("train", "validation"):
            check_rows(rows, split, "text", open_with(template))
        text = "warning: of the 2 answers of a chat 1 can be learned"
        assert capsys.readouterr().err.count(text) == ("QWEN3" in template or "THINK" in template)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CALLING = [HI, CALLS, {"role": "tool", "content": "2"}, ONE]


@pytest.mark.parametrize("stored", [lambda tools: tools, json.dumps])
def test_tools_and_their_calls_are_rendered_and_calls_are_learned(stored, open_with):
    """Arrow gives each message and tool the keys of all, with nulls, which no template expects."""
    other = {"type": "function", "function": {"name": "sub", "strict": True}}
    tables = [
        {"messages": CALLING, "tools": stored([TOOL, other])},
        {"messages": [{**HI, "name": "Ann"}, ONE], "tools": stored([other])},
    ]
    row = datasets.Dataset.from_list(tables)[0]
    tokenizer = open_with("QWEN")
    text, parts = texts(*encode(row, tokenizer, "text"), tokenizer)
    shown = "".join(json.dumps(tool) for tool in (TOOL, other))
    assert f"Be helpful.\n<tools>{shown}</tools><|im_end|>" in text
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
    assert parts == [call, "one<|im_end|>\n"]
    assert learned({**row, "tools": stored([])}, tokenizer) == parts


def changed(**change):
    return {"messages": [HI, {**ONE, **change}]}


ASKED = {"messages": [HI, ONE]}
TEXT_AS_ARGUMENTS = {"function": {"name": "add", "arguments": '{"a": 1}'}}
NOTHING_MARKED = TEMPLATE + "{% generation %}{% endgeneration %}"
MARKED_WHOLE = (
    "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
)
ONE_OF_TWO = {"messages": [HI, {**ONE, "weight": 0}, MORE, TWO]}


@pytest.mark.bad_input("a chat with an unknown role, weight, content, tools or calls")
@pytest.mark.bad_input("a chat template that drops tools or their calls")
@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        ("QWEN", changed(weight=0.5), "messages has weight 0.5 at a message of the assistant; on"),
        (
            "QWEN",
            changed(training=False),
            "messages has training at a message of the assistan",
        ),
        ("QWEN", changed(role="Assistant"), "messages has the unknown role Assistant; use one of"),
        ("QWEN", changed(content=None), "messages holds .*; make it a list of messages, each with"),
        ("QWEN", changed(content=[{"type": "image"}]), "messages holds .* and content, a text"),
        ("QWEN", changed(tool_calls=[TEXT_AS_ARGUMENTS]), r"the chat template of .* puts the arg"),
        ("LLAMA3", {**ASKED, "tools": [TOOL]}, "the chat template of .* out tools;"),
        ("LLAMA3", {"messages": CALLING}, "the chat template of .* leaves out tool_calls; use one"),
        (NOTHING_MARKED, ASKED, ".* finds no token of the assistant's answers; put"),
        (MARKED_WHOLE, ONE_OF_TWO, ".*marks 1 stretches of 2 answers"),
    ],
)
def test_a_chat_that_can_not_be_learned_as_it_is_is_refused(template, row, message, open_with):
    assert re.match(message, message_of(65, encode, row, open_with(template), "text"))


@pytest.mark.bad_input("an empty answer, beside others and alone")
def test_empty_answers_are_not_learned(open_with):
    empty = {**ONE, "content": ""}
    for template in ("QWEN", MARKED_TEMPLATE):
        rest = learned({"messages": [HI, empty, MORE, TWO]}, open_with(template))
        assert rest == ANSWERS[template][-1:]
        for messages in ([HI, empty], [HI], []):
            assert learned({"messages": messages}, open_with(template)) == []


SYSTEM = {"role": "system", "content": "s"}
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "one"}]
PARTS = [{"type": "text", "text": "o"}, {"type": "text", "text": "ne", "image": None}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (changed(content=PARTS), [HI, ONE]),
        ({"conversations": [{"from": "system", "value": "s"}, *SHAREGPT]}, [SYSTEM, HI, ONE]),
        ({"conversations": SHAREGPT[1:], "system": ""}, [ONE]),
        ({"conversations": [HI, ONE], "system": "s"}, [SYSTEM, HI, ONE]),
        ({"conversations": SHAREGPT, "text": "ab", "messages": [HI, TWO]}, [HI, TWO]),
    ],
)
def test_rows_of_other_layouts_are_chats(row, messages, open_with):
    tokenizer = open_with("QWEN")
    assert encode(row, tokenizer, "text") == encode({"messages": messages}, tokenizer, "text")
    row = {"conversations": SHAREGPT, "text": "ab"}
    assert tokenizer.decode(encode(row, tokenizer, "text")[0]) == "ab</s>"


def test_another_layout_is_read_from_files_and_from_a_view(tmp_path, open_with):
    rows = [{"conversations": SHAREGPT, "a": 1}] * 8
    data, tokenizer = source(tmp_path, rows), open_with("QWEN")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    view = DataConfig(path=f"{tmp_path}/rows.parquet", view="parquet", validation_split="train")
    for documents in (token_documents(each, "train", tokenizer) for each in (data, view)):
        assert texts(*documents[0].values(), tokenizer)[1] == ["one<|im_end|>\n"]


def test_weights_and_tools_are_kept_in_the_cache_in_files_and_in_packed_rows(tmp_path, open_with):
    tokenizer = open_with("QWEN")
    rows = [{**ONE_OF_TWO, "tools": json.dumps([TOOL])}] * 8
    expected = texts(*encode(rows[0], tokenizer, "text"), tokenizer)
    assert expected[1] == ["two<|im_end|>\n"]
    cached = token_documents(source(tmp_path, rows), "train", tokenizer)
    tokenize(tmp_path / "files", {"train": datasets.Dataset.from_list(rows)}, tokenizer, "text")
    files = token_documents(DataConfig(path=str(tmp_path / "files")), "train", tokenizer)
    packing = Packing.of(DataConfig(pack="best_fit"), 1000, auto="off")
    for documents in (cached, files):
        assert texts(*documents[0].values(), tokenizer) == expected
        batch = packing.collate([packing.rows(documents, "train")[0]])
        _, parts = texts(batch["input_ids"][0], batch["labels"][0].tolist(), tokenizer)
        assert len(parts) > 1
        assert set(parts) == set(expected[1])
    less = token_documents(source(tmp_path, [ONE_OF_TWO] * 8), "train", tokenizer)[0]
    assert "<tools>" not in tokenizer.decode(less["input_ids"]), "another entry of the cache"
