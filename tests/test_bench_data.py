"""The data bench reads every kind of source by every loader, and reports each; no test asserts a speed."""

import json
import tomllib

import pytest
from conftest import ROOT

from dist_amp.bench import harness
from dist_amp.bench.__main__ import main as bench
from dist_amp.bench.data import BARE, DEMO, LOADERS, OURS
from dist_amp.bench.data_kinds import KINDS, Counted, write_files
from dist_amp.world import World

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of all kinds, 200 rows each."""
    import datasets

    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        write_files(folder, 200)
        yield folder


@pytest.mark.parametrize(("sources", "workers"), [(list(KINDS), [0]), (["images"], [0, 2])])
def test_the_report_has_a_row_for_every_source_loader_and_number_of_workers(
    sources, workers, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(harness, "on_ranks", lambda size, measure, *args: measure(World(), *args))
    words = ["--rows", "128", "--rounds", "1", "--seconds", "0", "--steps", "2", "--out", str(tmp_path)]
    assert bench(["data", *words, "--sources", *sources, "--workers", *map(str, workers)]) == 0
    found = json.loads((tmp_path / "data.json").read_text())
    loaders = {source: LOADERS if KINDS[source].loader else (OURS, BARE) for source in sources}
    expected = {(source, count, loader) for source in sources for count in workers for loader in loaders[source]}
    assert {(row["source"], row["workers"], row["loader"]) for row in found["rows"]} == expected
    for row in found["rows"]:
        assert row["samples_per_second"][0] > 0
        assert (row["tokens_per_second"][0] > 0) == (row["source"] in ("tokens", "packed"))
    text = (tmp_path / "data.md").read_text()
    assert text.count("\n| ") == len(expected) + 1  # and its head
    assert 0 < found["demo"]["wait_share"] < 1
    assert "of a step of" in text
    assert "demo: 2 ranks with 2 workers each wait" in capsys.readouterr().out


@pytest.mark.parametrize("source", list(KINDS))
def test_each_kind_of_source_has_all_of_its_rows(source, folder):
    """But for packed ones, whose tokens are counted."""
    kind = KINDS[source]
    dataset = kind.dataset(folder)
    samples, tokens, batch = Counted(kind.collate).collate([dataset[index] for index in range(len(dataset))])
    assert len(next(iter(batch.values()))) == samples
    if source != "packed":
        assert samples == 200
    if tokens:
        texts = KINDS["json"].dataset(folder)["text"]
        assert tokens >= sum(len(text) for text in texts)  # and each document's end


def test_the_demo_that_is_measured_is_the_demo():
    config = tomllib.loads((ROOT / "configs/demo.toml").read_text())
    keys = [word.removeprefix("--").split(".") for word in DEMO[::2]]
    assert [float(word) for word in DEMO[1::2]] == [config[section][key] for section, key in keys]
    assert set(config["train"]) == {"steps", "micro_batch_size"}
    assert set(config["optim"]) == {"lr", "warmup_steps"}
