"""Parquet files read by row group: each group once per epoch, the same samples at every world size,
damage by name.
"""

import math
import os
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import Tiny, make_run, take_steps

from dist_amp.checkpoint.compatibility import check_data, dataset_hash
from dist_amp.checkpoint.format import read_manifest
from dist_amp.checkpoint.saver import save
from dist_amp.data import Padding, build_batches
from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import DataConfig
from dist_amp.sources import load, parquet
from dist_amp.sources.load import load_split
from dist_amp.sources.parquet import ParquetView, open_parquet
from dist_amp.world import World

LOCAL = fsspec.filesystem("file")
EVEN = [[20] * 8] * 4
UNEVEN = [[11, 60, 7], [1], [33, 0, 40, 5, 29], [], [50, 2, 18], [44] * 30]


def written(folder, files, columns=None, **options):
    """Parquet files of row groups of these sizes; column `index` counts the rows of all files.
    Returns their paths.
    """
    paths, row = [], 0
    folder.mkdir(exist_ok=True)
    for number, groups in enumerate(files):
        paths.append(str(folder / f"part-{number:03}.parquet"))
        schema = pa.schema({"index": pa.int64(), "text": pa.string(), **(columns or {})})
        with pq.ParquetWriter(paths[-1], schema, **options) as writer:
            for size in groups:
                index = list(range(row, row + size))
                values = {"index": index, "text": [f"row {i}" for i in index]}
                writer.write_table(
                    pa.table({name: values[name] for name in schema.names}, schema=schema)
                )
                row += size
    return paths


def view(paths, streams=8):
    return open_parquet(LOCAL, paths, DataConfig(streams=streams))


class Index:
    """A batch is its rows' `index`."""

    def collate(self, rows):
        return [row["index"] for row in rows]


def on_each_rank(dataset, ranks, global_batch=24, micro_batch=2, workers=0, position=0, **settings):
    """The training batches of each rank, as build_batches makes them."""
    made = []
    for rank in range(ranks):
        config = DataConfig(workers=workers, **settings)
        world = World(rank=rank, world_size=ranks)
        accumulation = global_batch // (micro_batch * ranks)
        made.append(
            build_batches(
                config,
                Index(),
                pickle.loads(pickle.dumps(dataset)),
                world,
                micro_batch_size=micro_batch,
                accumulation_steps=accumulation,
                seed=5,
            )
        )
        made[-1].position = position
    return made


def take(batches, steps):
    """The sorted rows of each step, over all ranks; the last step's loaders stay open."""
    taken = []
    for _ in range(steps):
        parts = [batch for one in batches for batch in next(one) if not isinstance(batch, Padding)]
        taken.append(sorted(index for part in parts for index in part))
    return taken


def close(batches):
    for one in batches:
        one.close()


# ---- the same samples ----

