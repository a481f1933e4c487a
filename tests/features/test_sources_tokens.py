"""Documents and chats as tokens: tokenizers, what of a row is learned, where tokens come from."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import groupby

import chat_templates
import datasets
import pytest
import torch

from dist_amp.settings import DataConfig
from dist_amp.sources import tokens
from dist_amp.sources.conversations import IGNORE_INDEX, check_rows, encode
from dist_amp.sources.load import Converted
from dist_amp.sources.packing import Packing
from dist_amp.sources.token_shards import TokenShards
from dist_amp.sources.tokenizer import check_vocabulary, of_transformers, open_tokenizer
from dist_amp.sources.tokens import token_documents, tokenize

pytest.importorskip("transformers")
from messages import message_of
from tiny_hf import MARKED_TEMPLATE, TEMPLATE, make_tokenizer, write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

pytestmark = pytest.mark.usefixtures("own_cache")
BYTES = open_tokenizer("bytes")
TEXTS = [{"text": "ab" * (1 + number % 5)} for number in range(24)]


def source(folder, rows):
    return DataConfig(path=str(write_rows(folder / "rows.jsonl", rows)), validation_split=0.25)


def write_tokens(folder, tokenizer=BYTES, **splits):
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    tokenize(folder, splits, tokenizer, "text")
    return DataConfig(path=str(folder))


def test_a_tokenizer_is_the_same_as_a_file_a_folder_of_it_alone_and_a_folder_of_transformers(
    tmp_path,
):
    make_tokenizer(tmp_path / "whole", template=None)
    (tmp_path / "alone").mkdir()
    file = tmp_path / "alone/tokenizer.json"
    content = json.loads((tmp_path / "whole/tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**content, "truncation": cut}))  # which is not done
    first, *others = [open_tokenizer(str(path)) for path in (file, file.parent, tmp_path / "whole")]
    for tokenizer in (first, *others):
        assert tokenizer.encode("ab</s>") == [68, 69, 2]
        assert tokenizer.decode([68, 69, 2]) == "ab</s>"
        assert (tokenizer.vocabulary, tokenizer.end, tokenizer.chat) == (260, 2, None)
        assert tokenizer.identity == first.identity
    assert BYTES.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert BYTES.decode(BYTES.encode("aé\n")) == "aé\n"


def test_the_identity_is_what_decides_the_ids_and_nothing_else(tmp_path):
    one = make_tokenizer(tmp_path / "one")
    same = AutoTokenizer.from_pretrained(tmp_path / "one")
    same.pad_token = same.eos_token
    same(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert of_transformers(same).identity == of_transformers(one).identity
    without_end = make_tokenizer(tmp_path / "end")
    without_end.eos_token = None
    marked = make_tokenizer(tmp_path / "marked", MARKED_TEMPLATE)
    more = make_tokenizer(tmp_path / "more", extra=1)
    assert len({of_transformers(each).identity for each in (one, without_end, marked, more)}) == 4


EMPTY = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})


@pytest.mark.bad_input("a tokenizer that is missing or empty, or a hub name without one")
@pytest.mark.bad_input("a tokenizer with more tokens than the task's model has rows")
def test_a_tokenizer_that_can_not_be_read_or_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text(EMPTY)
    rules = make_tokenizer(tmp_path / "model").backend_tokenizer
    rules.post_processor = TemplateProcessing(single="$A [X]", special_tokens=[("[X]", 70_000)])
    rules.save("adds.json")
    for name, cause in (
        ("missing.json", "it does not exist;"),
        ("empty.json", "its model has 0 tokens, too few for the id 0;"),
        ("adds.json", "its model has 260 tokens, too few for the id 70000;"),
        ("nobody/nothing", ""),
    ):
        message = message_of(65, open_tokenizer, name)
        assert message.startswith(f"data.tokenizer={name} can't be read: {cause}")
        assert "; give a tokenizer.json, a folder" in message
    check_vocabulary(BYTES, 256)
    said = "the tokenizer bytes has 256 tokens and the model's embedding 255 rows; use task"
    assert message_of(65, check_vocabulary, BYTES, 255).startswith(said)


def test_rows_are_tokenized_once_and_then_read_from_the_cache_which_knows_what_made_them(
    tmp_path, own_cache, monkeypatch
):
    make_tokenizer(tmp_path / "model")
    (tmp_path / "other").mkdir()
    rows = [{**row, "body": "c"} for row in TEXTS]
    data = source(tmp_path, rows)
    for config, split, tokenizer in (
        (data, "validation", BYTES),
        (data, "train", open_tokenizer(str(tmp_path / "model"))),
        (replace(data, text_column="body"), "train", BYTES),
        (source(tmp_path / "other", rows[:-1]), "train", BYTES),
        (data, "train", BYTES),
    ):
        first = token_documents(config, split, tokenizer)
    assert len(list(own_cache.iterdir())) == 5
    assert isinstance(first, TokenShards)
    assert len(first) == 18
    monkeypatch.setattr(tokens, "encode", None)  # it would fail
    assert token_documents(data, "train", BYTES).fingerprint == first.fingerprint


def test_a_folder_of_tokens_is_a_source_of_its_splits(tmp_path):
    both = write_tokens(tmp_path / "both", train=TEXTS, validation=TEXTS[1:3])
    assert len(token_documents(both, "validation", BYTES)) == 2
    one = write_tokens(tmp_path / "one", train=TEXTS)
    assert token_documents(one, "validation", BYTES) is None


@pytest.mark.bad_input("tokens of another tokenizer")
def test_tokens_that_are_not_of_this_tokenizer_and_these_settings_are_refused(tmp_path):
    make_tokenizer(tmp_path / "model")
    other = open_tokenizer(str(tmp_path / "model"))
    data = write_tokens(tmp_path / "tokens", train=TEXTS)
    rows = replace(source(tmp_path, TEXTS), tokenizer="bytes")
    for config, tokenizer, fragment in (
        (data, other, f"holds tokens of the tokenizer bytes (bytes), not of {tmp_path}/model ("),
        (rows, other, "data.tokenizer=bytes (bytes) is not the task's, "),
        (replace(data, text_column="body"), BYTES, "data.text_column=body has no effect: "),
        (replace(data, split="test"), BYTES, "data.split=test has no effect: "),
        (replace(data, view="parquet"), BYTES, "data.view=parquet has no effect: "),
    ):
        assert fragment in message_of(64, token_documents, config, "train", tokenizer)
    rows = replace(rows, tokenizer=str(tmp_path / "model"))
    assert len(token_documents(rows, "train", other)) == 18


def view(folder, rows):
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet", batch_size=8)
    return DataConfig(path=f"{folder}/rows.parquet", view="parquet", validation_split="train")


def test_rows_of_a_view_are_tokenized_as_they_are_read(tmp_path, own_cache):
    data = view(tmp_path, [{**row, "image": b"", "body": "b"} for row in TEXTS])
    documents = token_documents(data, "train", BYTES)
    assert isinstance(documents, Converted)
    assert len(documents) == 24
    assert not own_cache.exists()
    assert documents.rows.column_names == ["text"]
    ahead = token_documents(write_tokens(tmp_path / "tokens", train=TEXTS), "train", BYTES)
    for number, sample in zip([4, 1], documents.__getitems__([4, 1]), strict=True):
        torch.testing.assert_close(sample, ahead[number])
    other = token_documents(replace(data, text_column="body"), "train", BYTES)
    assert documents.fingerprint != other.fingerprint
    order, _ = documents.shuffled(3, 1)
    assert order == documents.rows.shuffled(3, 1)[0], "by row group, as the view is read"


def test_a_row_that_makes_no_tokens_is_named_by_its_number_in_the_file(tmp_path):
    data = view(tmp_path, [{"text": "a"}, {"text": ""}])
    documents = token_documents(data, "train", replace(BYTES, end=None))
    message = message_of(65, documents.__getitems__, [0, 1])
    assert message.startswith("the row has no tokens; remove")
    data = source(tmp_path, [*TEXTS * 2, {"text": None}, *TEXTS])
    message = message_of(65, token_documents, replace(data, validation_split=0.01), "train", BYTES)
    assert message.startswith("row 48 can't be encoded: the column text")
    content = (tmp_path / "rows.jsonl").read_bytes().replace(b"null", b'"\xff"')
    (tmp_path / "rows.jsonl").write_bytes(content)
    message = message_of(65, token_documents, replace(data, validation_split=0.01), "train", BYTES)
    assert message.startswith("row 48 can't be encoded: UnicodeDecodeError: ")


# ---- chats ----

HI = {"role": "user", "content": "hi"}
ONE = {"role": "assistant", "content": "one"}
MORE = {"role": "user", "content": "more"}
TWO = {"role": "assistant", "content": "two"}
REASONED = {**TWO, "reasoning_content": "hmm"}
THOUGHT = "<think>\nhmm\n</think>\n\ntwo"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def open_with(tmp_path_factory):
    """A template's name, or the template -> its tokenizer, as it is read from a folder."""

    @cache
    def open_one(template):
        folder = tmp_path_factory.mktemp("tokenizer")
        make_tokenizer(folder, getattr(chat_templates, template, template))
        return open_tokenizer(str(folder))

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


