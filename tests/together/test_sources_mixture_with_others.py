"""What test_sources_mixture.py tests, with other features."""

import numpy
import torch
from test_sources_mixture import Tokens

from dist_amp.loading.length_groups import LengthGroups
from dist_amp.sources.mixture import (
    Mixture,
    counts_of,
)


def test_a_rare_source_costs_no_memory_or_time():
    mix = Mixture({"a": Tokens(6), "b": Tokens(4)}, counts_of({"a": 1.0, "b": 1e-14}, [6, 4]))
    assert len(mix) == 4 * 10**14 + 4
    assert not hasattr(mix, "_source"), "no table of places"
    grouped = LengthGroups(mix, 2)
    _, order = grouped.shuffled(8, 1)
    assert len(grouped.__getitems__(order(0, 0)(torch.arange(64)).tolist())) == 64


def test_lengths_are_those_of_the_samples():
    mix = Mixture({"a": Tokens(6), "b": Tokens(4)}, [2, 1])
    expected = [len(sample["input_ids"]) for sample in mix.__getitems__(range(len(mix)))]
    lengths = mix.lengths
    assert lengths[numpy.arange(len(mix))].tolist() == expected
    assert (len(lengths), lengths.min(), lengths.max()) == (len(mix), 1, 5)
    order = LengthGroups(mix, 2).shuffled(4, 1)[1](0, 0)(torch.arange(len(mix)))
    assert sorted(order.tolist()) == list(range(len(mix)))
