"""What users ran into: each of these once read the wrong rows, hung, or said something that did not
help.
"""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from forked import ROOT
from PIL import Image
from ranks import on_ranks
from test_bad_inputs import message_of
from tiny import Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.settings import DataConfig
from dist_amp.sources import converted, parquet
from dist_amp.sources.labelled_images import LabelledImages, class_names, labelled_rows
from dist_amp.sources.load import load_rows, load_split
from dist_amp.sources.packing import Packing
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import token_documents, tokenize
from dist_amp.world import World

BYTES = open_tokenizer("bytes")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache") / "datasets"
    )


def write_texts(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_parquet(path, columns, group=4):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return str(path)


def test_row_groups_are_read_once_by_a_run_that_tokenizes_them_as_they_are_read(
    tmp_path, monkeypatch
):
    path = write_parquet(
        tmp_path / "train.parquet", {"text": [f"row {n}" for n in range(128)], "other": range(128)}
    )
    write_parquet(tmp_path / "validation.parquet", {"text": ["held out"], "other": [0]})
    documents = token_documents(
        DataConfig(path=os.path.dirname(path), view="parquet", streams=8), "train", BYTES
    )
    _, order = documents.shuffled(8, 1)
    reads, real = [], parquet.Reader._read
    monkeypatch.setattr(
        parquet.Reader,
        "_read",
        lambda reader, file, group: reads.append(group) or real(reader, file, group),
    )
    positions = order(0, 0)(torch.arange(128)).tolist()
    for first in range(0, 128, 8):
        documents.__getitems__(positions[first : first + 8])
    assert sorted(reads) == list(range(32))


class Conjugated(Tiny):
    def collate(self, samples):
        batch = torch.utils.data.default_collate(samples)
        return {
            **batch,
            "conjugated": torch.complex(batch["x"], batch["x"]).conj(),
            "negative": batch["x"]._neg_view(),
        }


def test_a_worker_sends_conjugated_and_negated_views(tmp_path):
    run = make_run(World(), Conjugated(), "--data.workers", 1)
    (batch,) = next(run.data)
    run.data.close()
    assert torch.equal(batch["conjugated"].imag, -batch["x"])
    assert torch.equal(batch["negative"], -batch["x"])


def images_in_parquet(path, labels):
    image = Image.new("L", (8, 8))
    image.save(path.with_suffix(".png"))
    content = {"bytes": path.with_suffix(".png").read_bytes(), "path": None}
    write_parquet(path, {"image": [content] * len(labels), "label": labels})
    return DataConfig(path=str(path), view="parquet", streams=2)


def test_images_are_read_from_a_parquet_view_that_knows_nothing_of_pictures(tmp_path):
    data = images_in_parquet(tmp_path / "a.parquet", [0, 1, 2] * 8)
    rows = labelled_rows(data, "train", "image", "label")
    samples = LabelledImages(rows, ("image", "label"), (8, 8), 1, 3, class_names(rows, "label"))
    assert samples[0]["image"].shape == (1, 8, 8)
    assert sorted({int(samples[number]["label"]) for number in range(len(samples))}) == [0, 1, 2]


@pytest.mark.bad_input("text labels of images in a Parquet view")
def test_text_labels_of_a_parquet_view_are_refused_with_what_to_use(tmp_path):
    table = datasets.Dataset.from_dict({"image": [b""] * 16, "label": ["cat", "dog"] * 8})
    table.to_parquet(tmp_path / "a.parquet", batch_size=4)
    rows = labelled_rows(
        DataConfig(path=str(tmp_path / "a.parquet"), view="parquet"), "train", "image", "label"
    )
    assert "use data.view=map, or store whole numbers" in message_of(65, class_names, rows, "label")


def documents_apart(world, cases):
    """What a rank says of packed documents with these leaked shares per rank, or the error."""
    from dist_amp.tasks import hf_causal_lm

    parallel = SimpleNamespace(module=None)
    data = SimpleNamespace(last_step=[({"input_ids": torch.zeros(1, 8)}, (0,))])
    precision = SimpleNamespace(autocast=nullcontext)
    run = SimpleNamespace(
        world=world, data=data, parallel=parallel, precision=precision, evaluating=nullcontext
    )
    answers = []
    for shares in cases:
        share = shares[world.rank]
        with patch.object(hf_causal_lm, "leaked_share", lambda model, ids, share=share: share):
            try:
                answers.append(hf_causal_lm.documents_are_apart(run))
            except ConfigError as error:
                answers.append(str(error))
    return answers


def test_whether_documents_leak_is_one_answer_of_all_ranks():
    pytest.importorskip("transformers")
    nan = float("nan")
    cases = [(0.0, 0.0), (0.0, nan), (0.0, 0.5), (nan, 0.5)]
    answers, others = on_ranks(2, documents_apart, cases)
    assert answers == others
    assert answers[:2] == [True, False], "asked again at the next log step"
    assert all("0.5 as much as its own; use data.pack=off" in said for said in answers[2:])


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_logits_that_do_not_tell_whether_documents_leak_are_no_leak(value):
    pytest.importorskip("transformers")
    from dist_amp.tasks.hf_causal_lm import leaked_share

    class Same(torch.nn.Module):
        def forward(self, input_ids, position_ids, use_cache):
            return type("Output", (), {"logits": torch.full((*input_ids.shape, 7), value)})

    assert not math.isfinite(leaked_share(Same(), torch.arange(8)[None]))


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.txt", "testament.txt", "training_notes.txt"], {"train": 3}),
        (["training-0.csv", "testing-0.csv"], {"train": 1, "test": 1}),
        (["train_a.txt", "validation1.txt"], {"train": 1, "validation": 1}),
    ],
)
def test_only_a_whole_word_names_a_split(names, splits, tmp_path):
    from dist_amp.sources.files import find_files

    for name in names:
        (tmp_path / name).write_text("text\nsome\n")
    found = find_files(DataConfig(path=str(tmp_path)))
    assert {split: len(paths) for split, paths in found.splits.items()} == splits


