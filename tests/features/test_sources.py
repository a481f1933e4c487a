"""Data by config alone: formats, local and at an address, splits, images, and refusals by name."""

import bz2
import gzip
import json
import os
import sys
import zipfile
from types import SimpleNamespace

import datasets
import fsspec
import pytest
import torch
from messages import message_of
from PIL import Image
from tiny import make_run, variant

from dist_amp.config.load import load_config
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.settings import DataConfig
from dist_amp.sources.files import find_files
from dist_amp.sources.load import Converted, load_split
from dist_amp.task import build_split
from dist_amp.world import World

pytestmark = pytest.mark.usefixtures("own_cache")
TEXTS = ["one", "two\nlines", "", "four"]
ROWS = [{"text": text, "n": n} for n, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'text,n\none,0\n"two\nlines",1\n"",2\nfour,3\n'


def section(**settings):
    words = [word for key, value in settings.items() for word in (f"--data.{key}", str(value))]
    return load_config(words, {}).data


def rows_of(path, split="train", **settings):
    return load_split(section(path=path, **settings), split)


def all_rows(path, **settings):
    return rows_of(path, validation_split="train", **settings)


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


FORMATS = {
    "documents": {f"{n}.txt": text for n, text in enumerate(TEXTS)},
    "json": {"rows.json": json.dumps(ROWS)},
    "lines": {"rows.jsonl.gz": gzip.compress(LINES.encode())},
    "csv": {"rows.csv.bz2": bz2.compress(CSV.encode())},
    "tsv": {"rows.tsv": CSV.replace(",", "\t")},
    "parquet": {},
    "saved": {},
}
NOT_DATA = {"README.md": "about", "LICENSE": "free", ".cache/more.csv": CSV}


def in_memory(folder):
    """The address of a copy in fsspec's memory, which stands for a store on the network."""
    address = f"memory:/{folder}"
    memory, root = fsspec.core.url_to_fs(address)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            memory.pipe(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return address


PLACES = pytest.mark.parametrize("place", [str, in_memory], ids=["local", "memory"])


def write_images(folder, *names):
    """Pictures of one colour each, which is their number."""
    write(folder, dict.fromkeys(names, ""))
    for n, name in enumerate(names):
        Image.new("RGB", (8, 6), (n, n, n)).save(folder / name)


@PLACES
@pytest.mark.parametrize("kind", FORMATS)
def test_a_folder_of_any_format_has_the_same_rows_wherever_it_is(tmp_path, kind, place):
    rows = datasets.Dataset.from_list(ROWS)
    if kind == "parquet":
        rows.to_parquet(tmp_path / "rows.parquet")
    if kind == "saved":
        datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path)
    write(tmp_path, FORMATS[kind] | NOT_DATA)
    assert all_rows(place(tmp_path))["text"][:] == TEXTS


@PLACES
def test_a_glob_names_some_of_the_files_of_a_folder(tmp_path, place):
    write(tmp_path, {f"{name}.jsonl": f'{{"text": "{name}"}}' for name in ("a1", "b1")})
    (tmp_path / "a2.jsonl").symlink_to(tmp_path / "b1.jsonl")
    assert all_rows(f"{place(tmp_path)}/a*.jsonl")["text"][:] == ["a1", "b1"]


@pytest.mark.bad_input("a symbolic link to data that leads nowhere")
def test_files_in_archives_and_behind_links_are_read_and_a_link_to_nothing_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("inside/rows.jsonl", LINES)
    assert all_rows(f"zip://inside/*.jsonl::{tmp_path}/all.zip")["text"][:] == TEXTS
    write(tmp_path, {"real/b.jsonl": '{"text": "b"}', "data/a.jsonl": '{"text": "a"}'})
    (tmp_path / "data/more").symlink_to(tmp_path / "real")
    (tmp_path / "data/twin").symlink_to(tmp_path / "data/more")
    os.mkfifo(tmp_path / "data/pipe.jsonl")
    assert sorted(all_rows(tmp_path / "data")["text"]) == ["a", "b"]
    (tmp_path / "data/gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    assert "gone.jsonl" in message_of(65, all_rows, tmp_path / "data")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("training-0.csv testing-0.csv", {"train": 1, "test": 1}),
        ("en_train.csv de_train.csv EN_TEST.csv", {"train": 2, "test": 1}),
        ("train.txt wiki.valid.txt LICENSE.txt vocab.txt", {"train": 1, "validation": 1}),
        ("test_io.py io.py val.py", {"train": 3}),
        ("car/1.png train/1.png", {"train": 2}),  # classes
        ("train/bus/train_1.png train/train/test_2.png test/a/3.png", {"train": 2, "test": 1}),
    ],
)
def test_a_whole_word_of_a_path_names_a_split(names, splits, tmp_path):
    write(tmp_path, dict.fromkeys(names.split(), "text\nsome\n"))
    found = find_files(DataConfig(path=str(tmp_path)))
    assert {split: len(paths) for split, paths in found.splits.items()} == splits


