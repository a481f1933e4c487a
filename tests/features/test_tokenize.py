"""Rows to files of tokens: what is written, interruptions, several processes, and bad inputs."""

import hashlib
import json
import os
import pickle
import re
import signal
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from messages import message_of

from dist_amp.commands import tokenize as command
from dist_amp.sources import tokens
from dist_amp.sources.token_shards import IGNORE_INDEX, MANIFEST, TokenShards, read_manifest
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import tokenize

pytestmark = pytest.mark.usefixtures("own_cache")
BYTES = open_tokenizer("bytes")
FORK = get_context("fork")


def texts(count=40):
    """Rows of texts of many lengths, of which some are empty and one is longer than a shard."""
    sizes = [99 if n == 5 else n % 5 for n in range(count)]
    return [{"text": "" if n % 7 == 3 else "é" * size + str(n)} for n, size in enumerate(sizes)]


def pairs(count=40):
    return [{"prompt": "p" * (n % 4), "completion": str(n) * (1 + n % 3)} for n in range(count)]


def write(folder, rows, workers=0, shard_tokens=40, tokenizer=BYTES):
    source = {"train": datasets.Dataset.from_list(rows)}
    return tokenize(folder, source, tokenizer, "text", workers, shard_tokens)


def opened(folder):
    return TokenShards(folder, "train")


