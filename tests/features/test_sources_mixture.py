"""Mixtures: exact shares, nothing left out, and resuming at any world size."""

import hashlib
from collections import Counter
from dataclasses import replace

import numpy
import pytest
import torch
from messages import message_of
from tiny import Tiny, make_run, save, take_steps

from dist_amp.checkpoint.compatibility import check_config
from dist_amp.config.load import load_config
from dist_amp.errors import DataError
from dist_amp.settings import DataConfig, MixedSourceConfig
from dist_amp.sources.mixture import Mixture, counts_of, losses_by_source, mixed
from dist_amp.world import World


class Tokens:
    """Documents of 1 to 5 tokens: the document's number, then their source's offset."""

    def __init__(self, size, offset=1000, fingerprint=None):
        self.lengths = numpy.arange(size) % 5 + 1
        self.offset = offset
        self.fingerprint = fingerprint

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        ids = torch.tensor([index, *[self.offset] * (self.lengths[index].item() - 1)])
        return {"input_ids": ids, "labels": ids.clone()}


def source_and_number(sample):
    return sample["source_ids"][0].item(), sample["input_ids"][0].item()


@pytest.mark.parametrize(
    ("weights", "sizes", "length", "order"),
    [
        ([1.0, 1e-5], [100, 3], 300_003, "a7983d2f08d1"),
        ([0.3333, 0.6667], [100_000, 1000], 300_031, "93bc2ce1edff"),
        ([0.7, 0.2, 0.1], [30, 20, 1], 100, "4c951027cedb"),
    ],
)
def test_shares_of_an_epoch_are_exact_and_evenly_spread_in_the_order_of_every_version(
    weights, sizes, length, order
):
    named = dict(zip("abcdefgh", weights, strict=False))
    counts = counts_of(named, sizes)
    shares = numpy.array(weights) / sum(weights)
    mix = Mixture({name: range(size) for name, size in zip(named, sizes, strict=True)}, counts)
    assert len(mix) == length, "the shortest in which each sample comes once"
    source, number = mix.locate(numpy.arange(length))
    content = source[:100_000].tobytes() + number[:100_000].tobytes()
    assert hashlib.sha256(content).hexdigest()[:12] == order
    for block in source.reshape(-1, sum(counts)):
        assert numpy.bincount(block).tolist() == counts
    for index, size in enumerate(sizes):
        assert abs((source == index).sum() - length * shares[index]) < 1
        often = numpy.bincount(number[source == index])
        assert len(often) == size
        assert often.max() - often.min() <= 1
        # Evenly spread: no beginning has more or less than its share, but for a few.
        early = (source == index).cumsum() - numpy.arange(1, length + 1) * shares[index]
        assert abs(early).max() < len(sizes)


def test_samples_come_in_the_order_asked_for_with_their_source_beside_each_token():
    mix = Mixture({"a": Tokens(6, offset=500), "b": Tokens(4, offset=900)}, [2, 1])
    asked = [8, 0, 3, 3, 7, 1]
    for position, sample in zip(asked, mix.__getitems__(asked), strict=True):
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

    prints = [fingerprint(a="x", b="y"), fingerprint(a="x", b="z"), fingerprint(a="x", c="y")]
    assert len({*prints, fingerprint((3, 1), a="x", b="y")}) == 4


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

    rows = mixed(replace(tables(wiki=2.0, code=1.0), workers=3), "train", build_seen)
    assert seen == [("wiki", "text", 3, {}), ("code", "text", 3, {})]
    assert (rows.counts.tolist(), len(rows)) == ([2, 1], 45)
    assert "data: code: 4 rows, 33.33% of rows, 3.75 times each" in caplog.messages
    assert mixed(DataConfig(path="x"), "train", lambda data: [data.path]) == ["x"]


def test_held_out_parts_are_joined_without_weights_and_interleaved(caplog):
    caplog.set_level("INFO", "dist_amp")
    data = tables(wiki=1.0, code=1.0, chat=5.0)
    joined = mixed(data, "validation", lambda data: None if data.path == "code" else build(data))
    draws = [source_and_number(joined[position]) for position in range(36)]
    assert sorted(draws) == [(0, n) for n in range(30)] + [(2, n) for n in range(6)]
    for start in range(0, 36, 6):
        batch = Counter(source for source, _ in draws[start : start + 6])
        assert batch == {0: 5, 2: 1}, "some batches have all"
    assert caplog.messages[-1].startswith("data: nothing is held out of code")
    assert mixed(data, "validation", lambda data: None) is None
    assert mixed(data, "validation", lambda data: []) is None


def config_of(*words, **environ):
    return load_config([str(word) for word in words], environ)


