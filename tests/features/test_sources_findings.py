"""What users ran into: each once read the wrong rows, hung, or said something that did not help."""

import errno
import json
import re

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from messages import message_of
from PIL import Image
from tiny import Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.settings import DataConfig
from dist_amp.sources import converted, parquet
from dist_amp.sources.files import find_files
from dist_amp.sources.labelled_images import LabelledImage, labelled_rows
from dist_amp.sources.load import Converted, class_names, load_rows, load_split
from dist_amp.sources.packing import Packing
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import token_documents, tokenize
from dist_amp.world import World

BYTES = open_tokenizer("bytes")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache") / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


def write_texts(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_parquet(path, columns, group=4):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return str(path)


def write_tokens(folder):
    rows = datasets.Dataset.from_dict({"text": ["one"]})
    tokenize(folder, {"train": rows}, BYTES, "text")


def test_row_groups_are_read_once_by_a_run_that_tokenizes_them_as_they_are_read(
    tmp_path, monkeypatch
):
    rows = {"text": [f"row {n}" for n in range(128)], "other": range(128)}
    write_parquet(tmp_path / "train.parquet", rows)
    write_parquet(tmp_path / "validation.parquet", {"text": ["held out"], "other": [0]})
    data = DataConfig(path=str(tmp_path), view="parquet", streams=8)
    documents = token_documents(data, "train", BYTES)
    _, order = documents.shuffled(8, 1)
    reads, real = [], parquet.Reader._read

    def read(reader, file, group):
        reads.append(group)
        return real(reader, file, group)

    monkeypatch.setattr(parquet.Reader, "_read", read)
    for positions in order(0, 0)(torch.arange(128)).split(8):
        documents.__getitems__(positions.tolist())
    assert sorted(reads) == list(range(32))


class Conjugated(Tiny):
    def collate(self, samples):
        x = torch.utils.data.default_collate(samples)["x"]
        return {"x": x, "conjugated": torch.complex(x, x).conj(), "negative": x._neg_view()}


def test_a_worker_sends_conjugated_and_negated_views(tmp_path):
    run = make_run(World(), Conjugated(), "--data.workers", 1)
    (batch,) = next(run.data)
    run.data.close()
    assert torch.equal(batch["conjugated"].imag, -batch["x"])
    assert torch.equal(batch["negative"], -batch["x"])


def test_images_are_read_from_a_parquet_view_that_knows_nothing_of_pictures(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    content = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    columns = {"image": [content] * 24, "label": [0, 1, 2] * 8}
    data = DataConfig(path=write_parquet(tmp_path / "a.parquet", columns), view="parquet")
    rows = labelled_rows(data, "train", "image", "label")
    assert not class_names(rows, "label")
    samples = Converted(rows, LabelledImage(("image", "label"), (8, 8), 1, 3, {}))
    assert samples[0]["image"].shape == (1, 8, 8)
    assert sorted({int(samples[number]["label"]) for number in range(len(samples))}) == [0, 1, 2]


@pytest.mark.bad_input("text labels of images in a Parquet view")
def test_text_labels_of_a_parquet_view_are_refused_with_what_to_use(tmp_path):
    table = datasets.Dataset.from_dict({"image": [b""] * 16, "label": ["cat", "dog"] * 8})
    table.to_parquet(tmp_path / "a.parquet", batch_size=4)
    data = DataConfig(path=str(tmp_path / "a.parquet"), view="parquet")
    rows = labelled_rows(data, "train", "image", "label")
    assert "use data.view=map, or store whole numbers" in message_of(65, class_names, rows, "label")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.txt", "testament.txt", "training_notes.txt"], {"train": 3}),
        (["training-0.csv", "testing-0.csv"], {"train": 1, "test": 1}),
        (["train_a.txt", "validation1.txt"], {"train": 1, "validation": 1}),
        (["wiki.train.txt", "wiki.valid.txt"], {"train": 1, "validation": 1}),
        (["en_train.csv", "de_train.csv", "EN_TEST.csv"], {"train": 2, "test": 1}),
        (["train.txt", "valid.txt", "LICENSE.txt", "vocab.txt"], {"train": 1, "validation": 1}),
        (["LICENSE.txt"], {"train": 1}),
        (["test.csv"], {"train": 1}),  # what was asked for
        (["test_io.py", "io.py", "val.py"], {"train": 3}),
        (["train/test.csv", "dev/train.csv"], {"train": 1, "validation": 1}),
        (["car/1.png", "train/1.png"], {"train": 2}),  # classes
    ],
)
def test_only_a_whole_word_names_a_split(names, splits, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\nsome\n")
    found = find_files(DataConfig(path=str(tmp_path)))
    assert {split: len(paths) for split, paths in found.splits.items()} == splits


@pytest.mark.bad_input("a folder in which one file names no split, and others do")
@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "test.jsonl", "extra.jsonl"],
        ["train.txt", "valid.txt", "test.txt", "extra.txt"],
        ["wiki.test.txt", "extra.txt"],
        ["train/1.png", "val/1.png", "extra/1.png"],
    ],
)
def test_a_file_that_names_no_split_beside_others_that_do_is_refused(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    said = message_of(65, find_files, DataConfig(path=str(tmp_path)))
    assert re.search(r"extra\S+ names no split, though \S+(test|val)", said)


@pytest.mark.bad_input("a folder with files to hold out, and none to train on")
def test_a_folder_without_files_to_train_on_is_refused(tmp_path):
    for name in ("dev.jsonl", "test.jsonl"):
        write_texts(tmp_path / name, ["a", "b"])
    said = message_of(65, find_files, DataConfig(path=str(tmp_path)))
    assert "dev.jsonl" in said
    assert "test.jsonl are to hold out, and none is to train on; name one of them train" in said


@pytest.mark.bad_input("a symbolic link to data that leads nowhere")
def test_files_behind_symbolic_links_are_read_and_a_link_to_nothing_is_named(tmp_path):
    write_texts(tmp_path / "real/b.jsonl", ["b"] * 20)
    write_texts(tmp_path / "data/a.jsonl", ["a"] * 10)
    (tmp_path / "data/more").symlink_to(tmp_path / "real")
    (tmp_path / "real/back").symlink_to(tmp_path / "data")
    data = DataConfig(path=str(tmp_path / "data"), validation_split="train")
    assert sorted(load_rows(data, "train")["text"]) == ["a"] * 10 + ["b"] * 20
    (tmp_path / "data/gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    assert "gone.jsonl" in message_of(65, load_rows, data, "train")


@pytest.mark.bad_input("`data.text_column`, `data.split` or `data.view` for a folder of tokens")
@pytest.mark.parametrize(
    ("key", "value"), [("text_column", "body"), ("split", "test"), ("view", "parquet")]
)
def test_settings_of_rows_are_refused_for_tokens(key, value, tmp_path):
    write_tokens(tmp_path)
    data = load_config(["--data.path", str(tmp_path), f"--data.{key}", value], {}).data
    said = message_of(64, token_documents, data, "train", BYTES)
    assert said.startswith(f"data.{key}={value} has no effect: data.path={tmp_path} holds tokens")


@pytest.mark.bad_input("`data.name` beside `data.path`")
def test_two_sources_at_once_are_refused():
    data = DataConfig(path="a.jsonl", name="user/name")
    assert "are two sources; remove one" in message_of(64, load_split, data, "train")


def test_a_row_that_can_not_be_encoded_is_named_by_its_number_in_the_file(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["text"] * 31 + [None] + ["text"] * 8)
    data = DataConfig(path=path, validation_split=0.01)
    said = message_of(65, token_documents, data, "train", BYTES)
    assert said.startswith("row 31: the column text")


@pytest.mark.bad_input("documents that do not fill one row")
def test_data_that_do_not_fill_one_row_are_refused_with_their_size(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["abc", "abd", "e" * 40])
    data = DataConfig(path=path, validation_split=0.1)
    rows = Packing(100, "cut", "split").rows
    documents = token_documents(data, "train", BYTES)
    said = message_of(65, rows, documents, "train")
    assert f"have {int(sum(documents.lengths))} tokens in all, fewer than one row of 100" in said
    assert rows(token_documents(data, "validation", BYTES), "validation") is None


def test_rows_that_another_process_converts_at_the_same_time_are_read(tmp_path, monkeypatch):
    look = datasets.load_dataset_builder

    def look_before_the_other_is_done(*args, **kwargs):
        builder = look(*args, **kwargs)
        look(*args, **kwargs).download_and_prepare()
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", look_before_the_other_is_done)
    data = DataConfig(path=write_texts(tmp_path / "a.jsonl", ["a", "b", "c"]), validation_split=0.3)
    assert len(load_rows(data, "train")) + len(load_rows(data, "validation")) == 3


@pytest.mark.bad_input("a full disk under the cache of `datasets`")
def test_a_full_disk_is_named_with_the_cache_and_not_with_a_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(converted, "convert", full)
    data = DataConfig(path=write_texts(tmp_path / "a.jsonl", ["a", "b"]))
    said = message_of(1, load_rows, data, "train")
    assert "the disk of the cache " in said
    assert said.endswith("is full; make room, or set HF_DATASETS_CACHE")


@pytest.mark.bad_input("tokens without `tokens.json`, or `--out` that is a file")
def test_tokens_without_their_manifest_are_named_and_a_file_is_no_folder_for_them(tmp_path):
    write_tokens(tmp_path / "tokens")
    (tmp_path / "tokens/tokens.json").unlink()
    data = DataConfig(path=str(tmp_path / "tokens"))
    said = message_of(65, token_documents, data, "train", BYTES)
    assert "holds tokens without their tokens.json" in said
    (tmp_path / "file").write_text("")
    assert "file is a file; give a folder" in message_of(64, write_tokens, tmp_path / "file")


@pytest.mark.bad_input("an image beside the folders of classes")
def test_a_stray_image_beside_class_folders_is_named(tmp_path):
    for name in ("cat/1.png", "dog/2.png", "stray.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / name)
    said = message_of(65, load_split, DataConfig(path=str(tmp_path)), "train", "image")
    assert "stray.png lies in no class's folder" in said
