"""Data on object storage: which bytes and requests it takes, what it survives, and causes by name.

The tests of faults run on a real S3 server (moto) and need the extra `engines`.
"""

import io
import re
from collections import Counter

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3_server
from fsspec.implementations.memory import MemoryFileSystem
from messages import message_of

from dist_amp.settings import DataConfig
from dist_amp.sources import files as sources_files
from dist_amp.sources.load import load_split
from dist_amp.sources.parquet import open_parquet

s3 = s3_server.s3  # the fixture
pytestmark = pytest.mark.usefixtures("own_cache")
FOOTER_BYTES = 2**16  # that are fetched at once, for a footer that is not longer
FILE = "/bucket/a.parquet"


def parquet_bytes(groups=4, rows=1000, seed=0):
    """A file with an `index`, and a column `image` that is much larger and never read."""
    numbers = np.random.default_rng(seed)
    sink = io.BytesIO()
    schema = pa.schema({"index": pa.int64(), "text": pa.string(), "image": pa.binary()})
    with pq.ParquetWriter(sink, schema, compression="none", use_dictionary=False) as writer:
        for group in range(groups):
            index = range(group * rows, (group + 1) * rows)
            text = [numbers.bytes(16).hex() for _ in index]
            image = [numbers.bytes(200) for _ in index]
            columns = {"index": list(index), "text": text, "image": image}
            writer.write_table(pa.table(columns, schema=schema))
    return sink.getvalue()


def text_bytes(content):
    """The bytes of the column `text` of the first row group."""
    return pq.read_metadata(io.BytesIO(content)).row_group(0).column(1).total_compressed_size


class Counted(MemoryFileSystem):
    """Memory that counts, as a store on the network bills it; `broken` changes what is read."""

    protocol = "counted"

    def cat_file(self, path, version_id=None, start=None, end=None):
        assert version_id is None, "S3's second argument"
        content = Counted.broken(super().cat_file(path, start=start, end=end))
        Counted.requests["GET"] += 1
        Counted.fetched[path] += len(content)
        return content


@pytest.fixture
def counted(monkeypatch):
    empty = {"store": {}, "pseudo_dirs": [""], "requests": Counter(), "fetched": Counter()}
    for name, value in {**empty, "broken": staticmethod(bytes)}.items():
        monkeypatch.setattr(Counted, name, value, raising=False)
    fsspec.register_implementation("counted", Counted, clobber=True)
    return fsspec.filesystem("counted")


def text_of(fs, *files):
    return open_parquet(fs, files, DataConfig(streams=1)).select_columns("text")


def test_random_row_groups_fetch_the_bytes_of_their_columns_alone(counted):
    """24 groups: their columns' bytes, what lies between ranges that Arrow joins, and a footer."""
    content = parquet_bytes(groups=48)
    counted.pipe(FILE, content)
    rows = text_of(counted, FILE)
    counted.fetched.clear()
    counted.requests.clear()
    for group in np.random.default_rng(0).permutation(48)[:24].tolist():
        assert re.fullmatch(r"[0-9a-f]{32}", rows[group * 1000]["text"])
    # Up to 8 KiB, Arrow's hole_size_limit, may be read beside a range.
    assert counted.fetched.total() <= FOOTER_BYTES + 24 * (text_bytes(content) + 2**13)
    assert counted.requests["GET"] == 1 + 24


def test_each_footer_takes_one_request_is_read_whole_and_a_changed_file_is_noticed(counted):
    files = [f"/bucket/{number}.parquet" for number in range(5)]
    for number, file in enumerate(files):
        counted.pipe(file, parquet_bytes(groups=2, rows=10, seed=number))
    first = text_of(counted, *files)
    assert counted.requests["GET"] == 5
    assert text_of(counted, *files).fingerprint == first.fingerprint
    counted.pipe(files[2], parquet_bytes(groups=3, rows=10))
    assert len(text_of(counted, *files)) == len(first) + 10, "a changed file is noticed"
    sink = io.BytesIO()
    pq.write_table(pa.table({f"column_{number}": [1] for number in range(2000)}), sink)
    counted.pipe(FILE, sink.getvalue())  # with a footer that is longer than FOOTER_BYTES
    rows = open_parquet(counted, [FILE], DataConfig(streams=1))
    assert rows.select_columns("column_1999")[0] == {"column_1999": 1}


@pytest.mark.bad_input("a store that does not answer for two minutes")
def test_an_answer_that_is_too_short_is_asked_for_again_but_not_for_ever(
    counted, monkeypatch, caplog
):
    content = parquet_bytes()
    counted.pipe(FILE, content)
    expected = list(text_of(counted, FILE))
    cut = iter([True, False] * 100)
    monkeypatch.setattr(Counted, "broken", lambda data: data[:-1] if next(cut) else data)
    monkeypatch.setattr(sources_files, "FIRST_PAUSE", 0.0)
    assert list(text_of(counted, FILE)) == expected
    size = text_bytes(content)
    assert f"received {size - 1} bytes instead of {size}; trying again for 120 s" in caplog.text
    rows = text_of(counted, FILE)
    monkeypatch.setattr(Counted, "broken", lambda data: data[:-1])
    monkeypatch.setattr(sources_files, "OUTAGE_SECONDS", 0.0)
    assert "counted:///bucket/a.parquet can't be read: " in message_of(65, rows.__getitem__, 0)


@pytest.mark.bad_input("a Parquet file that is replaced while a run reads it")
def test_a_file_that_changes_between_its_footer_and_its_rows_is_named(counted, tmp_path):
    local = fsspec.filesystem("file")
    for fs, file in ((counted, FILE), (local, str(tmp_path / "a.parquet"))):
        fs.pipe(file, parquet_bytes())
        rows = text_of(fs, file)
        fs.pipe(file, parquet_bytes(groups=5))
        assert "a.parquet has changed since the run" in message_of(65, rows.__getitem__, 0)
        fs.rm(file)
        assert "a.parquet can't be read: FileNotFoundError: " in message_of(65, rows.__getitem__, 0)


def rows_at(path, **settings):
    return load_split(DataConfig(path=path, validation_split="train", **settings), "train")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("fault", ["", "503", "reset", "truncate", "slow"])
def test_the_view_reads_s3_and_survives_its_faults(s3, fault):
    content = parquet_bytes()
    s3.fs.pipe("bucket/corpus/part-0.parquet", content)
    s3.fs.pipe("bucket/corpus/part-1.parquet", parquet_bytes(seed=1))
    s3.faults = [fault] * 3
    rows = rows_at("s3://bucket/corpus", view="parquet", streams=1).select_columns("text")
    s3.faults = [fault, "", fault, ""] * 8
    expected = pq.read_table(io.BytesIO(content), columns=["text"])["text"].to_pylist()
    assert [rows[n]["text"] for n in range(len(expected))] == expected


@pytest.mark.slow
@pytest.mark.bad_input("an S3 address without credentials, without permission or without a bucket")
@pytest.mark.parametrize("name", ["rows.parquet", "rows.txt"])
@pytest.mark.parametrize("cause", ["PermissionError", "NoCredentialsError", "no file"])
def test_a_read_that_fails_has_its_cause(s3, monkeypatch, cause, name):
    if cause == "PermissionError":
        s3.every = "403"
    if cause == "NoCredentialsError":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    message = message_of(65, rows_at, f"s3://nowhere/{name}")
    assert re.search(rf"s3://nowhere/{name} .*{cause}.*(credentials|bucket)", message)
