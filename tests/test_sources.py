"""Data by config alone: every format, local or at an address, its splits, images; and what can't be
read, by name.
"""

import bz2
import gzip
import json
import re
import shutil
import sys
import zipfile
from types import SimpleNamespace

import datasets
import fsspec
import numpy
import pytest
import torch
from conftest import ROOT
from PIL import Image
from test_bad_inputs import message_of
from test_config import assert_says
from tiny import make_run, parameters_of, take_steps

from dist_amp.config.load import load_config
from dist_amp.errors import DataError
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Request
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


def section(path, **settings):
    words = [
        word
        for key, value in {"path": path, **settings}.items()
        for word in (f"--data.{key}", str(value))
    ]
    return load_config(words, {}).data


def rows_of(path, split="train", **settings):
    return load_split(section(path, **settings), split)


def all_rows(path, **settings):
    return rows_of(path, validation_split="train", **settings)


def write_documents(folder):
    for n, text in enumerate(TEXTS):
        (folder / f"{n}.txt").write_text(text)


def write_parquet(folder):
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet")


def write_saved(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)


def write_saved_splits(folder):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(folder)


def file_of(name, content):
    def write(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    write.__name__ = name
    return write


FORMATS = [
    write_documents,
    write_parquet,
    write_saved,
    write_saved_splits,
    file_of("rows.jsonl", LINES),
    file_of("rows.json", json.dumps(ROWS)),
    file_of("rows.jsonl.gz", gzip.compress(LINES.encode())),
    file_of("rows.csv", CSV),
    file_of("rows.csv.bz2", bz2.compress(CSV.encode())),
    file_of("rows.tsv", CSV.replace(",", "\t")),
]


def copied_to_memory(folder):
    """The address of a copy in fsspec's memory, which stands for a store on the network."""
    address = f"memory:/{folder}"
    memory, root = fsspec.core.url_to_fs(address)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            memory.pipe(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return address


def write_images(folder, *names, size=(8, 6), mode="RGB"):
    """Pictures, each of one colour, that grows with their number."""
    for n, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, (n,) * len(mode)).save(folder / name)
    return folder


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_a_folder_of_any_format_has_the_same_rows_wherever_it_is(tmp_path, write, place):
    write(tmp_path)
    path = f"file://{tmp_path}" if place == "local" else copied_to_memory(tmp_path)
    # A table of text has no word for an empty one: the library reads it as missing.
    expected = [
        None if text == "" and ("csv" in write.__name__ or "tsv" in write.__name__) else text
        for text in TEXTS
    ]
    assert all_rows(path)["text"][:] == expected


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_glob_names_some_of_the_files_of_a_folder(tmp_path, place):
    for name in ("a1", "a2", "b1"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    path = tmp_path if place == "local" else copied_to_memory(tmp_path)
    assert all_rows(f"{path}/a*.jsonl")["text"][:] == ["a1", "a2"]


def test_a_zip_file_is_an_address_as_any_other(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("inside/rows.jsonl", LINES)
    assert all_rows(f"zip://inside/*.jsonl::{tmp_path}/all.zip")["text"][:] == TEXTS


def test_a_store_on_the_network_is_read_where_the_hub_is_off(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "rows.jsonl").write_text(LINES)
    assert len(all_rows(copied_to_memory(tmp_path))) == 4
    assert datasets.config.HF_HUB_OFFLINE


def test_a_name_with_a_patterns_letters_is_a_name(tmp_path):
    (tmp_path / "x[1]*.jsonl").write_text(LINES)
    assert len(all_rows(tmp_path / "x[1]*.jsonl")) == len(all_rows(tmp_path)) == 4


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "validation.jsonl"),
        ("train-0.jsonl", "train-1.jsonl", "val-0.jsonl"),
        ("en/train_a.jsonl", "de/train_b.jsonl", "en/dev_a.jsonl"),
        ("train/0.jsonl", "train/1.jsonl", "valid/0.jsonl"),
        ("data/train-0.jsonl", "data/test-0.jsonl"),
    ],
    ids=" ".join,
)
def test_names_of_files_or_folders_tell_the_splits(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert sorted(rows_of(tmp_path)["text"]) == sorted(name for name in names if "train" in name)
    assert list(rows_of(tmp_path, "validation")["text"]) == [
        name for name in names if "train" not in name
    ]


def test_where_some_names_of_texts_tell_no_split_all_files_are_trained_on_but_for_a_part_held_out(
    tmp_path,
):
    for name in ("train", "validation", "values", "more"):
        (tmp_path / f"{name}.py").write_text("a\nb\n")
    assert (len(rows_of(tmp_path)), len(rows_of(tmp_path, "validation"))) == (3, 1)


def test_hidden_files_and_a_clones_readme_are_no_data(tmp_path):
    (tmp_path / "rows.jsonl").write_text(LINES)
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/more.csv").write_text(CSV)
    assert all_rows(tmp_path)["text"][:] == TEXTS


def test_data_format_reads_unknown_endings_and_chooses_among_known_ones(tmp_path):
    (tmp_path / "rows.log").write_text(LINES)
    assert all_rows(tmp_path / "rows.log", format="json")["text"][:] == TEXTS
    (tmp_path / "other.csv").write_text("text\nfrom a table\n")
    (tmp_path / "rows.txt").write_text("a document")
    assert all_rows(tmp_path, format="csv")["text"][:] == ["from a table"]


def test_a_dataset_in_the_hubs_layout_has_configurations(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files: en.jsonl\n- config_name: de\n  "
        "data_files: de.jsonl\n---\n"
    )
    for name in ("en", "de"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert load_split(load_config(["--data.name", f"{tmp_path}:de"], {}).data, "train")["text"] == [
        "de"
    ]
    message = message_of(
        65, load_split, load_config(["--data.name", f"{tmp_path}:fr"], {}).data, "train"
    )
    assert_says(
        message, f"data.name={tmp_path}:fr could not be loaded", "'fr' not found", "['en', 'de']"
    )


def test_the_task_in_the_docs_learns_from_any_of_these(tmp_path):
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text().split("## Larger")[0], re.DOTALL
    )
    names: dict = {}
    exec(code, names)
    rows = [{"x": [n % 5, 1, 0, n % 3], "y": n % 7} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(World(), names["Table"](section(copied_to_memory(tmp_path))))
    before = parameters_of(run)["weight"].clone()
    take_steps(run, 1)
    assert not torch.equal(parameters_of(run)["weight"], before)
    assert run.data.plan.length == 38


# ---- images ----


@pytest.mark.parametrize("place", ["local", "memory"])
def test_an_image_folder_has_its_classes_as_labels(tmp_path, place):
    write_images(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png")
    rows = all_rows(
        tmp_path if place == "local" else copied_to_memory(tmp_path), text_column="image"
    )
    assert rows.features["label"].names == ["cat", "dog"]
    assert [(row["image"].getpixel((0, 0))[0], row["label"]) for row in rows] == [
        (0, 0),
        (1, 0),
        (2, 1),
    ]
    assert rows[0]["image"].size == (8, 6)
    assert rows.with_format("torch")[2]["image"].shape == (3, 6, 8)


def test_an_image_folders_splits_are_folders_and_no_classes(tmp_path):
    """A picture of the class `train` is none: its own name and the folder of its class tell no
    split.
    """
    write_images(tmp_path, "train/bus/train_1.png", "train/train/test_2.png", "test/bus/3.png")
    train, test = (
        rows_of(tmp_path, split, text_column="image") for split in ("train", "validation")
    )
    assert (len(train), len(test)) == (2, 1)
    assert train.features["label"].names == test.features["label"].names == ["bus", "train"]
    assert train["label"][:] == [0, 1]


def test_images_without_folders_have_no_label(tmp_path):
    write_images(tmp_path, "1.png", "2.JPG")
    assert all_rows(tmp_path, text_column="image").column_names == ["image"]


def test_the_images_of_a_folder_are_neither_copied_nor_read_before_they_are_needed(tmp_path):
    write_images(tmp_path, *(f"{name}/{n}.png" for name in "ab" for n in range(9)))
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"no picture")
    assert len(all_rows(tmp_path, text_column="image")) == 18
    assert not list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))


