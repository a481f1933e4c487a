"""Documents as tokens: tokenizers by their names, what of a row is learned, and where the tokens
come from.
"""

import json
import re
from dataclasses import replace

import datasets
import pytest
import torch

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import DataConfig
from dist_amp.sources import conversations, tokens
from dist_amp.sources.conversations import IGNORE_INDEX, asks_in_turns, encode
from dist_amp.sources.token_shards import TokenShards
from dist_amp.sources.tokenizer import check_vocabulary, of_transformers, open_tokenizer
from dist_amp.sources.tokens import TokenizedWhenRead, token_documents

pytest.importorskip("transformers")
from tiny_hf import CHAT, MARKED_TEMPLATE, chats, make_tokenizer, write_rows
from transformers import AutoTokenizer

BYTES = open_tokenizer("bytes")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of tokens."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache/datasets")
    return tmp_path / "cache/dist_amp/tokens"


def test_bytes_are_a_tokenizer():
    assert BYTES.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert BYTES.decode(BYTES.encode("aé\n")) == "aé\n"
    assert (BYTES.vocabulary, BYTES.end) == (256, 0)


def test_a_tokenizer_is_the_same_as_a_file_a_folder_of_it_alone_and_a_folder_of_transformers(
    tmp_path,
):
    make_tokenizer(tmp_path / "whole", template=None)
    (tmp_path / "alone").mkdir()
    file = (tmp_path / "whole/tokenizer.json").rename(tmp_path / "alone/tokenizer.json")
    (tmp_path / "whole/tokenizer.json").write_text(file.read_text())
    found = [open_tokenizer(str(path)) for path in (file, tmp_path / "alone", tmp_path / "whole")]
    for tokenizer in found:
        assert tokenizer.encode("ab</s>") == [*(4 + byte for byte in (64, 65)), 2]
        assert tokenizer.decode(tokenizer.encode("ab</s>")) == "ab</s>"
        assert (tokenizer.vocabulary, tokenizer.end, tokenizer.chat) == (260, 2, None)
        assert tokenizer.identity == found[0].identity


def test_the_identity_is_what_decides_the_ids_and_nothing_else(tmp_path):
    """Not the path, the padding or what was encoded before; but words, end and chat template."""
    one = make_tokenizer(tmp_path / "one")
    same = AutoTokenizer.from_pretrained(
        make_tokenizer(tmp_path / "same").name_or_path or tmp_path / "same"
    )
    same.pad_token = same.eos_token
    same(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert of_transformers(same).identity == of_transformers(one).identity
    without_end = make_tokenizer(tmp_path / "end")
    without_end.eos_token = None
    others = [
        make_tokenizer(tmp_path / "marked", MARKED_TEMPLATE),
        make_tokenizer(tmp_path / "more", extra=1),
    ]
    assert (
        len({of_transformers(tokenizer).identity for tokenizer in (one, without_end, *others)}) == 4
    )


def test_truncation_that_a_file_asks_for_is_not_done(tmp_path):
    make_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "cut.json").write_text(json.dumps(content))
    for name in ("cut.json", "tokenizer.json"):
        assert len(open_tokenizer(str(tmp_path / name)).encode("abcdef")) == 6


def test_a_text_longer_than_the_models_context_is_not_warned_about(tmp_path, caplog):
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.model_max_length = 4
    assert len(of_transformers(tokenizer).encode("a" * 20)) == 20
    assert not caplog.records


EMPTY = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})


@pytest.mark.bad_input(
    "a tokenizer that is missing, no JSON, without a model or empty, or a folder or hub name "
    "without one"
)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read: it does not exist; give a tokenizer.json, a folder that"),
        ("words", "can't be read: expected value at line 1 column 1; give a tokenizer.json"),
        ("{}", "can't be read: Model missing. at line 1 column 2; give"),
        (EMPTY, "can't be read: its model has no tokens; give"),
    ],
)
def test_a_tokenizer_file_that_can_not_be_read(content, said, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(path))
    assert str(caught.value).startswith(f"data.tokenizer={path} {said}")


def test_a_folder_without_a_tokenizer_and_a_name_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(tmp_path), "nobody/nothing"):
        with pytest.raises(
            DataError,
            match=rf"data.tokenizer={name} can't be read: .*; give a tokenizer.json, a folder",
        ):
            open_tokenizer(name)


