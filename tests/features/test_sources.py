"""Data by config alone: formats, local and at an address, splits, images, and refusals by name."""

import bz2
import gzip
import json
import shutil
import sys
import zipfile
from types import SimpleNamespace

import datasets
import fsspec
import pytest
import torch
from messages import message_of
from PIL import Image
from test_config import assert_says

from dist_amp.config.load import load_config
from dist_amp.errors import DataError
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.sources.load import load_split
from dist_amp.task import build_split
from dist_amp.world import World

TEXTS = ["one", "two\nlines", "", "four"]
ROWS = [{"text": text, "n": n} for n, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'text,n\none,0\n"two\nlines",1\n"",2\nfour,3\n'


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def section(**settings):
    words = [word for key, value in settings.items() for word in (f"--data.{key}", str(value))]
    return load_config(words, {}).data


def rows_of(path, split="train", **settings):
    return load_split(section(path=path, **settings), split)


def all_rows(path, **settings):
    return rows_of(path, validation_split="train", **settings)


def write(folder, name, content):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def write_saved(folder, splits=False):
    rows = datasets.Dataset.from_list(ROWS)
    if splits:
        rows = datasets.DatasetDict(train=rows, test=rows.select([0]))
    rows.save_to_disk(folder)


def write_documents(folder):
    for n, text in enumerate(TEXTS):
        write(folder, f"{n}.txt", text)


FORMATS = {
    "documents": write_documents,
    "parquet": lambda folder: datasets.Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet"),
    "saved": write_saved,
    "saved_splits": lambda folder: write_saved(folder, splits=True),
    "rows.jsonl": LINES,
    "rows.json": json.dumps(ROWS),
    "rows.jsonl.gz": gzip.compress(LINES.encode()),
    "rows.csv.bz2": bz2.compress(CSV.encode()),
    "rows.tsv": CSV.replace(",", "\t"),
}


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
    for n, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (n, n, n)).save(folder / name)


@PLACES
@pytest.mark.parametrize("kind", FORMATS)
def test_a_folder_of_any_format_has_the_same_rows_wherever_it_is(tmp_path, kind, place):
    if callable(FORMATS[kind]):
        FORMATS[kind](tmp_path)
    else:
        write(tmp_path, kind, FORMATS[kind])
    # A table has no way to write an empty text: it is read as missing.
    empty = None if "csv" in kind or "tsv" in kind else ""
    assert all_rows(place(tmp_path))["text"][:] == [text or empty for text in TEXTS]


def test_a_file_in_a_zip_archive_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("inside/rows.jsonl", LINES)
    assert all_rows(f"zip://inside/*.jsonl::{tmp_path}/all.zip")["text"][:] == TEXTS


@PLACES
def test_a_glob_names_some_of_the_files_of_a_folder(tmp_path, place):
    for name in ("a1", "b1"):
        write(tmp_path, f"{name}.jsonl", json.dumps({"text": name}) + "\n")
    (tmp_path / "a2.jsonl").symlink_to(tmp_path / "b1.jsonl")
    assert all_rows(f"{place(tmp_path)}/a*.jsonl")["text"][:] == ["a1", "b1"]


def test_splits_are_read_by_the_names_of_files(tmp_path):
    names = ["en/train_a.jsonl", "de/train_b.jsonl", "en/dev_a.jsonl"]
    for name in names:
        write(tmp_path, name, json.dumps({"text": name}) + "\n")
    assert sorted(rows_of(tmp_path)["text"]) == sorted(names[:2])
    assert rows_of(tmp_path, "validation")["text"][:] == names[2:]


def test_hidden_files_and_a_readme_are_not_data(tmp_path):
    files = {"README.md": "about", "LICENSE": "free", ".cache/more.csv": CSV, "rows.jsonl": LINES}
    for name, content in files.items():
        write(tmp_path, name, content)
    assert all_rows(tmp_path)["text"][:] == TEXTS


def test_data_format_reads_unknown_endings_and_chooses_among_known_ones(tmp_path):
    write(tmp_path, "rows.log", LINES)
    assert all_rows(tmp_path / "rows.log", format="json")["text"][:] == TEXTS
    write(tmp_path, "other.csv", "text\nfrom a table\n")
    write(tmp_path, "rows.txt", "a document")
    assert all_rows(tmp_path, format="csv")["text"][:] == ["from a table"]