@pytest.mark.bad_input("an image that can't be decoded")
@pytest.mark.parametrize(("place", "damage"), [("local", "truncated"), ("memory", "no image")])
def test_an_image_that_can_not_be_decoded_is_named_with_its_file(tmp_path, place, damage):
    noise = numpy.random.default_rng(0).integers(0, 255, (8, 8, 3), numpy.uint8)
    write_images(tmp_path, "a/0.png")
    (tmp_path / "b").mkdir()
    Image.fromarray(noise).save(tmp_path / "b/1.png")
    whole = (tmp_path / "b/1.png").read_bytes()
    (tmp_path / "b/1.png").write_bytes(whole[:100] if damage == "truncated" else b"no picture")
    rows = all_rows(
        tmp_path if place == "local" else copied_to_memory(tmp_path), text_column="image"
    )
    fetch = Fetch(rows.with_format("torch"), SimpleNamespace(collate=list), "training")
    error = fetch[Request(0, (0, 1), 0)]
    assert isinstance(error, DataError)
    assert_says(
        str(error),
        "sample 1 of the training split",
        f"{tmp_path}/b/1.png can't be decoded",
        "image file",
    )


# ---- what can't be read ----


@pytest.mark.bad_input(
    "a `data.path` whose protocol is unknown, or whose package or compression is not installed"
)
@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "s3://bucket/rows.jsonl",
            "needs a package that is not installed (Install s3fs to access S3)",
        ),
        ("nowhere://rows.jsonl", "is no address that can be opened: Protocol not known: nowhere"),
    ],
)
def test_an_address_whose_protocol_is_not_there_is_refused(monkeypatch, path, said):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert_says(message_of(64, rows_of, path), f"data.path={path} {said}")