@pytest.mark.bad_input("a tokenizer with more tokens than the task's model has rows")
def test_a_tokenizer_with_more_tokens_than_the_model_has_rows():
    check_vocabulary(BYTES, 256)
    with pytest.raises(
        DataError,
        match="the tokenizer bytes has 256 tokens and the model's embedding 255 rows; use task",
    ):
        check_vocabulary(BYTES, 255)


# What of a row is learned: tests/test_hf_tasks.py has more of it


# ChatML as many models ship it, without generation marks: transformers' mask of it is all zero.
STOCK = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']}}"
    "{{'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}"
)


def test_of_a_stock_template_without_generation_marks_the_answers_are_learned(tmp_path):
    tokenizer = make_tokenizer(tmp_path, STOCK)
    (row, *_) = chats()
    theirs = tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert not any(theirs["assistant_masks"])
    ids, labels = encode(row, of_transformers(tokenizer), "text")
    assert ids == theirs["input_ids"]
    assert (
        tokenizer.decode([label for label in labels if label != IGNORE_INDEX]) == "ab<|im_end|>\n"
    )


NOTHING_MARKED = CHAT.replace("BEGIN", "{% generation %}{% endgeneration %}").replace("END", "")


@pytest.mark.bad_input("a chat template by which no token of the answers is found")
@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NOTHING_MARKED, "its {% generation %} marks none"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "it renders them in another way than the prompt before",
        ),
    ],
)
def test_a_template_that_finds_no_answer_is_refused_by_its_name_and_row(template, why, tmp_path):
    make_tokenizer(tmp_path / "model", template)
    rows = write_rows(tmp_path / "rows.jsonl", chats())
    data = DataConfig(path=str(rows))
    with pytest.raises(DataError) as caught:
        token_documents(data, "train", open_tokenizer(str(tmp_path / "model")))
    assert re.sub(r"^row \d+", "row 0", str(caught.value)) == (
        f"row 0: the chat template of {tmp_path}/model finds no token of the assistant's answers: "
        f"{why}; put "
        "{% generation %} and {% endgeneration %} around what the assistant writes"
    )


# Where the documents come from


def source(folder, rows):
    return DataConfig(path=str(write_rows(folder / "rows.jsonl", rows)), validation_split=0.25)


TEXTS = [{"text": "ab" * (1 + number % 5)} for number in range(24)]


def test_rows_are_tokenized_once_and_then_read_from_the_cache(tmp_path, cache, monkeypatch):
    data = source(tmp_path, TEXTS)
    first = token_documents(data, "train", BYTES)
    assert isinstance(first, TokenShards)
    assert len(first) == 18
    monkeypatch.setattr(conversations, "encode", None)  # it would fail
    again = token_documents(data, "train", BYTES)
    assert again.fingerprint == first.fingerprint
    assert len(list(cache.iterdir())) == 1
    monkeypatch.undo()


@pytest.mark.bad_input("empty documents, and rows with nothing to learn")
def test_rows_without_anything_to_learn_are_left_out_and_counted_in_the_log(
    tmp_path, cache, caplog
):
    with caplog.at_level("INFO", "dist_amp"):
        documents = token_documents(
            source(tmp_path, [{"text": "ab" * (n % 3)} for n in range(24)]), "train", BYTES
        )
    empty, tokens = 18 - len(documents), int(documents.lengths.sum())
    assert 2 <= empty <= 8  # of the 8, all but those held out
    assert caplog.messages[-1] == (
        f"data: train: {18 - empty} documents, {tokens} tokens, of which {tokens - len(documents)} "
        f"count; {empty} of 18 rows have nothing to learn and are left out ({documents.folder})"
    )


def test_the_cache_knows_rows_tokenizer_column_and_split_apart(tmp_path, cache):
    make_tokenizer(tmp_path / "model")
    rows = [{**row, "body": "c"} for row in TEXTS]
    data = source(tmp_path, rows)
    for config, split, tokenizer in (
        (data, "train", BYTES),
        (data, "validation", BYTES),
        (data, "train", open_tokenizer(str(tmp_path / "model"))),
        (replace(data, text_column="body"), "train", BYTES),
    ):
        token_documents(config, split, tokenizer)
    (tmp_path / "other").mkdir()
    token_documents(source(tmp_path / "other", rows[:-1]), "train", BYTES)
    assert len(list(cache.iterdir())) == 5