def test_a_dataset_in_the_hubs_layout_has_configurations(tmp_path):
    listed = [f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("en", "de")]
    write(tmp_path, "README.md", f"---\nconfigs:\n{''.join(listed)}---\n")
    for name in ("en", "de"):
        write(tmp_path, f"{name}.jsonl", json.dumps({"text": name}) + "\n")
    assert load_split(section(name=f"{tmp_path}:de"), "train")["text"] == ["de"]
    message = message_of(65, load_split, section(name=f"{tmp_path}:fr"), "train")
    assert_says(message, f"data.name={tmp_path}:fr could not be loaded", "'fr' not found", "['en'")


@PLACES
def test_the_folders_of_images_are_their_labels(tmp_path, place):
    write_images(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png")
    rows = all_rows(place(tmp_path), text_column="image")
    assert rows.features["label"].names == ["cat", "dog"]
    pixels = [(row["image"].getpixel((0, 0))[0], row["label"]) for row in rows]
    assert pixels == [(0, 0), (1, 0), (2, 1)]


def test_images_without_folders_have_no_label_and_are_not_copied_or_decoded_early(tmp_path):
    for name in ("1.png", "2.JPG"):
        write(tmp_path, name, "no picture")
    rows = all_rows(tmp_path, text_column="image")
    assert (rows.column_names, len(rows)) == (["image"], 2)
    assert list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow")) == []


@pytest.mark.bad_input("an image that can't be decoded")
@PLACES
@pytest.mark.parametrize("damage", [lambda whole: whole[:45], lambda whole: b"no picture"])
def test_an_image_that_can_not_be_decoded_is_named_with_its_file(tmp_path, place, damage):
    write_images(tmp_path, "a/0.png", "b/1.png")
    write(tmp_path, "b/1.png", damage((tmp_path / "b/1.png").read_bytes()))
    rows = all_rows(place(tmp_path), text_column="image").with_format("torch")
    error = Fetch(rows, SimpleNamespace(collate=list), "training")[Shard((0, 1))]
    assert isinstance(error, DataError)
    named = f"{tmp_path}/b/1.png can't be decoded"
    assert_says(str(error), "sample 1 of the training split", named, "image file")


@pytest.mark.bad_input(
    "a `data.path` whose protocol is unknown, or whose package or compression is not installed"
)
def test_a_protocol_or_compression_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    message = message_of(64, rows_of, "s3://bucket/rows.jsonl")
    cause = "is no address that can be opened: Install s3fs to access S3; use a local path"
    assert_says(message, f"data.path=s3://bucket/rows.jsonl {cause}")
    message = message_of(64, rows_of, "nowhere://rows.jsonl")
    assert_says(message, "is no address that can be opened: Protocol not known: nowhere")
    monkeypatch.setattr(datasets.config, "ZSTANDARD_AVAILABLE", False)
    write(tmp_path, "rows.jsonl.zst", bytes.fromhex("28b52ffd") + bytes(20))
    assert message_of(65, rows_of, tmp_path).endswith("; install it with `pip install zstandard`")


def table(folder, content, name="rows.csv"):
    """The rows of a table, as lists of values, below the names of its columns."""
    write(folder, name, content)
    rows = all_rows(folder / name)
    return [list(rows.column_names), *([*row.values()] for row in rows)]


@pytest.mark.parametrize("field", ["None", "NA", "nan", "00042", "17", "1.50", "True", " a"])
def test_the_text_column_of_a_table_is_read_as_it_is_written(tmp_path, field):
    assert table(tmp_path, f"text,n\n{field},1\n{field},2\n")[1:] == [[field, 1], [field, 2]]


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (["1", " 2", "+3"], [1, 2, 3]),
        (["1", "", "NA"], [1.0, None, None]),
        (["1", "2.5", "-1e-3", ".5"], [1.0, 2.5, -0.001, 0.5]),
        (["1", "b"], ["1", "b"]),
        (["00042", "17"], ["00042", "17"]),
        (["NA", "DE"], ["NA", "DE"]),
        (["1", str(2**70)], ["1", str(2**70)]),
        (["1.5", str(2**70)], [1.5, 2.0**70]),
        (["True", "", "false"], [True, None, False]),
        (["True", "1"], ["True", "1"]),
        (["", ""], [None, None]),
        (['"a\nb"', '"x, ""y"""'], ["a\nb", 'x, "y"']),
    ],
)
def test_a_column_of_a_table_has_one_type_that_fits_all_rows(tmp_path, monkeypatch, fields, values):
    monkeypatch.setattr("dist_amp.sources.converted.ROWS_AT_ONCE", 1)
    content = "".join(f"t,{field}\n" for field in fields)
    read = [row[1] for row in table(tmp_path, f"text,x\n{content}")[1:]]
    assert [(type(value), value) for value in read] == [(type(value), value) for value in values]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("\ufefftext,n\na,1\n", [["text", "n"], ["a", 1]]),
        ("text,n\r\na,1\r\n", [["text", "n"], ["a", 1]]),
        ("text,n\n\na,1\n  \n", [["text", "n"], ["a", 1]]),
        (",text\n0,a\n", [["Unnamed: 0", "text"], [0, "a"]]),
    ],
)
def test_a_table_is_the_same_whatever_program_wrote_it(tmp_path, content, rows):
    assert table(tmp_path, content) == rows


