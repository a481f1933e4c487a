"""What a forward and backward compute is recorded in every layout, and nothing is changed by it."""

from collections import Counter

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, parameters_of, take_steps, variant
from torch import nn

from dist_amp.diagnostics.trace import Event, Recorder, first_difference, hash_of, recorded_step
from dist_amp.world import World

KINDS = ("forward", "loss", "backward", "gradient", "op", "update")
FP32 = ["--use_amp", "false", "--train.micro_batch_size", 4, "--train.accumulation_steps", 2]
FULL = ["--parallel.activation_checkpointing", "full"]
COMPILED = ["--compile.blocks", "true", "--compile.mode", "eager"]


class Twice(nn.Module):
    """Calls a layer that it shares two times."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.shared(self.shared(x).tanh()))


def trace_of(world, task, kinds, *words):
    """(events of a step, the parameters after it)."""
    run = make_run(world, task, *FP32, *words)
    _, events = recorded_step(run, next(run.data), hash_of, kinds)
    for module in run.parallel.module.modules():
        assert not [hook for hook in module._forward_hooks.values() if "Recorder" in str(hook)]
    return events, parameters_of(run)


def test_each_call_of_a_module_is_an_event_in_order_and_the_step_has_the_bits_of_an_ordinary_one():
    events, parameters = trace_of(World(), variant(build_model=Twice), KINDS)
    first = [event for event in events if event.micro_batch < 1 and event.kind != "op"]
    order = list(dict.fromkeys(event.kind for event in first))
    assert order == ["forward", "loss", "backward", "gradient"]
    names = ["head.bias", "head.weight", "shared.bias", "shared.weight"]
    assert [event.name for event in events if event.kind == "update"] == names
    assert sorted(event.name for event in first if event.kind == "gradient") == names
    calls = [event.module for event in first if event.kind == "forward"]
    assert calls == ["shared", "shared", "head", ""]
    products = [event.module for event in events if event.name == "aten.addmm"]
    assert products == ["shared", "shared", "head"] * 2
    assert Counter(event.kind for event in events)["loss"] == 2
    only_here = Event("forward", "another", values=1)
    assert first_difference([only_here, *events], events) is None
    run = make_run(World(), variant(build_model=Twice), *FP32)
    take_steps(run, 1)
    torch.testing.assert_close(parameters_of(run), parameters, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ranks", "strategy", "plain"), [(1, "single", "single"), (4, "hsdp", "ddp")]
)
def test_sharded_and_recomputed_modules_have_the_events_of_whole_ones(ranks, strategy, plain):
    """Gradients are those of a rank's micro-batch before they are reduced, and so the same."""
    kinds = ("forward", "loss", "gradient")
    expected = on_ranks(ranks, trace_of, Tiny(), kinds, "--parallel.strategy", plain)
    found = on_ranks(ranks, trace_of, Tiny(), kinds, "--parallel.strategy", strategy, *FULL)
    for (events, _), (events_here, _) in zip(expected, found, strict=True):
        assert len(events) == len(events_here) == 2 * (8 + 1 + 6)
        assert first_difference(events, events_here) is None
        assert first_difference(events_here, events) is None


def test_a_compiled_block_is_one_call_and_stays_compiled(capsys):
    events, _ = trace_of(World(), Tiny(), ("forward", "gradient"), *COMPILED)
    names = [event.module for event in events if event.kind == "forward" and not event.micro_batch]
    assert names == ["0", "1", "2", ""]
    assert sum(event.kind == "gradient" for event in events) == 2 * 6
    assert "compiled in parts" not in capsys.readouterr().err


def test_a_model_of_more_modules_than_python_may_recurse_is_recorded():
    model = nn.Sequential(nn.Linear(8, 1), *[nn.Tanh() for _ in range(3_000)])
    batch = {"x": torch.ones(4, 8), "y": torch.zeros(4), "counts": torch.ones(4)}
    with Recorder(Tiny(), model, len, ("forward", "backward", "gradient")) as recorder:
        recorder.loss_sum(model, batch).backward()
    counts = Counter(event.kind for event in recorder.events)
    assert (counts["forward"], counts["gradient"]) == (3_002, 2)
    assert counts["backward"] > 3_000
