"""What a step of the main job calls besides the model's forward and backward, on a tiny model.

`python -m benchmarks overhead --explain` says which component calls what.
"""

import pytest
from ranks import on_ranks

from benchmarks import explain

# Per step of 4 micro-batches, without forward and backward; the calls are those beyond the
# hand-written loop's, which reads no data (117 of them), since they differ between releases of
# torch. One log in ten steps adds a tenth of "at a log". The poll for signals is left out: it asks
# the other ranks every so many seconds, not steps.
BUDGETS = {
    ("single", 1): {"calls": 120, "operations": 45, "collectives": 0, "calls at a log": 700},
    ("ddp", 2): {"calls": 160, "operations": 46, "collectives": 1, "calls at a log": 900},
}


def costs_in_an_interval(world, strategy):
    explain.INTERVALS = 2  # the lower of two is as good as the middle one of three
    return explain.costs(world, strategy, "bf16", 4)


@pytest.mark.parametrize(("strategy", "ranks"), BUDGETS)
def test_a_step_calls_no_more_than_its_budget(strategy, ranks):
    rows = on_ranks(ranks, costs_in_an_interval, strategy)[0]
    left_out = (*explain.OF_MODEL, "AgreedStop.poll")
    numbers = explain.total(rows["dist_amp"], but=left_out)
    numbers["calls"] -= explain.total(rows["by hand"], but=left_out)["calls"]
    above = {
        kind: (numbers[kind], most)
        for kind, most in BUDGETS[strategy, ranks].items()
        if numbers[kind] > most
    }
    assert above == {}, explain.table_of(rows["dist_amp"], rows["by hand"])
