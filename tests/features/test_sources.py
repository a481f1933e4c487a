"""Data by config alone: every format, local or at an address, its splits, images; and what can't be
read, by name.
"""

import bz2
import gzip
import json
import shutil
import sys
import zipfile
from types import SimpleNamespace

import datasets
import fsspec
import numpy
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
    if isinstance(content, str):
        content = content.encode()
    (folder / name).write_bytes(content)


def write_saved(folder, splits=False):
    rows = datasets.Dataset.from_list(ROWS)
    if splits:
        rows = datasets.DatasetDict(train=rows, test=rows.select([0]))
    rows.save_to_disk(folder)


FORMATS = {
    "parquet": lambda folder: datasets.Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet"),
    "saved": write_saved,
    "saved_splits": lambda folder: write_saved(folder, splits=True),
}
FILES = {
    "rows.jsonl": LINES,
    "rows.json": json.dumps(ROWS),
    "rows.jsonl.gz": gzip.compress(LINES.encode()),
    "rows.csv": CSV,
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
    """Pictures, each of one colour, that grows with their number."""
    for n, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (n, n, n)).save(folder / name)


@PLACES
@pytest.mark.parametrize("kind", ["documents", *FORMATS, *FILES])
def test_a_folder_of_any_format_has_the_same_rows_wherever_it_is(tmp_path, kind, place):
    if kind in FILES:
        write(tmp_path, kind, FILES[kind])
    elif kind in FORMATS:
        FORMATS[kind](tmp_path)
    else:
        for n, text in enumerate(TEXTS):
            write(tmp_path, f"{n}.txt", text)
    # A table of text has no word for an empty one: the library reads it as missing.
    empty = None if "csv" in kind or "tsv" in kind else ""
    assert all_rows(place(tmp_path))["text"][:] == [text or empty for text in TEXTS]