def content(folder):
    """{path: bytes} of all files that a run leaves."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def encoded(row):
    """(ids, which of them count) of a row by the bytes tokenizer, as the tests say it."""
    prompt = row.get("prompt", "")
    ids = [*(prompt + row.get("completion", row.get("text", ""))).encode(), 0]
    return ids, [number >= max(len(prompt.encode()), 1) for number in range(len(ids))]


@pytest.mark.parametrize(("make", "files"), [(texts, "4b66d7a97e32"), (pairs, "5019d7e22f04")])
def test_documents_are_the_rows_with_something_to_learn_in_the_files_of_every_version(
    make, files, tmp_path
):
    write(tmp_path, make())
    found = sorted(each for each in content(tmp_path).items() if each[0] != MANIFEST)
    assert hashlib.sha256(repr(found).encode()).hexdigest()[:12] == files
    documents = opened(tmp_path)
    expected = [(ids, counted) for ids, counted in map(encoded, make()) if any(counted)]
    assert len(documents) == len(expected) < 41
    assert len(documents.facts.shards) > 3
    assert all(shard.tokens <= 40 or shard.documents == 1 for shard in documents.facts.shards)
    assert documents.facts.total("counted") == sum(sum(counted) for _, counted in expected)
    assert documents.lengths.tolist() == [len(ids) for ids, _ in expected]
    assert documents.firsts.tolist() == [counted.index(True) for _, counted in expected]
    for number in reversed(range(len(documents))):
        ids, counted = (torch.tensor(part) for part in expected[number])
        labels = torch.where(counted, ids, IGNORE_INDEX)
        torch.testing.assert_close(documents[number], {"input_ids": ids, "labels": labels})


def test_ids_take_as_many_bytes_as_the_vocabulary_needs(tmp_path):
    for size, dtype in ((256, "uint8"), (257, "uint16"), (2**16 + 1, "uint32")):
        ids = [size - 1, 1]
        largest = replace(BYTES, vocabulary=size, encode=lambda text, ids=ids: ids, end=None)
        assert write(tmp_path / dtype, texts(), tokenizer=largest).dtype.name == dtype
        assert opened(tmp_path / dtype)[3]["input_ids"].tolist() == ids


def test_any_number_of_workers_writes_the_same_files_and_shards_pickle_as_their_path(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tokens, "CHUNK_ROWS", 3)
    write(tmp_path / "one", pairs())
    write(tmp_path / "many", pairs(), workers=3)
    write(tmp_path / "less", pairs(39))
    assert content(tmp_path / "one") == content(tmp_path / "many")
    one = opened(tmp_path / "one")
    assert one.fingerprint != opened(tmp_path / "less").fingerprint
    pickled = pickle.dumps(one)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[5]["labels"], one[5]["labels"])


def killed(folder, rows, at):
    """Whether a process that writes the tokens was killed before or after an fsync or rename, the
    `at`-th of these moments.
    """
    if (child := os.fork()) == 0:
        moments = count()

        def counted(function, *args):
            for step in (lambda: None, lambda: function(*args)):
                if next(moments) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = step()
            return result

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.fsync = partial(counted, os.fsync)
        rename = Path.replace
        Path.replace = lambda path, target: counted(rename, path, target)
        write(folder, rows, shard_tokens=60)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_run_that_is_killed_anywhere_continues_to_the_same_files(tmp_path):
    rows = pairs(20)
    write(tmp_path / "whole", rows, shard_tokens=60)
    whole, at = content(tmp_path / "whole"), 0
    while killed(tmp_path / f"once{at}", rows, at):
        write(tmp_path / f"once{at}", rows, shard_tokens=60)
        assert content(tmp_path / f"once{at}") == whole, at
        at += 7  # odd: before one call, after the next
    assert at > 30
    starts = 0
    while killed(tmp_path / "often", rows, 24):  # more than a shard takes
        starts += 1
    assert starts > 0
    assert content(tmp_path / "often") == whole


def test_one_process_writes_while_another_waits(tmp_path, monkeypatch):
    """Both find the same tokens, which were made once."""
    begun, made, may_continue = FORK.Queue(), FORK.Value("i"), FORK.Event()

    def encode(text):
        made.value += 1
        may_continue.wait(60)
        return BYTES.encode(text)

    monkeypatch.setattr(tokens.log, "info", lambda *words: begun.put(words))
    arguments = (tmp_path, texts(4), 0, 40, replace(BYTES, encode=encode))
    processes = [FORK.Process(target=write, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
        assert begun.get(timeout=60)[0].startswith("data: tokenizing into %s, once no other")
    may_continue.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert made.value == 4


def run(folder, *words):
    source = ["--data.path", folder / "rows.jsonl", "--data.tokenizer", "bytes", "--workers", 0]
    return command.main([str(word) for word in [*source, *words]])


def test_an_interrupted_command_continues_with_the_rows_that_are_missing_and_prints_exact_counts(
    tmp_path, monkeypatch, capsys
):
    def write_two(folder, name, manifest, *args):
        if len(manifest.splits[name].shards) == 2:
            signal.raise_signal(signal.SIGTERM)
        return write_shard(folder, name, manifest, *args)

    words = ("--out", tmp_path / "tokens", "--shard_tokens", 40)
    lines = [json.dumps(row) + "\n" for row in texts(100)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    write_shard = tokens.write_shard
    with monkeypatch.context() as patched:
        patched.setattr(tokens, "write_shard", write_two)
        assert run(tmp_path, *words) != 0
    assert "stopped by SIGTERM; start the same command again" in capsys.readouterr().err
    message = message_of(65, opened, tmp_path / "tokens")
    assert "is not complete: dist_amp.tokenize was interrupted; start it again as" in message
    shards = read_manifest(tmp_path / "tokens").splits["train"].shards
    assert len(shards) == 2
    rows, encode = [], tokens.encode
    monkeypatch.setattr(tokens, "encode", lambda *args: rows.append(args) or encode(*args))
    for _ in range(2):  # once it is complete, it prints the same
        assert run(tmp_path, *words) == 0
        shown = rf"{tmp_path}/tokens/\w+: (\d+) documents, (\d+) tokens, of which (\d+) count"
        totals = np.array(re.findall(shown, capsys.readouterr().out)).astype(int)
        sizes = [len(encoded(row)[0]) for row in texts(100) if row["text"]]
        expected = [len(sizes), sum(sizes), sum(sizes) - len(sizes)]
        assert (len(totals), totals.sum(0).tolist()) == (2, expected), "both splits"
    assert len(rows) == 100 - shards[-1].end_row, "only what is missing, once"


@pytest.mark.bad_input("`tokenize` without `--out`, a tokenizer or rows, or with a mixture")
def test_a_wrong_command_line_is_one_line(tmp_path, capsys):
    for words, said in (
        ("", "give --out FOLDER to write tokens, or --check FOLDER alone to verify"),
        ("--check a", "give --out FOLDER to write tokens, or --check"),
        ("--out o --data.path off", "set data.tokenizer, and data.path or data.name, the rows to"),
        ("--out o --data.tokenizer auto", "set data.tokenizer, and data.path or data.name"),
        ("--out o --data.sources.wiki.path x", "set data.tokenizer, and data.path or data.name"),
    ):
        assert run(tmp_path, *words.split()) == 64
        assert f"error: {said}" in capsys.readouterr().err.splitlines()[-1]
    assert command.main(["--check", "a", "--out", "b"]) == 64


@pytest.mark.bad_input("`tokenize --out` with a file, or a worker that is killed")
def test_tokens_that_can_not_be_written_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 20)
    assert run(tmp_path, "--out", tmp_path / "rows.jsonl") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {tmp_path}/rows.jsonl can't be written: FileExistsError" in line
    monkeypatch.setattr(tokens, "encode", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    assert run(tmp_path, "--out", tmp_path / "tokens", "--workers", 2) == 1
    assert "fewer --workers" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.bad_input("`tokenize --out` with a folder of other tokens, or of other files")
@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"shard_tokens": 9}, "with shard_tokens 40, not 9; tokenize into another folder"),
        ({"tokenizer": replace(BYTES, identity="other")}, "with identity bytes, not other"),
        ({"rows": texts(41)}, "of other rows, or of rows in an older version's order; tokenize in"),
    ],
)
def test_a_folder_of_other_tokens_is_never_written_over(change, fragment, tmp_path):
    write(tmp_path / "tokens", texts())
    before = content(tmp_path)
    message = message_of(64, write, tmp_path / "tokens", **{"rows": texts(), **change})
    assert message.startswith(f"{tmp_path}/tokens holds tokens {fragment}")
    message = message_of(64, write, tmp_path, texts())
    assert message.startswith(f"{tmp_path} holds other files, such as ")
    assert content(tmp_path) == before


@pytest.mark.bad_input("tokens with a file or a manifest that is missing, damaged or newer")
def test_a_missing_truncated_damaged_or_newer_file_is_named(tmp_path, capsys):
    write(tmp_path, pairs())
    assert command.main(["--check", str(tmp_path)]) == 0
    assert f"{tmp_path}: all files match their hashes" in capsys.readouterr().out
    files = sorted((tmp_path / "train").iterdir())
    assert len(files) > 6
    for path in (files[0], files[-1]):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert command.main(["--check", str(tmp_path)]) == 65
        message = f"error: {path} is damaged: its hash differs from the manifest's"
        assert message in capsys.readouterr().err.splitlines()[-1]
        path.write_bytes(data[:-1])
        message = f"{path} has {len(data) - 1:,} bytes, not {len(data):,}; copy it again"
        assert message_of(65, opened, tmp_path).startswith(message)
        path.unlink()
        assert f"{path} has 0 bytes, not " in message_of(65, opened, tmp_path)
        path.write_bytes(data)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    for text, message in (
        (json.dumps({**manifest, "format": 2}), "format 2 is from a newer"),
        ("{", "tokens.json can't be read (1 validation error for Manifest "),
    ):
        (tmp_path / MANIFEST).write_text(text)
        assert message in message_of(65, opened, tmp_path)


def unknown(text):
    raise RuntimeError("no such character")


@pytest.mark.bad_input("texts that are empty, a row that can't be encoded")
def test_rows_that_make_no_tokens_are_refused(tmp_path):
    message = message_of(65, write, tmp_path / "a", [{"text": ""}] * 9)
    assert message.startswith("none of the 9 rows of the train split has a token that")
    tokenizer = replace(BYTES, encode=unknown)
    message = message_of(65, write, tmp_path / "b", texts(), workers=2, tokenizer=tokenizer)
    assert message.startswith("row 0 can't be encoded: RuntimeError: no such")


def test_complete_tokens_are_used_where_nothing_can_be_written(tmp_path):
    made = write(tmp_path, texts())
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()  # so that it can't be taken, even by root
    assert write(tmp_path, texts()) == made