@PLACES
def test_the_folders_of_images_are_their_labels(tmp_path, place):
    write_images(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png")
    rows = all_rows(place(tmp_path), text_column="image")
    assert rows.features["label"].names == ["cat", "dog"]
    pixels = [(row["image"].getpixel((0, 0))[0], row["label"]) for row in rows]
    assert pixels == [(0, 0), (1, 0), (2, 1)]


@pytest.mark.bad_input("an image that can't be decoded")
def test_an_image_that_can_not_be_decoded_is_named_with_its_file(tmp_path):
    write_images(tmp_path, "a/0.png", "b/1.png")
    write(tmp_path, {"b/1.png": (tmp_path / "b/1.png").read_bytes()[:45]})
    rows = Converted(all_rows(tmp_path, text_column="image"), dict)
    error = Fetch(rows, SimpleNamespace(collate=list), "training")[Shard((0, 1))]
    assert f"{tmp_path}/b/1.png: OSError: image file is truncated" in str(error)


@pytest.mark.parametrize(
    ("header", "fields", "values"),
    [
        ("text,x", ["1", "", "NA"], [1, None, None]),
        ("text,x", ["NA", "DE"], ["NA", "DE"]),
        ("text,x", ['"a\nb"', '"x, ""y"""'], ["a\nb", 'x, "y"']),
        ("x,text", ["00042", "None", " a"], ["00042", "None", " a"]),
        ("x,text", ["7"], ["7"]),
    ],
)
def test_a_column_of_a_table_has_one_type_that_fits_all_rows_and_text_is_what_stands_there(
    tmp_path, header, fields, values
):
    write(tmp_path, {"rows.csv": f"{header}\n" + "".join(f"t,{field}\n" for field in fields)})
    read = all_rows(tmp_path / "rows.csv")[header.split(",")[1]]
    assert [(type(value), value) for value in read] == [(type(value), value) for value in values]


def test_tables_are_the_same_whatever_program_wrote_them_and_have_the_types_of_the_first(tmp_path):
    tables = ("\ufefftext,n\n\na,1.5\n", "text,n\nb,2\n", "text,n\n")
    write(tmp_path, {f"{number}.csv": table for number, table in enumerate(tables)})
    assert list(all_rows(tmp_path)) == [{"text": "a", "n": 1.5}, {"text": "b", "n": 2.0}]


def test_held_out_rows_are_drawn_and_the_rest_keeps_the_order_of_the_file(tmp_path):
    write(tmp_path, {"rows.csv": "text,n\n" + "".join(f"t,{n}\n" for n in range(40))})
    few, drawn = (all_rows(tmp_path).train_test_split(size, seed=0) for size in (0.05, 0.2))
    held_out = drawn["test"]["n"][:]  # as in earlier versions
    rest = sorted(set(range(40)) - set(held_out))
    for share, *parts in (
        ("0.2", rest, held_out),
        ("shuffled:.2", drawn["train"]["n"][:], held_out),
        ("shuffled", few["train"]["n"][:], few["test"]["n"][:]),
        ("last", [*range(38)], [38, 39]),
        ("last:.25", [*range(30)], [*range(30, 40)]),
    ):
        for split, expected in zip(("train", "validation"), parts, strict=True):
            assert rows_of(tmp_path, split, validation_split=share)["n"][:] == expected


GOOD = '{"text": "good"}\n'
PNG = dict.fromkeys(("cat/1.png", "dog/2.png", "stray.png"), "")


@pytest.mark.bad_input("a path with no files, or with files of no known protocol, kind or split")
@pytest.mark.bad_input("damaged JSON lines, CSV or compressed files, or rows of other types")
@pytest.mark.parametrize(
    ("files", "settings", "status", "fragment"),
    [
        ({}, {"path": "s3://bucket/a.jsonl"}, 64, "Install s3fs to access S3; use a local path"),
        ({"tokens.json": "{}"}, {}, 65, "data.path=. holds tokens"),
        ({"a.jsonl": GOOD, "b.jsonl": LINES + "oops"}, {}, 65, "line 5 of b.jsonl can't be read"),
        ({"a.jsonl.gz": gzip.compress(b"a" * 999)[:20]}, {}, 65, "end-of-stream"),
        ({"a.txt": b"some\ncaf\xe9\n"}, {}, 65, "line 2 of a.txt is not UTF-8"),
        ({"a.csv": b"text\ncaf\xe9\n"}, {}, 65, "a.csv can't be read as a table: In CSV"),
        ({"a.jsonl": LINES}, {"validation_split": "last:2"}, 65, "last:2 does not exist"),
        ({"a.jsonl": LINES}, {"validation_split": "nan"}, 64, "a share above 0 and below 1"),
        ({"a.jsonl": LINES}, {"path": ""}, 64, "data.path=(nothing) on the command line must be"),
        ({"a.csv": "text,n\na,b,1\n"}, {}, 65, "Row #2: Expected 2 columns, got 3: a,b,1; correct"),
        ({"a.csv": "text,n\na,1\n", "b.csv": "text,n\na,b\n"}, {}, 65, "b.csv can't be read as"),
        ({"a.jsonl": GOOD, "b.jsonl": '{"title": "a"}'}, {}, 65, "names don't match"),
        ({"test.jsonl": GOOD, "a.jsonl": GOOD}, {}, 65, "a.jsonl, test.jsonl: if some file name"),
        ({"dev.jsonl": GOOD, "test.jsonl": GOOD}, {}, 65, "all must, one of them train, so"),
        (PNG, {"text_column": "image"}, 65, "stray.png is not in a class folder"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(
    tmp_path, monkeypatch, files, settings, status, fragment
):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files)
    message = message_of(status, rows_of, **{"path": ".", **settings})
    assert fragment in message.replace(f"{tmp_path}/", "")


@pytest.mark.bad_input("a `build_dataset` that returns a stream (an `IterableDataset`)")
def test_a_stream_is_refused_with_what_to_use_instead():
    # torch's own has a __getitem__, which fails.
    methods = {"__iter__": lambda self: iter(range(8)), "__len__": lambda self: 8}
    own = type("Stream", (torch.utils.data.IterableDataset,), methods)()
    for stream in (own, datasets.Dataset.from_list(ROWS).to_iterable_dataset()):
        task = variant(build_dataset=lambda split, stream=stream: stream)
        assert "map-style" in message_of(65, build_split, task, "train", World())


def test_rows_that_another_process_converts_at_the_same_time_are_read(tmp_path, monkeypatch):
    look = datasets.load_dataset_builder

    def look_before_the_other_is_done(*args, **kwargs):
        builder = look(*args, **kwargs)
        look(*args, **kwargs).download_and_prepare()
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", look_before_the_other_is_done)
    write(tmp_path, {"a.jsonl": LINES})
    assert len(all_rows(tmp_path)) == 4


def test_a_worker_sends_conjugated_and_negated_views():
    def collate(samples):
        x = torch.stack([sample["x"] for sample in samples])
        return {"x": x, "conjugated": torch.complex(x, x).conj(), "negative": x._neg_view()}

    run = make_run(World(), variant(collate=collate), "--data.workers", 1)
    (batch,) = next(run.data)
    run.data.close()
    assert torch.equal(batch["conjugated"].imag, -batch["x"])
    assert torch.equal(batch["negative"], -batch["x"])
