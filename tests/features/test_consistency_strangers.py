"""Core as test_strangers.py tests it, with consistency."""

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from dist_amp.diagnostics.consistency import check_state


class FakeQuantised(Tiny):
    def build_model(self):
        quantise = FakeQuantize(observer=MovingAverageMinMaxObserver)
        return nn.Sequential(quantise, super().build_model())


def observed_after_evaluation(world, strategy):
    run = make_run(world, FakeQuantised(), "--parallel.strategy", strategy, "--use_amp", "false")
    take_steps(run, 2)
    check_state(run)
    run.parallel.average_batch_statistics()
    return {name: value.clone() for name, value in run.parallel.module.named_buffers()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_fake_quantisation_observes_may_differ_until_it_is_averaged(strategy):
    one, two = on_ranks(2, observed_after_evaluation, strategy)
    assert one["0.scale"] > 0
    assert all(torch.equal(one[name], two[name]) for name in one)