STEPS_PER_EPOCH = 66  # the last with 16 of 24 rows
THROUGH = [(1, 1, 0, 2), (2, 2, 0, 0), (4, 4, 0, 1)]
RESUMED = [
    (1, 2, 1, 1),
    (2, 4, 3, 2),
    (4, 1, STEPS_PER_EPOCH - 2, 0),
    (2, 1, STEPS_PER_EPOCH, 0),
    (4, 2, STEPS_PER_EPOCH, 1),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(a view, the rows of each step of one process)."""
    dataset = view(written(tmp_path_factory.mktemp("parquet"), UNEVEN))
    assert STEPS_PER_EPOCH == math.ceil(len(dataset) / 24) == len(dataset) // 24 + 1
    return dataset, take(on_each_rank(dataset, 1), STEPS_PER_EPOCH + 8)


@pytest.mark.parametrize(("before", "after", "steps", "workers"), THROUGH + RESUMED)
def test_a_run_takes_the_same_rows_at_any_world_size_from_any_step_with_any_workers(
    before, after, steps, workers, uninterrupted
):
    dataset, expected = uninterrupted
    batches = on_each_rank(dataset, before, workers=workers)
    assert take(batches, steps) == expected[:steps]
    close(batches)
    resumed = on_each_rank(dataset, after, workers=workers, position=batches[0].position)
    assert take(resumed, 8) == expected[steps : steps + 8], (
        "what came after the stop, and into the next epoch"
    )
    close(resumed)


@pytest.mark.parametrize(
    ("files", "streams", "drop_last"),
    [(EVEN, 4, False), (UNEVEN, 8, True), (UNEVEN, 36, False), ([[3_000, 1, 3_000]], 2, False)],
)
def test_every_row_is_read_once_per_epoch(files, streams, drop_last, tmp_path):
    dataset = view(written(tmp_path, files), streams)
    steps = len(dataset) // 96 if drop_last else math.ceil(len(dataset) / 96)
    for ranks in (1, 2):
        batches = on_each_rank(dataset, ranks, global_batch=96, micro_batch=16, drop_last=drop_last)
        for _ in range(2):
            counts = Counter(row for step in take(batches, steps) for row in step)
            assert set(counts.values()) == {1}
            assert len(counts) == (steps * 96 if drop_last else len(dataset))


# ---- what is read ----


@pytest.fixture
def reads(monkeypatch):
    """The numbers of the row groups that were read."""
    numbers, read = [], pq.ParquetFile.read_row_group

    def noted(self, group, **options):
        numbers.append(group)
        return read(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    return numbers


@pytest.mark.parametrize(("ranks", "window"), [(1, 3), (2, 1), (4, 3)])
def test_each_row_group_is_read_once_per_epoch_over_all_ranks(
    ranks, window, tmp_path, reads, monkeypatch
):
    monkeypatch.setattr(parquet, "SHUFFLE_GROUPS", window)
    even = view(written(tmp_path / "even", EVEN), streams=8)
    take(on_each_rank(even, ranks, global_batch=16), len(even) // 16)
    assert len(reads) == 32

    reads.clear()
    uneven = view(written(tmp_path / "uneven", UNEVEN), streams=8)
    take(on_each_rank(uneven, ranks, global_batch=16, drop_last=True), len(uneven) // 16)
    assert len(reads) <= 41 + ranks - 1, (
        "of 41 groups with rows, one between each two ranks may be read by both"
    )


def test_workers_that_have_streams_of_their_own_read_each_group_once(tmp_path, monkeypatch):
    log, read = tmp_path / "reads", pq.ParquetFile.read_row_group

    def noted(self, group, **options):
        with open(log, "a") as file:
            file.write("x")
        return read(self, group, **options)

    dataset = view(written(tmp_path, EVEN), streams=8)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    batches = on_each_rank(dataset, 1, global_batch=16, micro_batch=4, workers=2)
    take(batches, len(dataset) // 16)
    close(batches)
    # Up to 4 micro-batches of the next epoch are read ahead, each of 4 rows.
    assert 32 <= len(log.read_text()) <= 32 + 16


def test_only_the_columns_that_are_asked_for_are_read(tmp_path):
    dataset = view(written(tmp_path, EVEN)).select_columns(["text"])
    assert dataset.column_names == ["text"]
    assert dataset[21] == {"text": "row 21"}
    assert list(dataset._reader.groups.popitem()[1][0]) == ["text"]
    with pytest.raises(DataError, match="column label does not exist; the columns are index, text"):
        view(written(tmp_path, EVEN)).select_columns(["label"])


def test_few_row_groups_and_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "SHUFFLE_GROUPS", 1)
    dataset = view(written(tmp_path, [[3, 3]] * 50), streams=4)
    dataset.shuffled(8, 2)
    for index in range(0, len(dataset), 3):
        dataset[index]
    assert len(dataset._reader.groups) == 2 * 2 * 1, "twice the streams of a rank x shuffle_groups"
    assert dataset._reader.open.cache_info().currsize == 32


def test_a_row_group_is_dropped_after_its_last_row(tmp_path):
    dataset = view(written(tmp_path, [[3, 3]]), streams=1)
    dataset.__getitems__([0, 1, 3])
    assert len(dataset._reader.groups) == 2
    dataset[2]
    assert [group for _, group in dataset._reader.groups] == [1]


def test_a_validation_part_is_whole_row_groups_and_the_same_each_time(tmp_path):
    dataset = view(written(tmp_path, UNEVEN))
    parts = [dataset.train_test_split(test_size=0.1, seed=0) for _ in range(2)]
    train, held_out = ([row["index"] for row in parts[0][name]] for name in ("train", "test"))
    assert sorted(train + held_out) == list(range(len(dataset)))
    assert train == sorted(train)
    assert [row["index"] for row in parts[1]["test"]] == held_out
    assert len(parts[0]["test"]._groups) == 5, "of 41"
    assert parts[0]["train"].fingerprint == parts[1]["train"].fingerprint
    assert (
        parts[0]["train"].fingerprint
        != dataset.train_test_split(test_size=0.1, seed=1)["train"].fingerprint
    )


def split_of(path, split="train", **settings):
    return load_split(DataConfig(path=str(path), **settings), split)


def test_large_parquet_files_are_read_by_row_group(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    written(tmp_path / "data", UNEVEN)
    size = sum(file.stat().st_size for file in (tmp_path / "data").iterdir())
    monkeypatch.setattr(load, "MAP_UP_TO_BYTES", size)
    assert not isinstance(split_of(tmp_path / "data"), ParquetView)
    assert isinstance(split_of(tmp_path / "data", view="parquet"), ParquetView)
    monkeypatch.setattr(load, "MAP_UP_TO_BYTES", size - 1)
    assert isinstance(split_of(tmp_path / "data"), ParquetView)
    assert not isinstance(split_of(tmp_path / "data", view="map"), ParquetView)


def test_splits_are_files_by_their_names_or_row_groups(tmp_path):
    [first, second] = written(tmp_path, [[20] * 10, [7]])
    parts = [
        split_of(first, split, view="parquet", validation_split=0.2)
        for split in ("train", "validation")
    ]
    assert [len(part) for part in parts] == [160, 40]
    os.rename(first, tmp_path / "train-0.parquet")
    os.rename(second, tmp_path / "validation-0.parquet")
    assert [
        len(split_of(tmp_path, split, view="parquet")) for split in ("train", "validation")
    ] == [200, 7]


# ---- rows of any kind ----


def test_rows_are_as_the_datasets_library_gives_them(tmp_path):
    import datasets

    path = str(tmp_path / "any.parquet")
    table = pa.table(
        {
            "nested": [{"a": [1, 2], "b": {"c": "x"}}, None, {"a": [], "b": {"c": None}}],
            "messages": [[{"role": "user", "content": "hi"}], [], None],
            "nulls": pa.array([None, 1.5, None]),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "bytes": [b"\x00\xff", b"", None],
            "when": pa.array([0, 1, None], pa.timestamp("us")),
        }
    )
    pq.write_table(table, path, row_group_size=2)
    rows = view([path], streams=1)
    expected = datasets.load_dataset(
        "parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert list(rows) == list(expected)
    assert rows.__getitems__([2, 0, 2]) == expected.__getitems__([2, 0, 2])
    assert rows.column_names == expected.column_names


def test_pictures_are_decoded(tmp_path):
    import datasets
    import numpy as np

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    path = str(tmp_path / "images.parquet")
    datasets.Dataset.from_dict(
        {"image": [pixels] * 3, "label": [0, 1, 0]}, features=features
    ).to_parquet(path)
    rows = view([path], streams=1)
    assert rows.features == features
    assert (np.asarray(rows[1]["image"]) == pixels).all()
    assert rows.select_columns(["label"])[1] == {"label": 1}


def test_ten_rows_are_enough_for_a_run(tmp_path):
    dataset = view(written(tmp_path, [[10]]), streams=1)
    assert take(on_each_rank(dataset, 1, global_batch=4), 3)[:2] != [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(dataset) == 10
    with pytest.raises(IndexError, match="row 10 of 10"):
        dataset[10]


def test_any_fsspec_file_system_is_read(tmp_path):
    memory = fsspec.filesystem("memory")
    for path in written(tmp_path, UNEVEN):
        memory.pipe(f"/bucket/{os.path.basename(path)}", Path(path).read_bytes())
    remote = open_parquet(memory, memory.glob("/bucket/*.parquet"), DataConfig(streams=8))
    local = view(written(tmp_path, UNEVEN))
    assert list(remote) == list(local)
    assert remote.fingerprint == local.fingerprint, "data may move"


# ---- bad input ----


@pytest.mark.bad_input("a Parquet file that is empty, cut off or something else")
def test_a_file_that_is_no_parquet_is_named(tmp_path):
    paths = written(tmp_path, EVEN)
    whole = Path(paths[1]).read_bytes()
    for damaged in (whole[:-7], b"", b"no parquet at all"):
        Path(paths[1]).write_bytes(damaged)
        with pytest.raises(
            DataError, match=r"part-001.parquet can't be read as Parquet: .*; download or write it"
        ):
            view(paths)


@pytest.mark.bad_input("a Parquet file with a damaged page")
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_damaged_row_group_is_named(compression, tmp_path):
    paths = written(
        tmp_path, EVEN, compression=compression, write_page_checksum=True, use_dictionary=False
    )
    start = pq.ParquetFile(paths[2]).metadata.row_group(3).column(1).data_page_offset
    content = bytearray(Path(paths[2]).read_bytes())
    content[start + 60] ^= 1
    Path(paths[2]).write_bytes(content)
    dataset = view(paths)
    dataset[2 * 160 + 59]
    with pytest.raises(
        DataError,
        match=r"row group 3 of .*part-002.parquet can't be read: .*; download or write it",
    ):
        dataset[2 * 160 + 60]
    batches = on_each_rank(dataset, 1, shuffle=False, position=2 * 160 + 48)
    with pytest.raises(
        DataError,
        match=r"0: sample 380 of the training split could not be read: row group 3 of .*part-002",
    ):
        next(batches[0])


@pytest.mark.bad_input("Parquet files whose columns or types differ")
def test_files_with_other_columns_are_refused_with_file_and_column(tmp_path):
    first = written(tmp_path / "a", [[5]])
    more = written(tmp_path / "b", [[5]], columns={"text": pa.large_string()})
    with pytest.raises(
        DataError,
        match=r"column text is large_string in .*b/part-000.parquet and string in .*a/part",
    ):
        view(first + more)
    path = str(tmp_path / "c.parquet")
    pq.write_table(pa.table({"index": [1]}), path)
    with pytest.raises(
        DataError, match=r"column text is missing in .*c.parquet and string in .*part-000"
    ):
        view([*first, path])


@pytest.mark.bad_input("Parquet files without any row")
def test_files_without_rows_are_refused_only_if_all_are(tmp_path):
    assert len(view(written(tmp_path / "some", [[0], [5], []]))) == 5
    with pytest.raises(
        DataError, match=r"part-000.parquet and the other files have no rows; give files with data"
    ):
        view(written(tmp_path / "none", [[0], []]))


@pytest.mark.bad_input("`data.streams` that the world size does not divide")
@pytest.mark.bad_input("fewer row groups than `data.streams` or ranks")
@pytest.mark.parametrize(
    ("streams", "ranks", "said"),
    [
        (
            64,
            2,
            "data.streams=64 on 2 ranks needs as many row groups, and there are 41; use "
            "data.streams=32, data.view=m",
        ),
        (
            64,
            3,
            "and there are 41; use data.streams=24, data.view=map, or files with smaller row "
            "groups",
        ),
        (
            8,
            42,
            "data.streams=8 on 42 ranks needs as many row groups, and there are 41; use "
            "data.view=map, or files",
        ),
        (8, 3, "data.streams=8 is not a multiple of the world size 3; use data.streams=6"),
        (4, 8, "data.streams=4 is not a multiple of the world size 8; use data.streams=8"),
    ],
)
def test_streams_that_do_not_fit_are_refused_with_a_number_that_does(
    streams, ranks, said, tmp_path
):
    dataset = view(written(tmp_path, UNEVEN), streams)
    with pytest.raises(ConfigError) as error:
        dataset.shuffled(ranks, ranks)
    assert said in str(error.value)
    if "=" in (fix := str(error.value).split("use data.streams")[-1])[:1]:
        fitting = int(fix[1:].split(",")[0])
        view(written(tmp_path, UNEVEN), fitting).shuffled(ranks, ranks)


class Numbers(Tiny):
    """Learns from the rows' numbers."""

    def __init__(self, path, streams=8):
        super().__init__()
        self.dataset = view(path, streams)

    def build_dataset(self, split):
        return self.dataset

    def collate(self, rows):
        index = torch.tensor([row["index"] for row in rows])
        return {
            "x": index[:, None].expand(-1, 8).float() / 1000,
            "y": index.sin(),
            "counts": torch.ones(len(rows)),
        }


@pytest.mark.bad_input("another `data.streams` or `data.view` than the checkpoint's")
def test_a_run_resumes_in_its_order_and_refuses_other_streams(tmp_path):
    paths = written(tmp_path / "data", EVEN)

    def run(streams):
        words = ["--run.dir", tmp_path / "run", "--run.resume", "auto"]
        return make_run(World(), Numbers(paths, streams), *words)

    through = run(8)
    take_steps(through, 3)
    folder = save(through)
    assert read_manifest(folder).order == "parquet streams=8 shuffle_groups=2"
    expected = [next(through.data)[0]["x"] for _ in range(5)]
    resumed = run(8)
    assert all(torch.equal(next(resumed.data)[0]["x"], step) for step in expected)
    with pytest.raises(
        DataError,
        match=r"in the order 'parquet streams=8 .*in 'parquet streams=4 .*use the old data.v",
    ):
        run(4)


@pytest.mark.bad_input("`data.view=parquet` with files of another format")
def test_a_view_of_other_formats_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        ConfigError,
        match=r"data.view=parquet, and data.path=.* has the format text; write Parquet files",
    ):
        split_of(tmp_path, view="parquet")