def test_a_zip_file_is_an_address_as_any_other(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("inside/rows.jsonl", LINES)
    assert all_rows(f"zip://inside/*.jsonl::{tmp_path}/all.zip")["text"][:] == TEXTS


def test_a_store_on_the_network_is_read_where_the_hub_is_off(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    write(tmp_path, "rows.jsonl", LINES)
    assert len(all_rows(in_memory(tmp_path))) == 4
    assert datasets.config.HF_HUB_OFFLINE


@PLACES
def test_a_glob_names_some_of_the_files_of_a_folder(tmp_path, place):
    for name in ("a1", "b1"):
        write(tmp_path, f"{name}.jsonl", json.dumps({"text": name}) + "\n")
    (tmp_path / "a2.jsonl").symlink_to(tmp_path / "b1.jsonl")
    assert all_rows(f"{place(tmp_path)}/a*.jsonl")["text"][:] == ["a1", "b1"]


def test_a_name_with_a_patterns_letters_is_a_name(tmp_path):
    write(tmp_path, "x[1]*.jsonl", LINES)
    assert len(all_rows(tmp_path / "x[1]*.jsonl")) == len(all_rows(tmp_path)) == 4


@pytest.mark.parametrize(
    "names",
    [
        "train.jsonl validation.jsonl",
        "train-0.jsonl train-1.jsonl val-0.jsonl",
        "en/train_a.jsonl de/train_b.jsonl en/dev_a.jsonl",
        "train/0.jsonl train/1.jsonl valid/0.jsonl",
        "data/train-0.jsonl data/test-0.jsonl",
    ],
)
def test_names_of_files_or_folders_tell_the_splits(tmp_path, names):
    for name in names.split():
        write(tmp_path, name, json.dumps({"text": name}) + "\n")
    train, held_out = (sorted(rows_of(tmp_path, s)["text"]) for s in ("train", "validation"))
    assert train == sorted(name for name in names.split() if "train" in name)
    assert sorted(train + held_out) == sorted(names.split())


def test_where_some_names_of_texts_tell_no_split_a_part_of_all_files_is_held_out(tmp_path):
    for name in ("train", "validation", "values", "more"):
        write(tmp_path, f"{name}.py", "a\nb\n")
    assert (len(rows_of(tmp_path)), len(rows_of(tmp_path, "validation"))) == (3, 1)


def test_hidden_files_and_a_clones_readme_are_no_data(tmp_path):
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


# ---- images ----


@PLACES
def test_an_image_folder_has_its_classes_as_labels(tmp_path, place):
    write_images(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png")
    rows = all_rows(place(tmp_path), text_column="image")
    assert rows.features["label"].names == ["cat", "dog"]
    pixels = [(row["image"].getpixel((0, 0))[0], row["label"]) for row in rows]
    assert pixels == [(0, 0), (1, 0), (2, 1)]
    assert rows.with_format("torch")[2]["image"].shape == (3, 6, 8)


def test_an_image_folders_splits_are_folders_and_no_classes(tmp_path):
    """A picture of the class `train` is none: its own name and its class tell no split."""
    write_images(tmp_path, "train/bus/train_1.png", "train/train/test_2.png", "test/bus/3.png")
    train, test = (rows_of(tmp_path, s, text_column="image") for s in ("train", "validation"))
    assert (len(train), len(test)) == (2, 1)
    assert train.features["label"].names == test.features["label"].names == ["bus", "train"]
    assert train["label"][:] == [0, 1]


def test_images_without_folders_have_no_label_and_are_neither_copied_nor_read_early(tmp_path):
    for name in ("1.png", "2.JPG"):
        write(tmp_path, name, "no picture")
    rows = all_rows(tmp_path, text_column="image")
    assert (rows.column_names, len(rows)) == (["image"], 2)
    assert not list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))


@pytest.mark.bad_input("an image that can't be decoded")
@PLACES
def test_an_image_that_can_not_be_decoded_is_named_with_its_file(tmp_path, place):
    noise = numpy.random.default_rng(0).integers(0, 255, (8, 8, 3), numpy.uint8)
    write_images(tmp_path, "a/0.png", "b/1.png")
    Image.fromarray(noise).save(tmp_path / "b/1.png")
    whole = (tmp_path / "b/1.png").read_bytes()
    for damaged in (whole[:100], b"no picture"):
        write(tmp_path, "b/1.png", damaged)
        rows = all_rows(place(tmp_path), text_column="image").with_format("torch")
        error = Fetch(rows, SimpleNamespace(collate=list), "training")[Shard((0, 1))]
        assert isinstance(error, DataError)
        said = f"{tmp_path}/b/1.png can't be decoded"
        assert_says(str(error), "sample 1 of the training split", said, "image file")


# ---- what can't be read ----


@pytest.mark.bad_input(
    "a `data.path` whose protocol is unknown, or whose package or compression is not installed"
)
def test_an_address_whose_protocol_or_compression_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    message = message_of(64, rows_of, "s3://bucket/rows.jsonl")
    said = "is no address that can be opened: Install s3fs to access S3; use a local path"
    assert_says(message, f"data.path=s3://bucket/rows.jsonl {said}")
    message = message_of(64, rows_of, "nowhere://rows.jsonl")
    assert_says(message, "is no address that can be opened: Protocol not known: nowhere")
    monkeypatch.setattr(datasets.config, "ZSTANDARD_AVAILABLE", False)
    write(tmp_path, "rows.jsonl.zst", bytes.fromhex("28b52ffd") + bytes(20))
    assert message_of(65, rows_of, tmp_path).endswith("; install it with `pip install zstandard`")


@pytest.mark.bad_input(
    "a file, folder or glob that names nothing, a folder without known endings, or a store that "
    "does not answer"
)
def test_a_path_that_names_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LICENSE").touch()
    for path in ("nothing", "nothing/*.jsonl", "file:///nothing.csv", "memory://nothing"):
        assert_says(message_of(65, rows_of, path), f"data.path={path} names no file")
    assert_says(message_of(65, rows_of, "."), "data.path=. must name files of one format")

    def refuse(*args, **options):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", refuse)
    fsspec.filesystem("memory").pipe("/shut/rows.jsonl", b"{}")
    said = "memory:///shut can't be read: 403 Forbidden (Forbidden); check the credentials"
    assert_says(message_of(65, rows_of, "memory://shut"), said)


@pytest.mark.bad_input("a folder of tokens for a task that reads rows")
def test_tokens_and_their_settings_are_refused_where_rows_are_read(tmp_path):
    message = message_of(64, rows_of, tmp_path, pack="best_fit")
    assert message.startswith("data.pack=best_fit is for tasks that read tokens")
    write(tmp_path, "tokens.json", "{}")
    message = message_of(65, rows_of, tmp_path)
    assert_says(message, f"data.path={tmp_path} holds tokens", "a task that takes tokens")


@pytest.mark.bad_input("a `data.format` that contradicts the files")
def test_a_format_that_contradicts_the_files_is_refused(tmp_path):
    write(tmp_path, "rows.csv", CSV)
    for format_ in ("json", "saved"):
        message = message_of(64, rows_of, tmp_path, format=format_)
        contradicts = f"data.format={format_} contradicts"
        assert_says(message, contradicts, f"{tmp_path}/rows.csv", "leave it out")
    write_saved(tmp_path / "saved")
    message = message_of(64, rows_of, tmp_path / "saved", format="csv")
    assert_says(message, "a folder of the format saved")


CUT = gzip.compress((LINES + '{"text": "cut').encode())
BROKEN = [
    ("rows.jsonl", LINES + '{"text": oops}\n', "the first broken line is 5, at column 10"),
    ("rows.jsonl.gz", CUT, "the first broken line is 5, at column 10"),
    ("rows.jsonl.gz", gzip.compress(LINES.encode() * 9)[:60], "end-of-stream"),
    ("rows.csv", "text\ncaf\xe9\n".encode("latin-1"), "the first line that is not UTF-8 is 2"),
    ("rows.parquet", b"PAR1 no footer", "can't be read as Parquet"),
]


@pytest.mark.bad_input(
    "damaged JSON lines, CSV, Parquet or compressed files; text that is not UTF-8"
)
@pytest.mark.parametrize(
    ("name", "content", "said"), BROKEN, ids=[f"{said} in {name}" for name, _, said in BROKEN]
)
def test_a_damaged_file_is_named_with_the_line(tmp_path, name, content, said):
    good = {
        "rows.jsonl": b'{"text": "good"}\n',
        "rows.jsonl.gz": gzip.compress(b'{"text": "good"}\n', mtime=0),
        "rows.csv": b"text\na\n",
    }
    if name in good:
        write(tmp_path, f"good_{name}", good[name])
    else:
        FORMATS["parquet"](tmp_path)
    write(tmp_path, f"z_{name}", content)
    message = message_of(65, rows_of, tmp_path)
    assert_says(message, f"data.path={tmp_path}: {tmp_path}/z_{name} c", said)


def table(folder, content, name="rows.csv", **settings):
    """The rows of a table, as lists of values."""
    write(folder, name, content)
    rows = all_rows(folder / name, **settings)
    return [list(rows.column_names), *([*row.values()] for row in rows)]


@pytest.mark.parametrize(
    "field", ["None", "NA", "null", "nan", "00042", "17", "1.50", "True", " a"]
)
def test_a_text_in_a_table_is_what_stands_there(tmp_path, field):
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
    "content",
    [
        "\ufefftext,n\na,1\n",
        "text,n\r\na,1\r\n",
        "text,n\n\na,1\n  \n",
        "text\tn\na\t1\n",
        gzip.compress(b"text,n\na,1\n", mtime=0),
    ],
)
def test_a_table_is_the_same_whatever_wrote_it(tmp_path, content):
    name = "rows.csv.gz" if isinstance(content, bytes) else "rows.csv"
    if "\t" in str(content) and isinstance(content, str):
        name = "rows.tsv"
    assert table(tmp_path, content, name) == [["text", "n"], ["a", 1]]