@pytest.mark.parametrize("template", ["QWEN", "LLAMA3", MARKED_TEMPLATE])
@pytest.mark.parametrize("first", ["one", "0"])
def test_a_chat_that_begins_with_the_assistant_learns_its_content_and_end_alone(
    template, first, open_with
):
    messages = [{"role": "assistant", "content": first}, MORE, TWO]
    answers = [answer.replace("one", first) for answer in ANSWERS[template]]
    assert learned({"messages": messages}, open_with(template)) == answers
    row = {"prompt": [], "completion": messages[:1]}
    assert learned(row, open_with(template)) == answers[:1]


# A prompt that ends with an empty thought does not keep the tag of a real one from being learned.
FORCED_EMPTY = chat_templates.QWEN_THINKING.replace(
    "assistant\\n<think>\\n", "assistant\\n<think>\\n\\n</think>\\n\\n"
)


@pytest.mark.parametrize(
    "tags", [("<think>", "</think>"), ("<START_THINKING>", "<|END_THINKING|>")]
)
@pytest.mark.parametrize("template", ["QWEN3", "QWEN_THINKING", FORCED_EMPTY])
def test_thoughts_are_learned_with_the_tag_that_a_template_forces_unless_they_are_empty(
    template, tags, open_with
):
    def tagged(text):
        return text.replace("<think>", tags[0]).replace("</think>", tags[1])

    tokenizer = open_with(tagged(getattr(chat_templates, template, template)))
    for answer in (REASONED, {**TWO, "content": tagged(THOUGHT)}):
        for messages in ([HI, answer], [HI, answer, MORE, answer]):
            assert learned({"messages": messages}, tokenizer) == [tagged(THOUGHT) + "<|im_end|>\n"]
    if template == FORCED_EMPTY:
        assert learned({"messages": [HI, TWO]}, tokenizer) == ["two<|im_end|>\n"]


