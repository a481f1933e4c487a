"""Parquet files read by row group: each group once per epoch, the same samples at every world size
in an order that is computed and not stored; damage by name.
"""

import pickle
from datetime import datetime
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from messages import message_of

from dist_amp.checkpoint.compatibility import dataset_hash
from dist_amp.data import Padding, build_batches
from dist_amp.settings import Config, DataConfig, RunConfig, TrainConfig
from dist_amp.sources import load, parquet
from dist_amp.sources.load import held_out_part, load_split
from dist_amp.sources.parquet import ParquetView, open_parquet
from dist_amp.world import World

LOCAL = fsspec.filesystem("file")
EVEN = [[20] * 8] * 4
UNEVEN = [[11, 60, 7], [1], [33, 0, 40, 5, 29], [], [50, 2, 18], [44] * 30]


def written(folder, files, **options):
    """The paths of Parquet files of row groups of these sizes; `index` counts all rows."""
    paths, row = [], 0
    folder.mkdir(exist_ok=True, parents=True)
    schema = pa.schema({"index": pa.int64(), "text": pa.string()})
    for number, groups in enumerate(files):
        paths.append(str(folder / f"part-{number:03}.parquet"))
        with pq.ParquetWriter(paths[-1], schema, **options) as writer:
            for size in groups:
                index = range(row, row + size)
                values = {"index": [*index], "text": [f"row {i}" for i in index]}
                writer.write_table(pa.table(values, schema=schema))
                row += size
    return paths


def view(paths, streams=8):
    return open_parquet(LOCAL, paths, DataConfig(streams=streams))


class Index:
    """A task whose batch is its rows' `index`."""

    def collate(self, rows):
        return [row["index"] for row in rows]


def on_each_rank(dataset, ranks, global_batch=24, micro_batch=2, workers=0, position=0, **settings):
    """The training batches of each rank, as build_batches makes them."""
    config = Config(
        run=RunConfig(seed=5),
        data=DataConfig(workers=workers, **settings),
        train=TrainConfig(micro_batch_size=micro_batch, global_batch_size=global_batch),
    )
    made = []
    for rank in range(ranks):
        rows = pickle.loads(pickle.dumps(dataset))
        world = World(rank=rank, world_size=ranks)
        made.append(build_batches(config, Index(), rows, world))
        made[-1].position = position
    return made


def take(batches, steps):
    """The sorted rows of each step, over all ranks."""
    taken = []
    for _ in range(steps):
        parts = [batch for one in batches for batch in next(one) if not isinstance(batch, Padding)]
        taken.append(sorted(index for part in parts for index in part))
    return taken