def test_a_table_with_a_column_without_a_name_keeps_all_columns(tmp_path):
    rows = [["Unnamed: 0", "text"], [0, "a"], [1, "b"]]
    assert table(tmp_path, ",text\n0,a\n1,b\n") == rows


def test_the_columns_and_types_of_tables_fit_all_files_in_any_order(tmp_path):
    write(tmp_path, "a.csv", "text,n\na,1\n")
    write(tmp_path, "b.csv", "n,text\n2.5,b\n")
    write(tmp_path, "c.csv", "text,n\n")
    assert list(all_rows(tmp_path)) == [{"text": "a", "n": 1.0}, {"text": "b", "n": 2.5}]


def numbers_of(folder, split, **settings):
    return [row["n"] for row in rows_of(folder, split, **settings)]


def test_held_out_rows_are_drawn_and_the_rest_keeps_the_order_of_the_file(tmp_path):
    write(tmp_path, "rows.csv", "text,n\n" + "".join(f"t,{n}\n" for n in range(40)))
    train = numbers_of(tmp_path, "train", validation_split=0.2)
    held_out = numbers_of(tmp_path, "validation", validation_split=0.2)
    assert sorted(train + held_out) == list(range(40))
    assert train == sorted(train)
    assert held_out != sorted(held_out)
    before = all_rows(tmp_path).train_test_split(test_size=0.2, seed=0)
    assert held_out == before["test"]["n"][:], "the rows that earlier versions held out"
    assert numbers_of(tmp_path, "train", validation_split="shuffled:.2") == before["train"]["n"][:]