def test_the_columns_and_types_of_tables_fit_all_files_in_any_order(tmp_path):
    write(tmp_path, "a.csv", "text,n\na,1\n")
    write(tmp_path, "b.csv", "n,text\n2.5,b\n")
    write(tmp_path, "c.csv", "text,n\n")
    assert list(all_rows(tmp_path)) == [{"text": "a", "n": 1.0}, {"text": "b", "n": 2.5}]


def numbers_of(folder, split, share):
    return [row["n"] for row in rows_of(folder, split, validation_split=share)]


def test_held_out_rows_are_drawn_and_the_rest_keeps_the_order_of_the_file(tmp_path):
    write(tmp_path, "rows.csv", "text,n\n" + "".join(f"t,{n}\n" for n in range(40)))
    train, held_out = (numbers_of(tmp_path, split, 0.2) for split in ("train", "validation"))
    drawn = all_rows(tmp_path).train_test_split(test_size=0.2, seed=0)
    assert held_out == drawn["test"]["n"][:], "the rows that earlier versions held out"
    assert train == sorted(set(range(40)) - set(held_out))
    assert numbers_of(tmp_path, "train", "shuffled:.2") == drawn["train"]["n"][:]


@pytest.mark.parametrize(("share", "first"), [("last", 38), ("last:.25", 30)])
def test_the_last_rows_can_be_held_out(tmp_path, share, first):
    write(tmp_path, "rows.csv", "text,n\n" + "".join(f"t,{n}\n" for n in range(40)))
    assert numbers_of(tmp_path, "train", share) == [*range(first)]
    assert numbers_of(tmp_path, "validation", share) == [*range(first, 40)]


def test_dates_in_json_stay_texts(tmp_path):
    dates = ["2024-01-01", "2024-01-01T10:00:00Z"]
    rows = [{"text": date, "m": [{"d": date}]} for date in dates]
    write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path, "b.jsonl", '{"text": "a", "m": []}\n')
    assert list(all_rows(tmp_path))[:2] == rows


CUT = gzip.compress((LINES + '{"text": "cut').encode())
GOOD_LINE = b'{"text": "good"}\n'
UNFIT = "another number of fields"


