"""Mixtures: exact shares, nothing left out, and resuming at any world size."""

import math
import re
from collections import Counter
from dataclasses import replace

import numpy
import pytest
import torch
from messages import message_of
from tiny import Tiny, make_run, save, take_steps

from dist_amp.checkpoint.compatibility import check_config
from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.errors import DataError
from dist_amp.settings import DataConfig, MixedSourceConfig
from dist_amp.sources.mixture import (
    Mixture,
    counts_of,
    losses_by_source,
    mixed,
    portion,
)
from dist_amp.train import main
from dist_amp.world import World


class Tokens:
    """Documents of 1 to 5 tokens: the document's number, then their source's offset."""

    def __init__(self, size, offset=1000, fingerprint=None):
        self.lengths = numpy.arange(size) % 5 + 1
        self.offset = offset
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        ids = torch.tensor([index, *[self.offset] * (self.lengths[index].item() - 1)])
        return {"input_ids": ids, "labels": ids.clone()}


def source_and_number(sample):
    return sample["source_ids"][0].item(), sample["input_ids"][0].item()


def drawn(mix):
    """Every draw of an epoch as (source, sample)."""
    return [source_and_number(sample) for sample in mix.__getitems__(range(len(mix)))]


@pytest.mark.parametrize(
    ("weights", "sizes", "length"),
    [
        ([1.0, 1e-6], [1000, 3], 3_000_003),
        ([0.3333, 0.6667], [100_000, 1000], 300_031),
        ([math.pi**-n for n in range(8)], [100] * 8, 443_013),
    ],
)
def test_shares_of_an_epoch_are_exact_to_a_sample_at_any_weight(weights, sizes, length):
    named = dict(zip("abcdefgh", weights, strict=False))
    counts = counts_of(named, sizes)
    shares = numpy.array(weights) / sum(weights)
    assert sum(counts) == length, "the shortest in which each sample comes once"
    assert (numpy.array(counts) >= sizes).all()
    assert (abs(numpy.array(counts) - length * shares) < 1).all()
    mix = Mixture({name: range(size) for name, size in zip(named, sizes, strict=True)}, counts)
    assert len(mix) == length
    if length < 10**7:
        source, number = mix.locate(numpy.arange(length))
        for index, size in enumerate(sizes):
            often = numpy.bincount(number[source == index])
            assert len(often) == size
            assert often.max() - often.min() <= 1
            # Evenly spread: no beginning has more or less than its share, but for a few.
            early = (source == index).cumsum() - numpy.arange(1, length + 1) * shares[index]
            assert abs(early).max() < len(sizes)


def test_shares_that_a_short_block_has_exactly_keep_its_order():
    assert counts_of({"a": 0.7, "b": 0.2, "c": 0.1}, [30_000, 20, 1]) == [7, 2, 1]
    assert counts_of({"a": 0.3333, "b": 0.6667}, [100, 100]) == [1, 2], "to a sample"
    mix = Mixture({"a": range(7), "b": range(2)}, [7, 2])
    assert mix.locate(range(9))[0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0], "as in older runs"