STEPS_PER_EPOCH = 66  # the last with 16 of 24 rows


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(a view, the rows of each step of one process)."""
    dataset = view(written(tmp_path_factory.mktemp("parquet"), UNEVEN))
    steps = take(on_each_rank(dataset, 1), STEPS_PER_EPOCH + 8)
    rows = sorted(row for step in steps[:STEPS_PER_EPOCH] for row in step)
    assert rows == list(range(len(dataset)))
    return dataset, steps


@pytest.mark.parametrize(
    ("before", "after", "steps", "workers"),
    [(1, 2, 1, 1), (4, 1, STEPS_PER_EPOCH - 2, 0), (2, 1, STEPS_PER_EPOCH, 0)],
)
def test_a_run_takes_the_same_rows_at_any_world_size_from_any_step_with_any_workers(
    before, after, steps, workers, uninterrupted
):
    dataset, expected = uninterrupted
    batches = on_each_rank(dataset, before)
    assert take(batches, steps) == expected[:steps]
    resumed = on_each_rank(dataset, after, workers=workers, position=batches[0].position)
    assert take(resumed, 8) == expected[steps : steps + 8], "over the epoch's end, too"
    for one in resumed:
        one.close()


@pytest.mark.parametrize(("ranks", "window"), [(1, 3), (4, 1)])
def test_each_row_group_is_read_once_per_epoch_over_all_ranks(ranks, window, tmp_path, monkeypatch):
    reads, read = [], pq.ParquetFile.read_row_group

    def noted(self, group, **options):
        reads.append(group)
        return read(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    monkeypatch.setattr(parquet, "SHUFFLE_GROUPS", window)
    even = view(written(tmp_path / "even", EVEN))
    take(on_each_rank(even, ranks, global_batch=16), len(even) // 16)
    assert len(reads) == 32
    uneven = view(written(tmp_path / "uneven", UNEVEN))
    take(on_each_rank(uneven, ranks, global_batch=16, drop_last=True), len(uneven) // 16)
    assert len(reads) - 32 <= 41 + ranks - 1, "of 41 groups with rows, two ranks may share one"


def test_a_validation_part_is_whole_row_groups_and_the_same_each_time(uninterrupted):
    dataset, _ = uninterrupted
    parts = [held_out_part(dataset, split, 0.1) for split in ("train", "validation", "train")]
    train, held_out = ([row["index"] for row in part] for part in parts[:2])
    assert sorted(train + held_out) == list(range(len(dataset)))
    assert train == sorted(train)
    assert parts[1].row_groups == 5, "of 41"
    prints = [each.fingerprint for each in (*parts, held_out_part(dataset, "train", 0.2))]
    assert prints[0] == prints[2] == held_out_part(dataset, "train", 0.1, "shuffled").fingerprint
    assert len({*prints}) == 3


def split_of(path, split="train", **settings):
    return load_split(DataConfig(path=str(path), text_column="index", **settings), split)


@pytest.mark.usefixtures("own_cache")
def test_large_parquet_files_are_read_by_row_group(tmp_path, monkeypatch):
    written(tmp_path / "data", UNEVEN)
    size = sum(file.stat().st_size for file in (tmp_path / "data").iterdir())
    for limit, by_group in ((size, {"auto": False, "parquet": True}), (size - 1, {"auto": True})):
        monkeypatch.setattr(load, "MAP_UP_TO_BYTES", limit)
        for setting, expected in {"map": False, **by_group}.items():
            rows = split_of(tmp_path / "data", view=setting)
            assert isinstance(rows, ParquetView) == expected


def test_rows_are_as_the_datasets_library_gives_them(tmp_path):
    pixels = torch.arange(48, dtype=torch.uint8).reshape(4, 4, 3).numpy()
    columns = {
        "nested": [{"a": [1, 2], "b": {"c": "x"}}, None, {"a": [], "b": {"c": None}}],
        "when": [datetime(2026, 1, 1), datetime(2026, 1, 2), None],
        "image": [pixels] * 3,
        "label": [0, 1, 0],
    }
    expected = datasets.Dataset.from_dict(columns)
    expected = expected.cast_column("image", datasets.Image())
    expected = expected.cast_column("label", datasets.ClassLabel(2))
    expected.to_parquet(tmp_path / "any.parquet", batch_size=2)
    rows = view([str(tmp_path / "any.parquet")], streams=1)
    assert rows.features == expected.features
    assert list(rows) == list(expected)
    assert rows.__getitems__([2, 0, 2]) == expected.__getitems__([2, 0, 2])
    assert rows[1]["image"].tobytes() == pixels.tobytes()
    assert rows.column_names == expected.column_names
    assert rows.select_columns(["label"])[1] == {"label": 1}


def test_types_are_widened_if_that_loses_nothing(tmp_path):
    tables = [
        pa.table({"n": pa.array([1], pa.int32()), "text": pa.nulls(1)}),
        pa.table({"n": pa.array([7], pa.int64()), "text": pa.array(["x"])}),
        pa.table({"n": pa.array([1.5]), "text": pa.array(["y"], pa.large_string())}),
    ]
    paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    for path, table in zip(paths, tables, strict=True):
        pq.write_table(table, path)
    assert list(view(paths, streams=1)) == [row for table in tables for row in table.to_pylist()]


@pytest.mark.bad_input("`data.streams` that the world size does not divide, or above row groups")
def test_streams_are_picked_for_any_row_groups_and_ranks_and_take_every_row_once_per_epoch(
    tmp_path,
):
    for groups, ranks, streams in (
        ([3] * 900, 8, 64),
        ([1, 50] * 48, 96, 96),
        ([3] * 20 + [10_000] + [3] * 17, 3, 24),
        ([1], 2, 2),
    ):
        paths = written(tmp_path, [groups])
        dataset = view(paths, "auto")
        order, order_of = dataset.shuffled(ranks, ranks)
        assert order == f"parquet streams={streams} shuffle_groups=2"
        everything = torch.arange(len(dataset))
        orders = [order_of(*of)(everything) for of in ((0, 0), (0, 1), (1, 0))]
        for number, rows in enumerate(orders):
            assert torch.equal(rows.sort().values, everything)
            assert len(groups) == 1 or not torch.equal(rows, orders[number - 1])
    for streams, ranks in ((64, 2), (1, 3)):
        message = message_of(64, view(paths, streams).shuffled, ranks, ranks)
        assert f"={streams} must be a multiple of the world size {ranks}, and at most" in message


@pytest.mark.bad_input("a Parquet file that is empty, cut off, something else, or without any row")
@pytest.mark.bad_input("a Parquet file with a damaged page")
@pytest.mark.usefixtures("own_cache")
def test_a_file_that_is_no_parquet_and_a_damaged_row_group_are_named(tmp_path):
    paths = written(tmp_path, EVEN, write_page_checksum=True, use_dictionary=False)
    start = pq.ParquetFile(paths[2]).metadata.row_group(3).column(1).data_page_offset
    content = bytearray(Path(paths[2]).read_bytes())
    content[start + 60] ^= 1
    Path(paths[2]).write_bytes(content)
    dataset = view(paths)
    dataset[2 * 160 + 59]
    (batches,) = on_each_rank(dataset, 1, shuffle=False, position=2 * 160 + 48)
    message = message_of(65, next, batches)
    assert "sample 380 of the training split could not be read: row group 3 of " in message
    for damaged in (Path(paths[1]).read_bytes()[:-7], b"", b"no parquet at all"):
        Path(paths[1]).write_bytes(damaged)
        assert "part-001.parquet can't be read as Parquet: " in message_of(65, view, paths)
    paths = written(tmp_path, [[0], [5], []])
    assert len(view(paths)) == 5
    assert "part-000.parquet has no rows, nor has" in message_of(65, view, paths[::2])
    assert "loaded: it has no rows; check" in message_of(65, split_of, paths[0], view="map")


@pytest.mark.bad_input("Parquet files whose columns or types differ, where the column is read")
def test_a_column_that_some_files_lack_is_refused_only_if_it_is_read(tmp_path, caplog):
    (first,) = written(tmp_path, [[5]])
    less = str(tmp_path / "less.parquet")
    pq.write_table(pa.table({"index": [1]}), less)
    rows = view([first, less])
    text = f"warning: column text is left out: it is missing in {less} and string in {first}"
    assert text in caplog.messages[-1]
    assert rows[5] == {"index": 1}
    message = message_of(65, rows.select_columns, ["text", "index"])
    assert "column text does not exist; the columns are index" in message


@pytest.mark.bad_input("`data.view=parquet` with other files, or one row group to be split")
def test_the_last_row_groups_can_be_held_out_but_a_single_one_is_trained_on_whole(tmp_path):
    written(tmp_path, [[2, 3, 4, 5]])
    for split, rows in (("train", range(5)), ("validation", range(5, 14))):
        part = split_of(tmp_path, split, view="parquet", validation_split="last:0.5")
        assert [row["index"] for row in part] == [*rows]
    written(tmp_path, [[10]])
    assert len(split_of(tmp_path, view="parquet")) == 10
    assert split_of(tmp_path, "validation", view="parquet") is None
    message = message_of(65, split_of, tmp_path, view="parquet", validation_split=0.5)
    assert "leaves none of 1 row groups" in message
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").write_text("text")
    message = message_of(64, split_of, tmp_path / "other", view="parquet")
    assert "data.view=parquet needs Parquet files, and data.path names none" in message


def test_the_fingerprint_is_of_rows_groups_values_and_names_but_not_of_the_folder(tmp_path):
    before = view(written(tmp_path / "before", EVEN))
    assert before.fingerprint == view(written(tmp_path / "moved", EVEN)).fingerprint
    assert before.fingerprint in str(dataset_hash(on_each_rank(before, 1)[0]))
    groups = written(tmp_path / "groups", [*EVEN[:-1], [20] * 9])
    values = written(tmp_path / "values", EVEN)
    table = pq.read_table(values[-1]).set_column(1, "text", pa.array(["ROW"] * 160))
    pq.write_table(table, values[-1], row_group_size=20)
    names = written(tmp_path / "names", EVEN)
    names[-1] = str(Path(names[-1]).rename(tmp_path / "names/renamed.parquet"))
    changed = {view(paths).fingerprint for paths in (groups, values, names)}
    assert len({before.fingerprint, *changed}) == 4
