"""Damaged files are refused with a message, and not with a traceback."""

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dist_amp.checkpoint.format import read_manifest as read_checkpoint
from dist_amp.config.load import load_config
from dist_amp.errors import CheckpointRejected, ConfigError, DataError
from dist_amp.settings import DataConfig
from dist_amp.sources.parquet import open_parquet
from dist_amp.sources.token_shards import read_manifest as read_tokens
from dist_amp.supervise.lifecycle import saved_summary
from dist_amp.tasks import pretrained

LOCAL = fsspec.filesystem("file")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache" / "datasets"))


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


@pytest.mark.bad_input("a Parquet file whose footer is cut or announces a length beyond it")
def test_damaged_footers_are_refused_by_name(tmp_path):
    path = tmp_path / "forged.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    whole = path.read_bytes()
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
