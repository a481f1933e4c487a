"""Forged files: what would crash a library, fill the memory or hang is refused with a message."""

import gzip
import json
import random
from contextlib import suppress

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dist_amp.checkpoint.format import read_manifest as read_checkpoint
from dist_amp.config.load import load_config
from dist_amp.errors import CheckpointRejected, ConfigError, DataError
from dist_amp.settings import DataConfig
from dist_amp.sources import converted, footers
from dist_amp.sources.converted import Nesting
from dist_amp.sources.load import load_split
from dist_amp.sources.parquet import open_parquet
from dist_amp.sources.token_shards import read_manifest as read_tokens
from dist_amp.supervise.lifecycle import saved_summary
from dist_amp.tasks import pretrained

LOCAL = fsspec.filesystem("file")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache" / "datasets"))


def rows_of(path, **settings):
    return load_split(DataConfig(path=str(path), validation_split="train", **settings), "train")


def depth_of(text, block):
    """The deepest level, by blocks of this many bytes."""
    nesting = Nesting()
    content = text.encode()
    parts = (content[start : start + block] for start in range(0, len(content), block))
    return max(nesting.add(part) for part in parts)


def nested(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return "".join(rng.choice('a"\\[]{}\n\u00e9,') for _ in range(rng.randrange(12)))
    inside = [nested(rng, depth - 1) for _ in range(rng.randrange(4))]
    return inside if rng.random() < 0.5 else {nested(rng, 0): value for value in inside}


def levels(value):
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


@pytest.mark.parametrize("seed", range(5))
def test_nesting_is_measured_whatever_the_strings_and_blocks_are(seed):
    rng = random.Random(seed)
    values = [[nested(rng, 5)] for _ in range(10)]
    text = "\n".join(json.dumps(value, ensure_ascii=rng.random() < 0.5) for value in values)
    deepest = max(map(levels, values))
    assert {depth_of(text, block) for block in (1, 2, 3, 7, 64, 10**6)} == {deepest}


@pytest.mark.bad_input("JSON rows that are nested a hundred thousand levels deep")
@pytest.mark.parametrize("ending", [".json", ".jsonl.gz"])
def test_deeply_nested_json_is_refused_and_does_not_crash(ending, tmp_path):
    deep = '{"x": ' * 100_000 + "1" + "}" * 100_000 + "\n"
    content = ('{"text": "one"}\n' + deep).encode()
    path = tmp_path / f"deep{ending}"
    path.write_bytes(gzip.compress(content) if "gz" in ending else content)
    with pytest.raises(DataError, match=rf"{path} has JSON that is nested more than 1000 levels"):
        rows_of(path)


DEEP = "[" * 100_000


@pytest.mark.bad_input("a config, manifest, summary or index of weights nested without end")
def test_no_nested_file_of_a_run_ends_in_a_traceback(tmp_path):
    for name in ("tokens.json", "manifest.json", "summary.json", pretrained.INDEX):
        (tmp_path / name).write_text('{"a": ' + DEEP)
    with pytest.raises(DataError, match=r"tokens.json can't be read \(RecursionError: "):
        read_tokens(tmp_path)
    with pytest.raises(CheckpointRejected, match="is damaged"):
        read_checkpoint(tmp_path)
    assert saved_summary(tmp_path) == {}
    with pytest.raises(DataError, match="is damaged .* fetch it again"):
        pretrained.weight_files(tmp_path)
    for deep in ("a = " + DEEP, "a" + ".b" * 5_000 + " = 1"):
        (tmp_path / "deep.toml").write_text(deep)
        with pytest.raises(ConfigError, match=r"deep.toml is not TOML: .*recursion"):
            load_config(["--config", str(tmp_path / "deep.toml")], {})


def small_memory(monkeypatch, size):
    monkeypatch.setattr(converted, "host_memory", lambda: size)
    monkeypatch.setattr(footers, "host_memory", lambda: size)


@pytest.mark.bad_input("a compressed file that expands to a thousand times its size (a gzip bomb)")
@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.xz", "bomb.csv.bz2"])
def test_a_compressed_file_that_expands_beyond_all_bounds_is_refused(name, tmp_path, monkeypatch):
    small_memory(monkeypatch, 2**24)
    with fsspec.open(str(tmp_path / name), "wb", compression="infer") as file:
        for _ in range(32):
            file.write(bytes(2**20))
    text = rf"{name} has .* and expands to more than .*MiB, 100 times as much and a quarte"
    with pytest.raises(DataError, match=text):
        rows_of(tmp_path)


def test_honest_files_that_compress_well_are_read(tmp_path, monkeypatch):
    """Logs of one line, at a ratio of several hundred, that fit into the memory; or below it."""
    line = b'{"text": "2026-01-01 GET /health 200"}\n'
    (tmp_path / "same.jsonl.gz").write_bytes(gzip.compress(line * 30_000))
    assert len(rows_of(tmp_path / "same.jsonl.gz")) == 30_000
    small_memory(monkeypatch, 2**18)  # far more than the memory, at an honest ratio
    lines = b"".join(b'{"text": "GET /item/%d 200"}\n' % (n * n % 9973) for n in range(30_000))
    (tmp_path / "logs.jsonl.gz").write_bytes(gzip.compress(lines))
    assert len(rows_of(tmp_path / "logs.jsonl.gz")) == 30_000


@pytest.mark.bad_input("a Parquet file whose row group would fill the memory (a Parquet bomb)")
def test_a_row_group_that_fills_the_memory_is_refused_by_its_footer(tmp_path, monkeypatch):
    """A million equal numbers take a kilobyte in the file."""
    path = str(tmp_path / "bomb.parquet")
    table = pa.table({"bomb": pa.repeat(pa.scalar(7), 10**6), "text": pa.repeat("x", 10**6)})
    pq.write_table(table, path)
    small_memory(monkeypatch, 2**24)
    text = "row group 0 of .*bomb.parquet takes 7.63 MiB in memory, as its footer says, above a qua"
    rows = open_parquet(LOCAL, [path], DataConfig(streams=1))
    with pytest.raises(DataError, match=text):
        rows.select_columns("bomb")[0]
    with pytest.raises(DataError, match=text):
        rows.select_columns("bomb").shuffled(1, 1)
    assert rows.select_columns("text")[0] == {"text": "x"}, "the other column is not read"
    with pytest.raises(DataError, match="row group 0 of .*bomb.parquet takes 11.4"):
        rows_of(path, view="map")


def with_footer(path, change):
    """Write the file again with another footer."""
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = change(content[-8 - length : -8])
    path.write_bytes(content[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


@pytest.mark.bad_input("a Parquet file whose footer is cut, random or announces a length beyond it")
def test_forged_footers_are_refused_by_name(tmp_path):
    path = tmp_path / "forged.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    whole = path.read_bytes()
    rng = random.Random(0)
    forged = [
        whole[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
        whole[:-8] + (0).to_bytes(4, "little") + b"PAR1",
        whole[:-4] + b"PARE",
        b"PAR1",
    ]
    for content in forged:
        path.write_bytes(content)
        with pytest.raises(DataError, match="forged.parquet can't be read as Parquet: "):
            open_parquet(LOCAL, [str(path)], DataConfig(streams=1))
    for _ in range(100):
        path.write_bytes(whole)
        with_footer(path, lambda footer: mutated(rng, footer))
        # Anything but a message of ours, a crash or a hang: a changed name or number may pass.
        with suppress(DataError):
            list(open_parquet(LOCAL, [str(path)], DataConfig(streams=1)))


def mutated(rng, footer):
    changed = bytearray(footer)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