@pytest.mark.bad_input("a chat template that changes earlier answers")
def test_answers_that_can_not_be_learned_are_warned_of_once(open_with, capsys):
    rows = datasets.Dataset.from_list([{"messages": [HI, ONE, MORE, TWO]}] * 3)
    for template in ANSWERS:
        for split in ("train", "validation"):
            check_rows(rows, split, "text", open_with(template))
        text = "warning: only 1 of the 2 answers of a chat can be trained on"
        assert capsys.readouterr().err.count(text) == ("QWEN3" in template or "THINK" in template)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CALLING = [HI, CALLS, {"role": "tool", "content": "2"}, ONE]


@pytest.mark.parametrize("stored", [list, json.dumps])
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
        ("QWEN", changed(weight=0.5), "messages has weight 0.5 in a message of the assistant; us"),
        ("QWEN", changed(training=False), "messages has training in a message of the assis"),
        ("QWEN", {"conversations": [{**HI, "role": "system"}], "system": "s"}, "the row has a sys"),
        ("QWEN", changed(role="Assistant"), "messages has the unknown role Assistant; use one of"),
        ("QWEN", changed(content=None), "messages holds .*; make it a list of messages, each with"),
        ("QWEN", changed(content=[{"type": "image"}]), "messages holds .* and content, a text"),
        ("QWEN", changed(tool_calls=[TEXT_AS_ARGUMENTS]), r"the chat template of .* quotes the "),
        ("LLAMA3", {**ASKED, "tools": [TOOL]}, "the chat template of .* out tools;"),
        ("LLAMA3", {"messages": CALLING}, "the chat template of .* leaves out tool_calls; use one"),
        (NOTHING_MARKED, ASKED, ".* identifies no token of the assistant's answers; put"),
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
    for data in (source(tmp_path, rows), view(tmp_path, rows)):
        documents = token_documents(data, "train", open_with("QWEN"))
        assert texts(*documents[0].values(), open_with("QWEN"))[1] == ["one<|im_end|>\n"]


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