@pytest.mark.bad_input("a folder in which one file names no split, and others do")
def test_a_file_that_names_no_split_beside_others_that_do_is_refused(tmp_path):
    for name in ("train", "test", "extra"):
        write_texts(tmp_path / f"{name}.jsonl", ["a", "b"])
    said = message_of(65, load_rows, DataConfig(path=str(tmp_path)), "train")
    assert "extra.jsonl names no split, though " in said


def test_values_that_change_in_place_change_a_parquet_views_fingerprint(tmp_path):
    data = DataConfig(path=str(tmp_path / "a.parquet"), view="parquet")
    prints = []
    for word in ("aaaa", "bbbb"):
        write_parquet(tmp_path / "a.parquet", {"text": [word] * 16})
        prints.append(
            (load_rows(data, "train").fingerprint, (tmp_path / "a.parquet").stat().st_size)
        )
    assert prints[0][1] == prints[1][1]
    assert prints[0][0] != prints[1][0]


@pytest.mark.bad_input("a symbolic link to data that leads nowhere")
def test_files_behind_symbolic_links_are_read_and_a_link_to_nothing_is_named(tmp_path):
    write_texts(tmp_path / "real/b.jsonl", ["b"] * 20)
    write_texts(tmp_path / "data/a.jsonl", ["a"] * 10)
    (tmp_path / "data/more").symlink_to(tmp_path / "real")
    (tmp_path / "real/back").symlink_to(tmp_path / "data")
    rows = load_rows(DataConfig(path=str(tmp_path / "data"), validation_split="train"), "train")
    assert sorted(rows["text"]) == ["a"] * 10 + ["b"] * 20
    (tmp_path / "data/gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    assert "gone.jsonl" in message_of(
        65, load_rows, DataConfig(path=str(tmp_path / "data")), "train"
    )