@pytest.mark.bad_input("a part to be held out of a single row group")
def test_nothing_can_be_held_out_of_one_row_group(tmp_path):
    with pytest.raises(
        DataError,
        match=r"validation_split=0.05 of 1 row group leaves none to train on; name a split",
    ):
        view(written(tmp_path, [[10]])).train_test_split(test_size=0.05)


@pytest.mark.bad_input(
    "Parquet files that changed since the checkpoint: rows, row groups, sizes, names or columns"
)
@pytest.mark.parametrize("change", ["rows", "groups", "values", "name"])
def test_a_source_that_changed_since_the_checkpoint_is_refused(change, tmp_path):
    def fingerprint(dataset):
        return dataset_hash(on_each_rank(dataset, 1)[0])

    before = view(written(tmp_path / "before", EVEN))
    assert fingerprint(before) == fingerprint(view(written(tmp_path / "moved", EVEN)))
    paths = written(
        tmp_path / "after",
        [*EVEN[:-1], {"rows": [20] * 9, "groups": [40] * 4}.get(change, EVEN[-1])],
    )
    if change == "values":
        table = pq.read_table(paths[-1])
        longer = pa.array([f"{text}!" for text in table["text"].to_pylist()])
        pq.write_table(table.set_column(1, "text", longer), paths[-1], row_group_size=20)
    if change == "name":
        os.rename(paths[-1], tmp_path / "after" / "renamed.parquet")
        paths[-1] = str(tmp_path / "after" / "renamed.parquet")
    after = view(paths)
    saved = SimpleNamespace(data_length=len(before), data_fingerprint=fingerprint(before))
    with pytest.raises(
        DataError, match=f"was made with 640 samples of fingerprint {before.fingerprint}"
    ):
        check_data(tmp_path, saved, len(after), fingerprint(after), False, World())