@pytest.mark.bad_input("a file, folder or glob that names nothing, a folder without known endings")
@pytest.mark.bad_input("a folder of tokens for a task that reads rows")
@pytest.mark.bad_input("a `data.format` that contradicts the files")
@pytest.mark.bad_input(
    "damaged JSON lines, CSV, Parquet or compressed files; text that is not UTF-8"
)
@pytest.mark.bad_input("a share of the last rows that is no share")
@pytest.mark.bad_input("a file without rows")
@pytest.mark.bad_input(
    "a row of a table with more or fewer fields than the header, or in other ones"
)
@pytest.mark.bad_input("a table that is empty, of a header alone, or names a column twice")
@pytest.mark.bad_input("JSON whose values have another type than those of the first rows")
@pytest.mark.bad_input("files of a source with different columns")
@pytest.mark.parametrize(
    ("files", "settings", "status", "fragment"),
    [
        ({}, {"path": "nothing"}, 65, "data.path=nothing names no file"),
        ({}, {"path": "nothing/*.jsonl"}, 65, "data.path=nothing/*.jsonl names no file"),
        ({}, {"path": "memory://nothing"}, 65, "data.path=memory://nothing names no file"),
        ({"LICENSE": ""}, {}, 65, "data.path=. must name files of one format"),
        ({}, {"pack": "best_fit"}, 64, "data.pack=best_fit is for tasks that read tokens"),
        ({"tokens.json": "{}"}, {}, 65, "data.path=. holds tokens"),
        ({"a.csv": CSV}, {"format": "json"}, 64, "is files such as a.csv; leave it out"),
        # Damage after a good file.
        (
            {"a.jsonl": GOOD_LINE, "b.jsonl": LINES + '{"text": oops}'},
            {},
            65,
            "line 5 of b.jsonl is",
        ),
        (
            {"a.jsonl.gz": gzip.compress(GOOD_LINE), "b.jsonl.gz": CUT},
            {},
            65,
            "line 5 of b.jsonl.gz is",
        ),
        ({"a.jsonl.gz": gzip.compress(b"a" * 999)[:20]}, {}, 65, "end-of-stream"),
        ({"a.csv": b"text\ncaf\xe9\n"}, {}, 65, "line 2 of a.csv is not UTF-8"),
        ({"a.parquet": b"PAR1 no footer"}, {}, 65, "a.parquet can't be read as Parquet"),
        ({"a.jsonl": LINES}, {"validation_split": "last:2"}, 65, "last:2 does not exist"),
        ({"a.jsonl": LINES}, {"validation_split": "last:0.0"}, 65, "last:0.0 does not exist"),
        ({"a.jsonl": LINES}, {"validation_split": "last:x"}, 65, "last:x does not exist"),
        (
            {"a.csv": "text,n\na,b,1\n"},
            {},
            65,
            f"a.csv, line 2 has {UNFIT} (3) than the header",
        ),
        ({"a.csv": 'text,n\n"a\nb",1\n\nb\n'}, {}, 65, f"a.csv, line 5 has {UNFIT} (1)"),
        ({"a.csv": "text,n\na;1\n"}, {}, 65, "than the header (2), which is text,n; separate"),
        ({"a.csv": "text;n\na;1\n"}, {}, 65, "text does not exist; the columns are text;n"),
        ({"a.csv": 'text,n\n"b,2\nc,3\n'}, {}, 65, "can't be read as CSV: unexpected end of data"),
        ({"a.csv": "text,n,n\na,1,2\n"}, {}, 65, "line 1 names column n twice; rename one"),
        ({"a.csv": ""}, {}, 65, "a.csv is empty; its first line must name the columns"),
        ({"a.csv": "text,n\n"}, {}, 65, "it has no rows"),
        ({"a.jsonl": "\n\n"}, {}, 65, "data.path=. could not be loaded: it has no rows; check"),
        ({"a.jsonl": '{"x": 42}', "b.jsonl": '{"x": "00042"}'}, {}, 65, "column x is int64 in"),
        ({"a.jsonl": '{"x": 42}', "b.jsonl": '{"x": true}'}, {}, 65, "column x is "),
        ({"a.jsonl": '{"x": true}', "b.jsonl": '{"x": 7}'}, {}, 65, "column x is "),
        ({"a.jsonl": GOOD_LINE, "b.jsonl": '{"title": "a"}'}, {}, 65, "names don't match"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(
    tmp_path, monkeypatch, files, settings, status, fragment
):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        write(tmp_path, name, content)
    message = message_of(status, rows_of, **{"path": ".", **settings})
    assert fragment in message.replace(f"{tmp_path}/", "")


@pytest.mark.bad_input("a store that does not answer")
def test_a_store_that_denies_access_is_refused_with_the_cause(monkeypatch):
    def refuse(*args, **options):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", refuse)
    fsspec.filesystem("memory").pipe("/shut/rows.jsonl", b"{}")
    cause = "memory:///shut can't be read: 403 Forbidden (Forbidden); check the credentials"
    assert_says(message_of(65, rows_of, "memory://shut"), cause)


@pytest.mark.bad_input(
    "a folder of `save_to_disk` that is cut off, incomplete or written by something else"
)
def test_a_saved_folder_that_is_damaged_or_of_another_kind_is_refused(tmp_path):
    write_saved(tmp_path / "cut")
    arrow = tmp_path / "cut/data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:-100])
    shutil.copytree(tmp_path / "cut", tmp_path / "half")
    (tmp_path / "half/state.json").unlink()
    message = message_of(64, rows_of, tmp_path / "cut", format="csv")
    assert_says(message, "a folder of the format saved")
    for folder, cause in {"cut": "Expected to", "half": "neither a `Dataset` directory"}.items():
        message = message_of(65, rows_of, tmp_path / folder)
        loaded = f"data.path={tmp_path}/{folder} could not be loaded: "
        assert_says(message, loaded, cause, "again with save_to_disk")


class Streams(torch.utils.data.IterableDataset):
    """torch's own has a __getitem__, which fails."""

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


@pytest.mark.bad_input("a `build_dataset` that returns a stream (an `IterableDataset`)")
def test_a_stream_is_refused_with_what_to_use_instead():
    for stream in (Streams(), datasets.Dataset.from_list(ROWS).to_iterable_dataset()):
        task = SimpleNamespace(build_dataset=lambda split, stream=stream: stream)
        message = message_of(65, build_split, task, "train", World())
        assert_says(message, type(stream).__name__, "map-style", "data.path", "save_to_disk")