@pytest.mark.bad_input("`data.text_column`, `data.split` or `data.view` for a folder of tokens")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.text_column", "body"], "data.text_column=body has no effect: data.path="),
        (["--data.split", "test"], "data.split=test has no effect"),
        (["--data.view", "parquet"], "data.view=parquet has no effect"),
    ],
)
def test_settings_of_rows_are_refused_for_tokens(words, said, tmp_path):
    tokenize(
        tmp_path / "tokens",
        {"train": datasets.Dataset.from_dict({"text": ["one"]})},
        BYTES,
        "text",
        print,
    )
    data = load_config(["--data.path", str(tmp_path / "tokens"), *words], {}).data
    assert said in message_of(64, token_documents, data, "train", BYTES)


@pytest.mark.bad_input("`data.name` beside `data.path`")
def test_two_sources_at_once_are_refused(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["a", "b"])
    assert "are two sources; remove one" in message_of(
        64, load_split, DataConfig(path=path, name="user/name"), "train"
    )


def test_a_row_that_can_not_be_encoded_is_named_by_its_number_in_the_file(tmp_path):
    rows = ["text"] * 40
    rows[31] = None
    data = DataConfig(path=write_texts(tmp_path / "a.jsonl", rows), validation_split=0.01)
    assert message_of(65, token_documents, data, "train", BYTES).startswith(
        "row 31: the column text"
    )


@pytest.mark.bad_input("documents that do not fill one row")
def test_data_that_do_not_fill_one_row_are_refused_with_their_size(tmp_path):
    data = DataConfig(
        path=write_texts(tmp_path / "a.jsonl", ["abc", "abd", "e" * 40]), validation_split=0.1
    )
    pack = partial(Packing(100, "cut", "split").rows)
    documents = token_documents(data, "train", BYTES)
    said = message_of(65, pack, documents, "train")
    assert f"have {int(sum(documents.lengths))} tokens in all, fewer than one row of 100" in said
    assert pack(token_documents(data, "validation", BYTES), "validation") is None


@pytest.mark.bad_input("a full disk under the cache of `datasets`")
def test_a_full_disk_is_named_with_the_cache_and_not_with_a_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(converted, "convert", full)
    path = write_texts(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(
        Failure, match="the disk of the cache .* is full; make room, or set HF_DATASETS_CACHE"
    ) as caught:
        load_rows(DataConfig(path=path), "train")
    assert caught.value.exit_code == 1


@pytest.mark.bad_input("SIGTERM while `tokenize` works")
def test_tokenize_ends_by_sigterm_in_one_line_that_says_how_to_go_on(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", [f"text {n}" * 50 for n in range(60_000)])
    words = [
        *f"--data.path {path} --data.tokenizer bytes".split(),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "0",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "dist_amp.tokenize", *words, "--shard_tokens", "1000000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not list(tmp_path.glob("out/train/*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 1, said
    assert (
        said.strip().splitlines()[-1]
        == "error: stopped by SIGTERM; start the same command again to continue"
    )


@pytest.mark.bad_input("tokens without `tokens.json`, or `--out` that is a file")
def test_tokens_without_their_manifest_are_named_and_a_file_is_no_folder_for_them(tmp_path):
    rows = {"train": datasets.Dataset.from_dict({"text": ["one"]})}
    tokenize(tmp_path / "tokens", rows, BYTES, "text", print)
    (tmp_path / "tokens/tokens.json").unlink()
    data = DataConfig(path=str(tmp_path / "tokens"))
    assert "holds tokens without their tokens.json" in message_of(
        65, token_documents, data, "train", BYTES
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; give a folder"):
        tokenize(tmp_path / "file", rows, BYTES, "text", print)


@pytest.mark.bad_input("an image beside the folders of classes")
def test_a_stray_image_beside_class_folders_is_named(tmp_path):
    for name in ("cat/1.png", "dog/2.png", "stray.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / name)
    with pytest.raises(DataError, match=r"stray.png lies in no class's folder"):
        load_split(DataConfig(path=str(tmp_path)), "train", "image")