@pytest.mark.bad_input("a wrong key or weight of a source's table")
def test_a_wrong_key_or_weight_of_a_source_is_refused():
    for key, value, rule in (
        ("wieght", "1.0", "did you mean data.sources.wiki.weight"),
        ("weight", "0.0", "must be greater than 0"),
        ("weight", "nan", "must be"),
    ):
        message = message_of(64, config_of, f"--data.sources.wiki.{key}", value)
        assert f"data.sources.wiki.{key}" in message
        assert rule in message


@pytest.mark.bad_input("a small source that an epoch repeats often")
def test_a_source_that_an_epoch_repeats_too_often_is_warned_of_with_both_numbers(capsys):
    sizes = {"wiki": 41_000, "tiny": 1}
    for weight, warning in ((0.0004, ""), (0.01, "repeats each of its 1 rows 415 times, more")):
        weights = {"wiki": 1 - weight, "tiny": weight}
        mixed(tables(**weights), "train", lambda data: Tokens(sizes[data.path]))
        printed = capsys.readouterr().err
        assert warning in printed
        assert bool(printed) == bool(warning)


@pytest.mark.parametrize(("weight", "least"), [(1e-17, "1e-17"), (1e-300, "1e-300"), (1e300, "1")])
def test_weights_that_make_an_epoch_too_long_are_refused(weight, least):
    message = message_of(64, counts_of, {"a": 1.0, "b": weight}, [40, 40])
    assert message.startswith(f"weight={least} in data.sources makes epochs above 2^52 rows; raise")


BY_ROW_GROUP = Tokens(3)
BY_ROW_GROUP.shuffled = None


@pytest.mark.bad_input("a source of a mixture that has no samples or is read by row group")
@pytest.mark.bad_input("a mixture beside `data.path`")
@pytest.mark.parametrize(
    ("path", "split", "rows", "status", "fragment"),
    [
        ("x", "train", BY_ROW_GROUP, 64, "wiki is read by row group, but a mixture reads in"),
        ("x", "train", None, 65, "wiki has no samples; check its path, split and columns"),
        ("x", "train", DataError("data.path=x is no file"), 65, "wiki: data.path=x is no file"),
        ("off", "train", [1], 64, "wiki names no data; set data.sources.wiki.path or data.sour"),
        ("x", "other", [1], 64, "wiki.split, or remove data.sources"),
    ],
)
def test_a_source_that_is_not_mixed_is_refused_by_its_table(path, split, rows, status, fragment):
    def build(data):
        if isinstance(rows, DataError) and data.path != "big":
            raise rows
        return Tokens(9) if data.path == "big" else rows

    sources = {"wiki": MixedSourceConfig(path=path), "big": MixedSourceConfig(path="big")}
    data = DataConfig(sources=sources, split=split)
    assert f"data.sources.{fragment}" in message_of(status, mixed, data, "train", build)


@pytest.mark.bad_input("a resume with other weights, or a source more or less")
def test_a_resumed_mixture_may_move_its_files_but_not_change_its_weights_or_sources(tmp_path):
    words = f"--run.dir {tmp_path} --train.micro_batch_size 2 --data.sources.wiki.path a".split()
    both = "--data.sources.code.path b --data.sources.code.weight 2".split()
    run = make_run(World(), Tiny(), *words, *both)
    take_steps(run, 1)
    folder = save(run)

    def check(words):
        check_config(folder, replace(run.config, data=config_of(*words).data), Tiny(), World())

    config = folder / "config.toml"  # as an earlier version wrote it
    table = "[data.sources.wiki]\n"
    config.write_text(config.read_text().replace(table, f'{table}format = "json"\n'))
    check([*words, *both, "--data.sources.wiki.path", "elsewhere"])
    for more, fragment in (
        ([*both, "--data.sources.wiki.weight", "0.5"], "wiki.weight=1.0, now 0.5"),
        ([*both, "--data.sources.more.path", "c"], "more.weight=unset, now 1.0"),
        ([], "code.weight=2.0, now unset"),
    ):
        assert f"data.sources.{fragment}: use" in message_of(64, check, [*words, *more])


def test_the_losses_of_each_source_are_summed_over_what_counts():
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, float("nan")]])
    labels = torch.tensor([[5, -100, 5], [5, 5, -100]])
    sources = torch.tensor([[0, 0, 1], [1, 1, 0]])
    found = losses_by_source(losses, labels, sources, ["wiki", "code", "chat"])
    values = {name: (loss.item(), weight.item()) for name, (loss, weight) in found.items()}
    assert values == {"loss_wiki": (1.0, 1), "loss_code": (28.0, 3), "loss_chat": (0.0, 0)}