@pytest.mark.parametrize(("share", "first"), [("last", 38), ("last:0.25", 30), ("last:.25", 30)])
def test_the_last_rows_can_be_held_out(tmp_path, share, first):
    write(tmp_path, "rows.csv", "text,n\n" + "".join(f"t,{n}\n" for n in range(40)))
    assert numbers_of(tmp_path, "train", validation_split=share) == [*range(first)]
    assert numbers_of(tmp_path, "validation", validation_split=share) == [*range(first, 40)]


@pytest.mark.bad_input("a share of the last rows that is no share")
@pytest.mark.parametrize("share", ["last:2", "last:0.0", "last:", "last:x"])
def test_a_share_of_the_last_rows_that_is_none_is_refused(tmp_path, share):
    write(tmp_path, "rows.jsonl", LINES)
    message = message_of(65, rows_of, tmp_path, validation_split=share)
    assert_says(message, f"data.validation_split={share} does not exist", "last:0.1")


UNFIT = "another number of fields"


@pytest.mark.bad_input(
    "a row of a table with more or fewer fields than the header, or in other ones"
)
@pytest.mark.bad_input("a table that is empty, of a header alone, or names a column twice")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,n\na,b,1\nb,2\n", f"rows.csv, line 2 has {UNFIT} (3) than the header (2)"),
        ("text,n\na,1,\nb,2,\n", f"rows.csv, line 2 has {UNFIT} (3)"),
        ('text,n\n"a\nb",1\n\nb\n', f"rows.csv, line 5 has {UNFIT} (1)"),
        ("text,n\na;1\n", f"line 2 has {UNFIT} (1) than the header (2), which is text,n; separate"),
        ("text;n\na;1,5\n", f"line 2 has {UNFIT} (2) than the header (1), which is text;n"),
        ("text;n\na;1\n", "data.text_column=text does not exist; the columns are text;n"),
        ('text,n\na,1\n"b,2\nc,3\n', "line 3 can't be read as CSV: unexpected end of data"),
        ("text,n,n\na,1,2\n", "line 1 names column n twice; rename one"),
        ("", "rows.csv is empty; its first line must name the columns"),
        ("text,n\n", "it has no rows"),
    ],
)
def test_a_table_whose_rows_do_not_fit_its_header_is_refused_by_line(tmp_path, content, said):
    assert_says(message_of(65, table, tmp_path, content), said)