def test_a_compression_without_its_package_is_refused_with_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "ZSTANDARD_AVAILABLE", False)
    (tmp_path / "rows.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd") + bytes(20))
    assert message_of(65, rows_of, tmp_path).endswith("; install it with `pip install zstandard`")


@pytest.mark.bad_input(
    "a file, folder or glob that names nothing, a folder without known endings, or a store that "
    "does not answer"
)
@pytest.mark.parametrize(
    "path", ["nothing", "nothing/*.jsonl", "file:///nothing.csv", "memory://nothing", "."]
)
def test_a_path_that_names_nothing_is_refused(tmp_path, monkeypatch, path):
    """The last one is a folder of files with unknown endings alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LICENSE").touch()
    message = message_of(65, rows_of, path)
    assert_says(
        message,
        f"data.path={path} ",
        "names no file" if path != "." else "must name files of one format",
    )


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    def refuse(*args, **options):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", refuse)
    fsspec.filesystem("memory").pipe("/shut/rows.jsonl", b"{}")
    assert_says(
        message_of(65, rows_of, "memory://shut"),
        "data.path=memory://shut could not be listed: Forbidden",
    )


def test_settings_of_tokens_are_refused_where_rows_are_read(tmp_path):
    message = message_of(64, rows_of, tmp_path, pack="best_fit")
    assert message.startswith("data.pack=best_fit is for tasks that read tokens")


@pytest.mark.bad_input("a `data.format` that contradicts the files")
def test_a_format_that_contradicts_the_files_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text(CSV)
    message = message_of(64, rows_of, tmp_path, format="json")
    assert_says(message, "data.format=json contradicts", f"{tmp_path}/rows.csv", "leave it out")
    assert "data.format=saved contradicts" in message_of(64, rows_of, tmp_path, format="saved")
    write_saved(tmp_path / "saved")
    assert_says(
        message_of(64, rows_of, tmp_path / "saved", format="csv"), "a folder of the format saved"
    )


BROKEN = [
    ("rows.jsonl", LINES + '{"text": oops}\n', "the first broken line is 5, at column 10"),
    (
        "rows.jsonl.gz",
        gzip.compress((LINES + '{"text": "cut').encode()),
        "the first broken line is 5, at column 10",
    ),
    ("rows.jsonl.gz", gzip.compress(LINES.encode() * 9)[:60], "end-of-stream"),
    ("rows.csv", CSV + "five,4,5,6\n", "Expected 2 fields in line 6, saw 4"),
    ("rows.csv", "text\ncaf\xe9\n".encode("latin-1"), "the first line that is not UTF-8 is 2"),
    ("rows.parquet", b"PAR1 no footer", "Parquet magic bytes not found"),
]


@pytest.mark.bad_input(
    "damaged JSON lines, CSV, Parquet or compressed files; text that is not UTF-8"
)
@pytest.mark.parametrize(
    ("name", "content", "said"), BROKEN, ids=[f"{said} in {name}" for name, _, said in BROKEN]
)
def test_a_damaged_file_is_named_with_the_line(tmp_path, name, content, said):
    FORMATS[1](tmp_path) if name == "rows.parquet" else (tmp_path / f"good_{name}").write_bytes(
        gzip.compress(b'{"text": "good"}\n')
        if name.endswith(".gz")
        else b'{"text": "good"}\n'
        if "json" in name
        else b"text\na\n"
    )
    (tmp_path / f"z_{name}").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    message = message_of(65, rows_of, tmp_path)
    assert_says(message, f"data.path={tmp_path}: {tmp_path}/z_{name} could not be loaded: ", said)


@pytest.mark.bad_input("files of a source with different columns")
def test_a_file_with_other_columns_than_the_first_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.jsonl").write_text('{"title": "no text"}\n')
    assert_says(
        message_of(65, rows_of, tmp_path), f"{tmp_path}/b.jsonl could not be loaded: ", "column"
    )


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
        assert_says(
            message,
            f"data.path={tmp_path}/{folder} could not be loaded: ",
            said,
            "again with save_to_disk",
        )


@pytest.mark.bad_input("a folder of tokens for a task that reads rows")
def test_tokens_are_refused_where_rows_are_read(tmp_path):
    (tmp_path / "tokens.json").write_text("{}")
    assert_says(
        message_of(65, rows_of, tmp_path),
        f"data.path={tmp_path} holds tokens",
        "a task that takes tokens",
    )


class Streams(torch.utils.data.IterableDataset):
    """torch's own has a __getitem__ too, which fails."""

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


@pytest.mark.bad_input("a `build_dataset` that returns a stream (an `IterableDataset`)")
@pytest.mark.parametrize("of", ["torch", "datasets"])
def test_a_stream_is_refused_with_what_to_use_in_its_place(of):
    stream = Streams() if of == "torch" else datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    task = SimpleNamespace(build_dataset=lambda split: stream)
    message = message_of(65, build_split, task, "train", World())
    assert_says(
        message,
        type(stream).__name__,
        "data.view=parquet",
        "save_to_disk",
        "python -m dist_amp.tokenize",
    )


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
    (tmp_path / "rows.jsonl").write_text(LINES)
    world = SimpleNamespace(is_main=is_main, local_rank=0, wait_long=lambda: None)
    task = SimpleNamespace(build_dataset=lambda split: rows_of(tmp_path))
    build_split(task, "train", world)
    assert ("Generating train split" in capsys.readouterr().err) == (is_main and terminal)