def test_a_portion_of_a_large_number_is_exact():
    rng = numpy.random.default_rng(0)
    for whole in rng.integers(2**40, 2**52, 20).tolist():
        count = rng.integers(1, whole).item()
        places = rng.integers(0, whole, 20, endpoint=True)
        exact = [place * count // whole for place in places.tolist()]
        assert portion(places, count, whole).tolist() == exact


@pytest.mark.parametrize(("sizes", "counts"), [((7, 100, 3), (3, 4, 1)), ((1, 9), (1, 3))])
def test_every_sample_is_taken_and_a_sources_samples_equally_often_in_as_few_blocks_as_possible(
    sizes, counts
):
    mix = Mixture({name: Tokens(size) for name, size in zip("abc", sizes, strict=False)}, counts)
    times = Counter(drawn(mix))
    for number, size in enumerate(sizes):
        often = [times[number, sample] for sample in range(size)]
        assert min(often) >= 1
        assert max(often) - min(often) <= 1
    needed = max(math.ceil(size / count) for size, count in zip(sizes, counts, strict=True))
    assert len(mix) == needed * sum(counts)
    sources, _ = mix.locate(numpy.arange(len(mix)))
    for block in sources.reshape(needed, sum(counts)):
        assert tuple(numpy.bincount(block)) == counts


def test_samples_come_in_the_order_asked_for_with_their_source_beside_each_token():
    mix = Mixture({"a": Tokens(6, offset=500), "b": Tokens(4, offset=900)}, [2, 1])
    asked = [8, 0, 3, 3, 7, 1]
    draws = mix.__getitems__(asked)
    for position, sample in zip(asked, draws, strict=True):
        assert source_and_number(mix[position]) == source_and_number(sample)
        assert sample["source_ids"].dtype == torch.int64
        expected = torch.where(sample["source_ids"] == 0, 500, 900)[1:]
        assert torch.equal(sample["input_ids"][1:], expected)
    with pytest.raises(IndexError):
        mix[len(mix)]


def test_the_fingerprint_is_of_the_sources_their_names_and_their_shares():
    def fingerprint(counts=(2, 1), **prints):
        sources = {name: Tokens(6, fingerprint=one) for name, one in prints.items()}
        return Mixture(sources, counts).fingerprint

    different = [
        fingerprint(a="x", b="y"),
        fingerprint(a="x", b="z"),
        fingerprint(a="x", c="y"),
        fingerprint(b="y", a="x"),
        fingerprint((3, 1), a="x", b="y"),
    ]
    assert len(set(different)) == 5
    assert fingerprint(a="x", b="y") == different[0]


def config_of(*words, **environ):
    return load_config([str(word) for word in words], environ)


def tables(**weights):
    sources = {name: MixedSourceConfig(path=name, weight=one) for name, one in weights.items()}
    return DataConfig(sources=sources)


def build(data):
    return Tokens({"wiki": 30, "code": 4, "chat": 6}[data.path])


def test_each_source_is_built_from_its_own_keys_and_weights_count_rows(caplog):
    caplog.set_level("INFO", "dist_amp")
    seen = []

    def build_seen(data):
        seen.append((data.path, data.text_column, data.workers, data.sources))
        return build(data)

    data = replace(tables(wiki=2.0, code=1.0), workers=3)
    rows = mixed(data, "train", build_seen)
    assert seen == [("wiki", "text", 3, {}), ("code", "text", 3, {})]
    assert (rows.counts.tolist(), len(rows)) == ([2, 1], 45)
    assert caplog.messages == [
        "data: source wiki, train",
        "data: source code, train",
        "data: wiki: 30 rows, 66.67% of rows, 1.00 times each",
        "data: code: 4 rows, 33.33% of rows, 3.75 times each",
        "data: an epoch has 45 rows",
    ]


def test_held_out_parts_are_joined_without_weights_and_interleaved(caplog):
    caplog.set_level("INFO", "dist_amp")
    data = tables(wiki=1.0, code=1.0, chat=5.0)
    joined = mixed(data, "validation", lambda data: None if data.path == "code" else build(data))
    draws = drawn(joined)
    each_once = [(0, n) for n in range(30)] + [(2, n) for n in range(6)]
    assert sorted(draws) == each_once, "by index in the config"
    for start in range(0, 36, 6):
        batch = Counter(source for source, _ in draws[start : start + 6])
        assert batch == {0: 5, 2: 1}, "some batches have all"
    fragment = "data: nothing is held out of code, so no evaluation has a loss of it"
    assert caplog.messages[-1] == fragment
    assert mixed(data, "validation", lambda data: None) is None
    assert mixed(data, "validation", lambda data: []) is None


TOML = """
[data.sources.wiki]
path = "w/*.jsonl"
weight = 0.7
[data.sources.code]
name = "me/code"
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    return path


def test_a_source_is_set_in_a_file_in_the_environment_and_on_the_command_line(mine):
    words = ("--config", mine, "--data.sources.code.weight", 0.5)
    sources = config_of(*words, DIST_AMP_DATA__SOURCES__CODE__SPLIT="a").data.sources
    assert sources["wiki"] == MixedSourceConfig(path="w/*.jsonl", weight=0.7)
    assert sources["code"] == MixedSourceConfig(name="me/code", weight=0.5, split="a")
    assert list(sources) == ["wiki", "code"], "in the order of the file"


def test_a_mixture_is_printed_as_it_is_read_and_help_shows_the_keys_of_a_source(
    mine, tmp_path, capsys
):
    config = config_of("--config", mine)
    assert main(["--config", str(mine), "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert printed == to_toml(config)
    (tmp_path / "again.toml").write_text(printed)
    assert config_of("--config", tmp_path / "again.toml") == config
    for words, name in ([], "NAME"), (["--config", str(mine)], "wiki"):
        assert main([*words, "--help", "data"]) == 0
        shown = capsys.readouterr().out
        assert f"--data.sources.{name}.weight FLOAT" in shown
        assert ("NAME" in shown) == (name == "NAME")


@pytest.mark.bad_input("an unknown key in a source's table, or a value in its place")
@pytest.mark.bad_input("a source whose name is not made of letters, digits and _")
@pytest.mark.bad_input("a mixture's weight that is 0, negative, nan or infinite")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("wiki]\nwieght = 1.0", "unknown key .*wiki.wieght in .*, line 2; did you mean .*.weight"),
        ('"my wiki"]\npath = "x"', "'my wiki' can't name a source; use letters, digits and _"),
        ('"2024"]\npath = "x"', "'2024' can't name a source; use letters, digits and _"),
        ("wiki]\nweight = 0.0", "data.sources.wiki.weight=0.* must be "),
        ("wiki]\nweight = nan", "data.sources.wiki.weight=nan .* must be "),
        ("wiki]\nweight = inf", "data.sources.wiki.weight=inf .* must be "),
    ],
)
def test_a_wrong_name_key_or_weight_of_a_source_is_refused(table, message, mine):
    mine.write_text(f"[data.sources.{table}")
    assert re.search(message, message_of(64, config_of, "--config", mine))


@pytest.mark.bad_input("a source so small that an epoch repeats each row more than 20 times")
def test_a_source_that_an_epoch_repeats_too_often_is_warned_of_with_both_numbers(caplog, capsys):
    caplog.set_level("INFO", "dist_amp")
    sizes = {"wiki": 41_000, "tiny": 1}
    data = tables(wiki=0.99, tiny=0.01)
    rows = mixed(data, "train", lambda data: Tokens(sizes[data.path]))
    assert rows.counts.tolist() == [99, 1]
    fragment = (
        "warning: data.sources.tiny: an epoch, in which wiki is read once, takes each of its 1 "
        "rows 415 times, more than 20; lower its weight, or raise wiki's\n"
    )
    assert capsys.readouterr().err == fragment
    mixed(tables(wiki=0.9996, tiny=0.0004), "train", lambda data: Tokens(sizes[data.path]))
    assert capsys.readouterr().err == ""


@pytest.mark.bad_input("a mixture beside a key of a single source, as `data.path`")
def test_a_key_of_a_single_source_beside_a_mixture_is_refused():
    data = replace(tables(wiki=1.0), format="json")
    assert message_of(64, mixed, data, "train", build) == (
        "data.format=json is for a single source, and there is a mixture of wiki; set "
        "data.sources.wiki.format, or remove data.sources"
    )


BY_ROW_GROUP = Tokens(3)
BY_ROW_GROUP.shuffled = None
NO_SAMPLES = "has no samples; check its path, split and columns"


@pytest.mark.bad_input("a Parquet view, read by row group, in a mixture")
@pytest.mark.bad_input("a source that names no data, or has no samples")
@pytest.mark.parametrize(
    ("path", "rows", "status", "fragment"),
    [
        (
            "x",
            BY_ROW_GROUP,
            64,
            "is read by row group, and a mixture reads in any order; name its tokens",
        ),
        ("off", [1], 64, "names no data; set data.sources.wiki.path or data.sources.wiki.name"),
        ("x", None, 65, NO_SAMPLES),
        ("x", [], 65, NO_SAMPLES),
    ],
)
def test_a_source_that_can_not_be_mixed_is_refused(path, rows, status, fragment):
    for more in {}, {"big": MixedSourceConfig(path="big", weight=1e7)}:
        data = DataConfig(sources={"wiki": MixedSourceConfig(path=path), **more})
        build = {path: rows, "big": Tokens(9)}
        message = message_of(
            status, mixed, data, "train", lambda data, build=build: build[data.path]
        )
        assert message.startswith(f"data.sources.wiki {fragment}")


@pytest.mark.bad_input("a weight so small that an epoch would have more than 2^52 samples")
@pytest.mark.bad_input(
    "an error of one source of a mixture: its files, columns or a damaged sample"
)
def test_an_error_of_one_source_names_its_table():
    def fail(data):
        raise DataError("data.path=x is no file")

    message = message_of(65, mixed, tables(wiki=1.0), "train", fail)
    assert message == "data.sources.wiki: data.path=x is no file"
    message = message_of(64, counts_of, {"wiki": 1.0, "code": 1e-15}, [1, 400])
    assert message.startswith("data.sources.code.weight=1e-15 is too small: to read its rows once")


def test_without_a_mixture_the_single_source_is_built():
    assert mixed(DataConfig(path="x"), "train", lambda data: [data.path]) == ["x"]


def test_a_sample_that_cannot_be_read_is_named_by_its_source():
    class Damaged(Tokens):
        def __getitem__(self, index):
            if index == 3:
                raise ValueError("bad block")
            return super().__getitem__(index)

    mix = Mixture({"wiki": Tokens(5), "code": Damaged(5)}, [1, 1])
    assert len(mix.__getitems__([0, 1, 2, 3, 8])) == 5
    fragment = "data.sources.code, sample 3: ValueError: bad block (test_sources_mixture.py, line "
    assert message_of(65, mix.__getitems__, [7]).startswith(fragment)


@pytest.mark.bad_input("a resume with other weights, or a source more or less")
def test_a_resumed_mixture_may_move_its_files_but_not_change_its_weights_or_sources(tmp_path):
    words = f"--run.dir {tmp_path} --train.micro_batch_size 2 --data.sources.wiki.path a".split()
    both = "--data.sources.code.path b --data.sources.code.weight 2".split()
    run = make_run(World(), Tiny(), *words, *both)
    take_steps(run, 1)
    save(run)
    folder = next(tmp_path.glob("checkpoints/*/config.toml")).parent

    def check(words):
        config = replace(run.config, data=config_of(*words).data)
        check_config(folder, config, Tiny(), World())

    moved = "--data.sources.wiki.path elsewhere --data.sources.wiki.format tokens".split()
    check([*words, *both, *moved])
    for more, fragment in (
        ([*both, "--data.sources.wiki.weight", "0.5"], "wiki.weight=1.0, now 0.5"),
        ([*both, "--data.sources.more.path", "c"], "more.weight=unset, now 1.0"),
        ([], "code.weight=2.0, now unset"),
    ):
        message = message_of(64, check, [*words, *more])
        assert f"data.sources.{fragment}: use the old values" in message


def test_the_losses_of_each_source_are_summed_over_what_counts():
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, float("nan")]])
    labels = torch.tensor([[5, -100, 5], [5, 5, -100]])
    sources = torch.tensor([[0, 0, 1], [1, 1, 0]])
    found = losses_by_source(losses, labels, sources, ["wiki", "code", "chat"])
    assert {name: (loss.item(), weight.item()) for name, (loss, weight) in found.items()} == {
        "loss_wiki": (1.0, 1),
        "loss_code": (28.0, 3),
        "loss_chat": (0.0, 0),
    }
