"""Core as test_strangers.py tests it, with callbacks."""

import pytest
from ranks import RankFailed, on_ranks
from tiny import Tiny, make_run, take_steps
from torch import nn

from dist_amp.supervise.callbacks import Callbacks
from dist_amp.supervise.lifecycle import Stop


class Freezes(Tiny):
    def on_step(self, run, report):
        next(run.model.parameters()).requires_grad_(False)


def freeze(world, strategy):
    run = make_run(world, Freezes(), "--parallel.strategy", strategy, "--use_amp", "false")
    (report,) = take_steps(run, 1)
    Callbacks(run, Stop()).after_step(report, [])


@pytest.mark.bad_input("a parameter that is frozen while training")
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_freezing_while_training_is_refused_with_what_to_do(ranks, strategy):
    with pytest.raises(RankFailed, match="the parameter 0.0.weight was frozen after step 1, which"):
        on_ranks(ranks, freeze, strategy)


class Swaps(Tiny):
    def on_step(self, run, report):
        run.parallel.module[2] = nn.Linear(8, 1)


def swap(world, strategy):
    run = make_run(world, Swaps(), "--parallel.strategy", strategy, "--use_amp", "false")
    (report,) = take_steps(run, 1)
    Callbacks(run, Stop()).after_step(report, [])


@pytest.mark.bad_input("a module that is replaced while training")
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_module_replaced_while_training_is_refused_by_its_parameter(ranks, strategy):
    with pytest.raises(RankFailed, match="the parameter 2.weight came into the model after step 1"):
        on_ranks(ranks, swap, strategy)