def test_a_folder_of_tokens_is_a_source_of_its_splits(tmp_path):
    rows = datasets.Dataset.from_list(TEXTS)
    tokens.tokenize(
        tmp_path / "both", {"train": rows, "validation": rows.select([1, 2])}, BYTES, "text", print
    )
    tokens.tokenize(tmp_path / "one", {"train": rows}, BYTES, "text", print)
    both, one = (DataConfig(path=str(tmp_path / name)) for name in ("both", "one"))
    assert [len(token_documents(both, split, BYTES)) for split in ("train", "validation")] == [
        24,
        2,
    ]
    assert token_documents(one, "validation", BYTES) is None
    assert token_documents(one, "train", BYTES)[2]["input_ids"].tolist() == [*b"ababab", 0]


@pytest.mark.bad_input(
    "tokens of another tokenizer than the task's, or `data.tokenizer` that is not the task's"
)
def test_tokens_of_another_tokenizer_are_refused_with_both(tmp_path):
    make_tokenizer(tmp_path / "model")
    tokens.tokenize(
        tmp_path / "tokens", {"train": datasets.Dataset.from_list(TEXTS)}, BYTES, "text", print
    )
    other = open_tokenizer(str(tmp_path / "model"))
    with pytest.raises(ConfigError) as caught:
        token_documents(DataConfig(path=str(tmp_path / "tokens")), "train", other)
    assert str(caught.value) == (
        f"data.path={tmp_path}/tokens holds tokens of the tokenizer bytes (bytes), not of "
        f"{tmp_path}/model ({other.identity}); set data.tokenizer=bytes, or make them again"
    )
    data = replace(source(tmp_path, TEXTS), tokenizer="bytes")
    with pytest.raises(
        ConfigError,
        match=r"data.tokenizer=bytes \(bytes\) is not the task's own, .*/model \(\w+\); leave",
    ):
        token_documents(data, "train", other)
    assert (
        len(token_documents(replace(data, tokenizer=str(tmp_path / "model")), "train", other)) == 18
    )


def test_a_folder_that_says_it_holds_tokens_and_does_not(tmp_path):
    with pytest.raises(
        DataError, match=r"holds no tokens: tokens.json can't be read \(No such file or directory\)"
    ):
        token_documents(DataConfig(path=str(tmp_path), format="tokens"), "train", BYTES)


class View:
    """What a Parquet view offers: no `map`, an order of its own."""

    fingerprint = "view"

    def __init__(self, rows):
        self.rows, self.column_names, self.read = rows, list(rows[0]), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]

    def __getitems__(self, numbers):
        self.read += numbers
        return [self.rows[number] for number in numbers]

    def select_columns(self, names):
        self.selected = names
        return self

    def shuffled(self, global_batch_size, world_size):
        return "an order", None


def test_rows_of_a_view_are_tokenized_as_they_are_read_in_its_own_order(
    tmp_path, cache, monkeypatch
):
    view = View([{**row, "image": b""} for row in TEXTS])
    monkeypatch.setattr(tokens, "load_rows", lambda *args: view)
    documents = token_documents(DataConfig(), "train", BYTES)
    assert (
        len(token_documents(DataConfig(), "train", BYTES, View(TEXTS[:5]))) == 5
    )  # what a task ships with
    assert isinstance(documents, TokenizedWhenRead)
    assert not cache.exists()
    assert not hasattr(documents, "lengths")
    assert documents.shuffled(8, 1) == ("an order", None)
    assert view.read == []
    assert view.selected == ["text"]
    samples = documents.__getitems__([4, 1])
    assert view.read == [4, 1]
    ahead = (
        TokenShards(tmp_path, "train")
        if tokens.tokenize(tmp_path, {"train": view}, BYTES, "text", print)
        else 0
    )
    for number, sample in zip([4, 1], samples, strict=True):
        torch.testing.assert_close(sample, ahead[number])
    assert documents.fingerprint != TokenizedWhenRead(view, BYTES, "body").fingerprint


def test_a_row_of_a_view_without_tokens_is_named(tmp_path):
    tokenizer = replace(BYTES, end=None)
    with pytest.raises(
        DataError,
        match="row 1 has no tokens; remove it, or use dist_amp.tokenize, which leaves it out",
    ):
        TokenizedWhenRead(View([{"text": "a"}, {"text": ""}]), tokenizer, "text").__getitems__(
            [0, 1]
        )


@pytest.mark.parametrize("make", [chats, lambda: TEXTS])
def test_a_folder_of_tokens_knows_whether_its_rows_were_chats(make, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "model")
    rows = {"train": datasets.Dataset.from_list(make())}
    tokens.tokenize(tmp_path / "tokens", rows, of_transformers(tokenizer), "text", print)
    assert asks_in_turns(DataConfig(path=str(tmp_path / "tokens")), tokenizer) == (make is chats)
