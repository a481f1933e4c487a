"""Rows to files of tokens: what is written, an interrupted run that goes on, several processes, and
bad inputs.
"""

import json
import os
import pickle
import re
import resource
import signal
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from dist_amp.commands import tokenize as command
from dist_amp.errors import DataError, Failure
from dist_amp.sources import conversations, tokens
from dist_amp.sources.token_shards import IGNORE_INDEX, MANIFEST, TokenShards, read_manifest
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import tokenize

BYTES = open_tokenizer("bytes")
FORK = get_context("fork")


def texts(count=40):
    """Rows of texts of many lengths, of which some are empty."""
    return [
        {"text": "" if number % 7 == 3 else "é" * (number % 5) + str(number)}
        for number in range(count)
    ]


def pairs(count=40):
    """Rows of prompts and completions."""
    return [
        {"prompt": "p" * (number % 4), "completion": str(number) * (1 + number % 3)}
        for number in range(count)
    ]


def write(folder, rows, workers=0, shard_tokens=40, split="train", tokenizer=BYTES, say=print):
    source = {split: datasets.Dataset.from_list(rows)}
    return tokenize(folder, source, tokenizer, "text", say, workers, shard_tokens)


def content(folder):
    """{path: bytes} of all files that a run leaves."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def encoded(row):
    """(ids, which of them count) of a row by the bytes tokenizer, as the tests say it."""
    prompt, text = (
        (row["prompt"], row["prompt"] + row["completion"]) if "prompt" in row else ("", row["text"])
    )
    ids = [*text.encode(), 0]
    return ids, [number >= max(len(prompt.encode()), 1) for number in range(len(ids))]


@pytest.mark.parametrize("make", [texts, pairs])
def test_documents_are_the_rows_with_something_to_learn_in_order(make, tmp_path):
    split = write(tmp_path, make()).splits["train"]
    documents = TokenShards(tmp_path, "train")
    expected = [(ids, counted) for ids, counted in map(encoded, make()) if any(counted)]
    assert len(documents) == split.totals["documents"] == len(expected) < 41
    assert split.totals["tokens"] == sum(len(ids) for ids, _ in expected)
    assert split.totals["counted"] == sum(sum(counted) for _, counted in expected)
    assert any("counted" in name for name in content(tmp_path)) == (make is pairs)
    assert len(documents.of.shards) > 3
    assert documents.lengths.tolist() == [len(ids) for ids, _ in expected]
    assert documents.firsts.tolist() == [counted.index(True) for _, counted in expected]
    for number in np.random.default_rng(0).permutation(len(documents)).tolist():
        ids, counted = expected[number]
        sample = documents[number]
        assert sample["input_ids"].tolist() == ids
        assert sample["labels"].tolist() == [
            one if here else IGNORE_INDEX for one, here in zip(ids, counted, strict=True)
        ]
        assert {value.dtype for value in sample.values()} == {torch.int64}


def test_a_shard_ends_before_the_document_that_would_exceed_it_and_a_long_one_has_its_own(tmp_path):
    rows = [{"text": "a" * size} for size in (10, 27, 5, 99, 3, 3)]  # and one token more each
    shards = write(tmp_path, rows).splits["train"].shards
    assert [(shard.end_row, shard.tokens) for shard in shards] == [
        (2, 39),
        (3, 6),
        (4, 100),
        (6, 8),
    ]


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, "uint8"), (257, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")]
)
def test_ids_take_as_many_bytes_as_the_vocabulary_needs(size, dtype, tmp_path):
    largest = replace(BYTES, vocabulary=size, encode=lambda text: [size - 1, 1], end=None)
    assert write(tmp_path, texts(), tokenizer=largest).dtype.name == dtype
    assert TokenShards(tmp_path, "train")[3]["input_ids"].tolist() == [size - 1, 1]


def test_several_workers_write_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK_ROWS", 3)
    write(tmp_path / "one", pairs())
    write(tmp_path / "many", pairs(), workers=3)
    assert content(tmp_path / "one") == content(tmp_path / "many")


def killed(folder, rows, shard_tokens, at):
    """Whether a process that writes the tokens was killed at its `at`-th fsync or rename, before or
    after it.
    """
    if (child := os.fork()) == 0:
        seen = 0

        def counted(function, *args):
            nonlocal seen
            for step in (lambda: None, lambda: function(*args)):
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1
                result = step()
            return result

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.fsync = partial(counted, os.fsync)
        rename = Path.replace
        Path.replace = lambda path, target: counted(rename, path, target)
        write(folder, rows, shard_tokens=shard_tokens)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_run_that_is_killed_anywhere_continues_to_the_same_files(tmp_path):
    """Before and after each flush to disk and each rename, once and then over and over."""
    rows = pairs(20)
    size = 60
    shards = write(tmp_path / "whole", rows, shard_tokens=size).splits["train"].shards
    assert len(shards) == 2
    whole, at = content(tmp_path / "whole"), 0
    while killed(tmp_path / f"once{at}", rows, size, at):
        write(tmp_path / f"once{at}", rows, shard_tokens=size)
        assert content(tmp_path / f"once{at}") == whole, at
        at += 3  # before a call, after another
    assert at > 30
    starts = 0
    while killed(tmp_path / "often", rows, size, 24):  # more than a shard takes
        starts += 1
    assert starts > 0
    assert content(tmp_path / "often") == whole


def test_after_an_interruption_only_what_is_missing_is_encoded(tmp_path, monkeypatch):
    seen, interrupted, encode_row = [], [], conversations.encode

    def failing(row, *args):
        number = rows.index(row)
        seen.append(number)
        if number == 30 and not interrupted:
            interrupted.append(number)
            raise KeyboardInterrupt
        return encode_row(row, *args)

    rows = [{"text": f"{n}{row['text']}"} for n, row in enumerate(texts())]
    monkeypatch.setattr(conversations, "encode", failing)
    monkeypatch.setattr(tokens, "CHUNK_ROWS", 2)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, rows)
    with pytest.raises(
        DataError, match=r"is not complete: dist_amp.tokenize was interrupted; start it again as"
    ):
        TokenShards(tmp_path, "train")
    begin = read_manifest(tmp_path).splits["train"].shards[-1].end_row
    assert 10 < begin < 30
    seen.clear()
    write(tmp_path, rows)
    assert seen == list(range(begin, 40))
    seen.clear()
    write(tmp_path, rows)
    assert seen == []


def test_one_process_writes_while_another_waits(tmp_path):
    """Both find the same tokens, which were made once."""
    said, made = FORK.Queue(), FORK.Queue()
    slow, goes_on = FORK.Event(), FORK.Event()

    def encode(text):
        made.put(text)
        slow.set()
        goes_on.wait(60)
        return BYTES.encode(text)

    tokenizer = replace(BYTES, encode=encode)
    first = FORK.Process(target=write, args=(tmp_path, texts(4)), kwargs={"tokenizer": tokenizer})
    first.start()
    assert slow.wait(60)
    second = FORK.Process(
        target=write, args=(tmp_path, texts(4)), kwargs={"tokenizer": tokenizer, "say": said.put}
    )
    second.start()
    assert (
        said.get(timeout=60)
        == f"data: waiting for another process, which makes the tokens in {tmp_path}"
    )
    goes_on.set()
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 0
    assert [made.get(timeout=60) for _ in range(4)] == [row["text"] for row in texts(4)]
    assert made.empty()


def test_a_worker_that_dies_is_reported(tmp_path):
    dying = replace(BYTES, encode=lambda text: os._exit(1))
    with pytest.raises(
        Failure, match="a worker has died, perhaps for lack of memory; use fewer workers"
    ):
        write(tmp_path, texts(), workers=2, tokenizer=dying)


def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SECONDS", 0)
    monkeypatch.setattr(tokens, "CHUNK_ROWS", 16)
    monkeypatch.setattr("datasets.utils.tqdm.disable", True, raising=False)
    datasets.disable_progress_bars()
    try:
        lines = []
        write(tmp_path, texts(), say=lines.append)
    finally:
        datasets.enable_progress_bars()
    shown = [re.sub(r"[\d,]+ rows/s, [\d:]+ left", "N rows/s, T left", line) for line in lines]
    assert shown == [
        f"data: train: tokenized {done} of 40 rows, N rows/s, T left" for done in (16, 32, 40)
    ]


def test_shards_travel_as_their_path_and_their_fingerprint_is_that_of_the_tokens(tmp_path):
    write(tmp_path, pairs())
    documents = TokenShards(tmp_path, "train")
    write(tmp_path / "again", pairs())
    write(tmp_path / "less", pairs(39))
    assert documents.fingerprint == TokenShards(tmp_path / "again", "train").fingerprint
    assert documents.fingerprint != TokenShards(tmp_path / "less", "train").fingerprint
    assert documents.fingerprint == pickle.loads(pickle.dumps(documents)).fingerprint
    assert len(pickle.dumps(documents)) < 1000
    assert (
        pickle.loads(pickle.dumps(documents))[5]["labels"].tolist()
        == documents[5]["labels"].tolist()
    )


# The command


def rows_file(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder, *words, tokenizer="bytes"):
    words = [
        *(f"--data.path {folder / 'rows.jsonl'} --data.tokenizer {tokenizer} --workers 0").split(),
        *words,
    ]
    return command.main([str(word) for word in words])


def test_the_command_writes_both_splits_and_prints_exact_counts(tmp_path, capsys):
    rows_file(tmp_path, texts(100))
    assert run(tmp_path, "--out", tmp_path / "tokens") == 0
    lines = capsys.readouterr().out.splitlines()
    left_out = documents = tokens = counted = 0
    for line, split in zip(lines[-2:], ("train", "validation"), strict=True):
        found = re.fullmatch(
            rf"{tmp_path}/tokens/{split}: (\d+) documents, (\d+) tokens, of which (\d+) count"
            r"(?:; (\d+) of \d+ rows have nothing to learn and are left out)?",
            line,
        )
        numbers = [int(number or 0) for number in found.groups()]
        documents, tokens = documents + numbers[0], tokens + numbers[1]
        counted, left_out = counted + numbers[2], left_out + numbers[3]
    expected = [encoded(row)[0] for row in texts(100) if row["text"]]
    assert (documents, left_out) == (len(expected), 100 - len(expected))
    assert tokens == sum(map(len, expected)) == counted + documents
    assert run(tmp_path, "--out", tmp_path / "tokens") == 0  # it is complete
    assert capsys.readouterr().out.splitlines()[-2:] == lines[-2:]


def refused(capsys, status, code=64):
    assert status == code
    return capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")


@pytest.mark.bad_input(
    "`tokenize` without `--out`, a tokenizer or rows, with a mixture, or with negative numbers; a "
    "worker that dies"
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--out is missing; name the folder to write, as in --out tokens"),
        (
            ["--out", "o", "--data.tokenizer", "auto"],
            "data.tokenizer=auto names none here; give a tokenizer's file or",
        ),
        (
            ["--out", "o", "--data.path", "off"],
            "neither data.path nor data.name is set; name the rows to tokenize",
        ),
        (
            ["--out", "o", "--workers", "-1"],
            "--workers -1 and --shard_tokens 134217728 must be at least 0 and 1",
        ),
        (
            ["--out", "o", "--data.sources.wiki.path", "x"],
            "data.sources has wiki; tokenize each source by itself",
        ),
        (["--check", "o"], "--check takes a folder alone, without --data.path"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, said, tmp_path, capsys):
    rows_file(tmp_path, texts())
    assert refused(capsys, run(tmp_path, *words)).startswith(said)


@pytest.mark.bad_input("`tokenize --out` with a folder of other tokens, or of other files")
def test_a_folder_of_other_tokens_is_never_written_over(tmp_path, capsys):
    """Of another tokenizer, source, column or size; or of other files."""
    out = tmp_path / "tokens"
    rows_file(tmp_path, texts())
    assert run(tmp_path, "--out", out) == 0
    before = content(out)
    assert (
        "holds tokens of text_column=text and shard_tokens=134217728, not of text_column=text and "
        "shard_tokens=9" in (refused(capsys, run(tmp_path, "--out", out, "--shard_tokens", 9)))
    )
    tokenizer = word_tokenizer(tmp_path / "words.json")
    said = refused(capsys, run(tmp_path, "--out", out, tokenizer=tokenizer))
    assert (
        f"holds tokens of the tokenizer bytes (bytes), not of the tokenizer {tokenizer} (" in said
    )
    rows_file(tmp_path, texts(41))
    said = refused(capsys, run(tmp_path, "--out", out))
    assert re.search(
        r"of the source train 38 rows \w+, validation 2 rows \w+, not of the source train 38 ", said
    )
    assert said.endswith("give another folder, or remove this one")
    assert content(out) == before
    said = refused(capsys, run(tmp_path, "--out", tmp_path))
    assert said.startswith(f"{tmp_path} holds other files, such as ")


def word_tokenizer(path, words=("a", "b", "</s>")):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_check_finds_a_flipped_bit_in_any_file(tmp_path, capsys):
    write(tmp_path, pairs())
    assert command.main(["--check", str(tmp_path)]) == 0
    assert f"{tmp_path}: all files are as they were written" in capsys.readouterr().out
    files = list((tmp_path / "train").iterdir())
    assert len(files) > 6
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        said = refused(capsys, command.main(["--check", str(tmp_path)]), 65)
        assert said.startswith(f"{path} is damaged: its hash differs from the manifest's")
        path.write_bytes(data)


@pytest.mark.bad_input("a disk that is full while tokens are written")
def test_a_disk_without_room_is_named_and_the_run_goes_on_once_there_is(tmp_path):
    rows = [{"text": "a" * 4000}] * 40
    write(tmp_path / "whole", rows, shard_tokens=40_000)
    if (child := os.fork()) == 0:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (30_000, 30_000)
        )  # bytes of a file: a shard has more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            write(tmp_path / "full", rows, shard_tokens=40_000)
        except Failure as error:
            said = (
                f"the tokens in {tmp_path / 'full'} can't be written (File too large); make room or"
            )
            os._exit(0 if str(error).startswith(said) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    write(tmp_path / "full", rows, shard_tokens=40_000)
    assert content(tmp_path / "full") == content(tmp_path / "whole")


@pytest.mark.bad_input("a text that is none, or a row that can't be encoded")
@pytest.mark.parametrize(
    ("rows", "workers", "said"),
    [
        (
            [{"text": "a"}, {"text": None}],
            2,
            "row 1: the column text holds NoneType, not text; name a column of text, or",
        ),
        ([{"text": 1}] * 3, 0, "row 0: the column text holds int, not text"),
        (
            [{"prompt": "a", "completion": None}] * 3,
            0,
            "row 0: the column completion holds NoneType, not text",
        ),
        (
            [{"text": ""}] * 9,
            2,
            "none of the 9 rows of the train split has anything to learn; check that their texts",
        ),
    ],
)
def test_rows_that_make_no_tokens(rows, workers, said, tmp_path):
    with pytest.raises(DataError) as caught:
        write(tmp_path, rows, workers)
    assert str(caught.value).startswith(said)


def test_a_row_that_can_not_be_encoded_is_named(tmp_path):
    def encode(text):
        if text == "39":
            raise RuntimeError("no such character")
        return BYTES.encode(text)

    with pytest.raises(
        DataError,
        match=r"row 39 can't be encoded: RuntimeError: no such character .*; correct or remove",
    ):
        write(
            tmp_path,
            [{"text": str(number)} for number in range(50)],
            tokenizer=replace(BYTES, encode=encode),
        )


@pytest.mark.bad_input("a file of tokens that is missing, truncated or damaged")
def test_a_missing_or_truncated_file_is_named_by_its_size(tmp_path):
    write(tmp_path, pairs())
    for path in sorted((tmp_path / "train").iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        said = f"{path} has {len(data) - 1:,} bytes, not {len(data):,}; copy it again"
        with pytest.raises(DataError, match=re.escape(said)):
            TokenShards(tmp_path, "train")
        path.unlink()
        with pytest.raises(
            DataError, match=re.escape(f"{path} can't be read (No such file or directory); copy it")
        ):
            TokenShards(tmp_path, "train")
        path.write_bytes(data)


def test_an_index_that_is_shorter_than_the_manifest_says_is_not_added_to(tmp_path):
    write(tmp_path, texts())
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["complete"] = False
    del manifest["splits"]["train"]["shards"][2:]
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "train/documents.bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"documents.bin has less than \d+ bytes; remove .* and start again"
    ):
        write(tmp_path, texts())


@pytest.mark.bad_input(
    "a token id that the vocabulary does not have, or an index that points elsewhere"
)
def test_an_id_out_of_range_names_the_document(tmp_path):
    write(tmp_path, texts(), tokenizer=replace(BYTES, vocabulary=300))
    path = tmp_path / "train/tokens_00001.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-2] + (300).to_bytes(2, "little"))
    documents = TokenShards(tmp_path, "train")
    last = sum(shard.documents for shard in documents.of.shards[:2]) - 1
    said = f"document {last} of {tmp_path}/train holds the id 300, and the tokenizer's"
    with pytest.raises(DataError, match=said):
        documents[last]
    assert len(documents[last - 1]["input_ids"]) > 1


def test_an_id_that_the_tokenizer_should_not_make_names_the_row(tmp_path):
    with pytest.raises(
        DataError,
        match="row 1: the tokenizer bytes makes the id 195, and its vocabulary says that ids are",
    ):
        write(tmp_path, texts(), tokenizer=replace(BYTES, vocabulary=50))


def test_an_index_that_points_elsewhere_names_the_document(tmp_path):
    write(tmp_path, texts())
    index = np.memmap(tmp_path / "train/documents.bin", "<i8", "r+").reshape(-1, 3)
    index[4, 1] = 10**6
    index.flush()
    with pytest.raises(
        DataError,
        match=r"document 4 of .*/train is not where documents.bin says; check the files with",
    ):
        TokenShards(tmp_path, "train")[4]


@pytest.mark.bad_input(
    "a manifest of tokens that is missing, damaged or of a newer format, or tokens that are not "
    "complete"
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "holds tokens of format 2, and this version reads up to 1; use a newer"),
        (
            {"splits": {"train": {"shards": 1}}},
            "tokens.json is damaged; make the tokens again, or copy them again",
        ),
        ("{", "tokens.json is damaged"),
        (None, "holds no tokens: tokens.json can't be read (No such file or directory); give"),
    ],
)
def test_a_manifest_that_can_not_be_used(change, said, tmp_path):
    write(tmp_path, texts())
    path = tmp_path / MANIFEST
    text = (
        change
        if isinstance(change, str)
        else json.dumps({**json.loads(path.read_text()), **(change or {})})
    )
    path.write_text(text) if change else path.unlink()
    with pytest.raises(DataError, match=re.escape(said)):
        TokenShards(tmp_path, "train")


def test_complete_tokens_are_used_where_nothing_can_be_written(tmp_path):
    """A folder that others have made and that is mounted read-only."""
    made = write(tmp_path, texts())
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()  # so that it can't be taken, even by root
    assert write(tmp_path, texts()) == made
    manifest = replace(made, complete=False)
    manifest.write(tmp_path)
    with pytest.raises(
        Failure,
        match=r"the tokens in .* can't be written \(Is a directory\); make room or name another",
    ):
        write(tmp_path, texts())
