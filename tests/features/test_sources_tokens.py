"""Documents as tokens: tokenizers by name, what of a row is learned, where tokens come from."""

import json
import re
from dataclasses import replace

import datasets
import pytest
import torch

from dist_amp.settings import DataConfig
from dist_amp.sources import tokens
from dist_amp.sources.load import Converted
from dist_amp.sources.token_shards import TokenShards
from dist_amp.sources.tokenizer import check_vocabulary, of_transformers, open_tokenizer
from dist_amp.sources.tokens import token_documents, tokenize

pytest.importorskip("transformers")
from messages import message_of
from tiny_hf import MARKED_TEMPLATE, make_tokenizer, write_rows
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
@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("missing.json", "it does not exist"),
        ("tokenizer.json", "its model has no tokens"),
        ("nobody/nothing", ".*"),
    ],
)
def test_a_tokenizer_that_can_not_be_read_or_is_too_large(name, fragment, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "tokenizer.json").write_text(EMPTY)
    path = name if "/" in name else str(tmp_path / name)
    fragment = rf"data.tokenizer={path} can't be read: {fragment}; give a tokenizer.json"
    assert re.match(fragment, message_of(65, open_tokenizer, path))
    check_vocabulary(BYTES, 256)
    fragment = "the tokenizer bytes has 256 tokens and the model's embedding 255 rows; use task"
    assert message_of(65, check_vocabulary, BYTES, 255).startswith(fragment)


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
    one = write_tokens(tmp_path / "one", train=TEXTS)
    assert len(token_documents(both, "validation", BYTES)) == 2
    assert token_documents(one, "validation", BYTES) is None
    assert len(token_documents(one, "train", BYTES)) == 24


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
    assert message_of(65, documents.__getitems__, [0, 1]).startswith(
        "the row has no tokens; remove"
    )
    data = source(tmp_path, [*TEXTS * 2, {"text": None}, *TEXTS])
    message = message_of(65, token_documents, replace(data, validation_split=0.01), "train", BYTES)
    assert message.startswith("row 48 can't be encoded: the column text")