def test_a_text_in_json_that_looks_like_a_date_is_what_stands_there(tmp_path):
    dates = ["2024-01-01", "2024-01-01T10:00:00Z", "2024-01-02 10:00:00"]
    write(
        tmp_path, "a.jsonl", "".join(f'{{"text": "{d}", "m": [{{"d": "{d}"}}]}}\n' for d in dates)
    )
    write(tmp_path, "b.jsonl", '{"text": "a", "m": []}\n')
    rows = list(all_rows(tmp_path))
    assert [row["text"] for row in rows] == [*dates, "a"]
    assert [row["m"] for row in rows[:3]] == [[{"d": date}] for date in dates]


@pytest.mark.bad_input("JSON whose values have another type than those of the first rows")
@pytest.mark.parametrize(("first", "later"), [("42", '"00042"'), ("42", "true"), ("true", "7")])
def test_json_values_are_not_made_to_fit_the_type_of_the_first_rows(tmp_path, first, later):
    write(tmp_path, "a.jsonl", f'{{"text": "a", "x": {first}}}\n')
    write(tmp_path, "b.jsonl", f'{{"text": "b", "x": {later}}}\n')
    message = message_of(65, rows_of, tmp_path)
    assert_says(message, f"{tmp_path}/b.jsonl could not be loaded: column x is ")


@pytest.mark.bad_input("files of a source with different columns")
def test_a_file_with_other_columns_than_the_first_is_named(tmp_path):
    write(tmp_path, "a.jsonl", LINES)
    write(tmp_path, "b.jsonl", '{"title": "no text"}\n')
    said = f"{tmp_path}/b.jsonl could not be loaded: "
    assert_says(message_of(65, rows_of, tmp_path), said, "column")


@pytest.mark.bad_input(
    "a folder of `save_to_disk` that is cut off, incomplete or written by something else"
)
def test_a_saved_folder_that_is_damaged_or_of_another_kind_is_refused(tmp_path):
    write_saved(tmp_path / "cut")
    arrow = tmp_path / "cut/data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:-100])
    shutil.copytree(tmp_path / "cut", tmp_path / "half")
    (tmp_path / "half/state.json").unlink()
    for folder, said in {"cut": "Expected to", "half": "neither a `Dataset` directory"}.items():
        message = message_of(65, rows_of, tmp_path / folder)
        loaded = f"data.path={tmp_path}/{folder} could not be loaded: "
        assert_says(message, loaded, said, "again with save_to_disk")


class Streams(torch.utils.data.IterableDataset):
    """torch's own has a __getitem__ too, which fails."""

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


@pytest.mark.bad_input("a `build_dataset` that returns a stream (an `IterableDataset`)")
def test_a_stream_is_refused_with_what_to_use_in_its_place():
    for stream in (Streams(), datasets.Dataset.from_list(ROWS).to_iterable_dataset()):
        task = SimpleNamespace(build_dataset=lambda split, stream=stream: stream)
        message = message_of(65, build_split, task, "train", World())
        assert_says(message, type(stream).__name__, "map-style", "data.path", "save_to_disk")


@pytest.mark.parametrize(("is_main", "terminal"), [(True, True), (True, False), (False, True)])
def test_progress_bars_are_shown_by_the_main_rank_on_a_terminal_alone(
    tmp_path, monkeypatch, capsys, is_main, terminal
):
    bars = sys.modules["datasets.utils.tqdm"]
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "")  # so that it is put back
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS")
    monkeypatch.setattr(bars, "HF_DATASETS_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(bars, "_hf_datasets_progress_bars_disabled", False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    write(tmp_path, "rows.jsonl", LINES)
    world = SimpleNamespace(is_main=is_main, local_rank=0, wait_long=lambda: None)
    build_split(SimpleNamespace(build_dataset=lambda split: rows_of(tmp_path)), "train", world)
    assert ("Generating train split" in capsys.readouterr().err) == (is_main and terminal)
