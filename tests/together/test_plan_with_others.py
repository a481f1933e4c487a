"""What test_plan.py tests, with other features."""

import pytest
from ranks import on_ranks
from test_plan import SETTINGS, Medium, TiedWords, Uneven, planned  # noqa: F401 (a case names it)
from tiny import average_of, make_run
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.collectives import measure
from dist_amp.commands.imagined import ImaginedDevice
from dist_amp.step import train_step
from dist_amp.world import World, local


class Normed(Uneven):
    """A frozen layer, buffers, and batch statistics that FSDP2's policy can't cast."""

    def build_model(self):
        first, *blocks, head = super().build_model()
        return nn.Sequential(first.requires_grad_(False), *blocks, nn.BatchNorm1d(9), head)


class Deep(Medium):
    """Whose activations are most of what a step takes."""

    width = 64


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def real(world, task, words):
    """What this rank holds in a real run, and sends in a step: bytes; and its peaks by phase.

    Of the peaks, the least of ten steps: gloo's threads let go of what they have reduced a moment
    late, in some steps and not in others.
    """
    run = make_run(world, globals()[task](), *SETTINGS.split(), *words.split())
    batches = [next(run.data) for _ in range(3)]
    module = run.parallel.module
    averages = list(average_of(run).values())
    device = ImaginedDevice(None)
    for tensor in [*module.parameters(), *module.buffers(), *tree_leaves(batches[:1]), *averages]:
        device.count(local(tensor).untyped_storage())
    peaks = []
    with device.watched(), device:
        for micro_batches in batches * 4:
            device.forget()
            train_step(run, micro_batches)
            peaks.append(dict(device.peaks))
    gradients = []
    run.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(bytes_of(local(p.grad) for p in run.parallel.parameters))
    )
    sends = sum(times * one.sent for one, times in measure(run).items())
    moments = [v for values in run.optimizer.state.values() for v in values.values()]
    holds = {
        "parameters, buffers": bytes_of(map(local, [*module.parameters(), *module.buffers()])),
        "gradients": max(gradients),
        "optimizer state": bytes_of(map(local, moments)),
        "moving average": bytes_of(map(local, averages)),
    }
    phases = ("forward", "backward", "optimizer")
    return holds, sends, {phase: min(step[phase] for step in peaks[2:]) for phase in phases}


def real_cases(world, cases):
    return [real(world, task, words) for task, words in cases]


ACCUMULATES = "--train.accumulation_steps 3"
FP16 = "--precision.dtype fp16"
CASES = {
    "1": [("Uneven", ""), ("TiedWords", ""), ("Normed", ""), ("Deep", "")],
    "2": [
        ("Normed", f"ddp --optim.name sgd --optim.ema 0.9 {ACCUMULATES}"),
        ("Uneven", f"ddp --optim.name muon {FP16} --parallel.comm_dtype fp16"),
        ("Uneven", "fsdp --use_amp false --optim.ema 0.9"),
        ("Uneven", f"fsdp {FP16} {ACCUMULATES} --parallel.accumulate_reduce every"),
        ("TiedWords", f"fsdp {ACCUMULATES} --parallel.reduce_dtype bf16"),
        ("Uneven", f"fsdp --parallel.param_dtype bf16 --optim.ema 0.9 {ACCUMULATES}"),
        ("Normed", "fsdp --optim.name sgd"),
        ("Deep", "fsdp --parallel.activation_checkpointing full"),
    ],
    "2, more": [
        ("Normed", "ddp --use_amp false"),
        ("TiedWords", "ddp"),
        ("Uneven", "fsdp --optim.name muon --use_amp false"),
        ("Normed", f"fsdp {ACCUMULATES}"),
        ("Deep", "fsdp"),
    ],
    "4": [("TiedWords", "hsdp --parallel.param_dtype bf16"), ("Uneven", "hsdp --optim.name muon")],
}


@pytest.mark.parametrize("name", ["1", "2", pytest.param("2, more", marks=pytest.mark.slow), "4"])
def test_a_rank_holds_sends_and_allocates_what_was_planned(name):
    ranks = int(name[0])
    strategy = "--train.micro_batch_size 64 --parallel.strategy"
    cases = [(task, f"{strategy} {words or 'single'}") for task, words in CASES[name]]
    every_rank = on_ranks(ranks, real_cases, cases) if ranks > 1 else [real_cases(World(), cases)]
    for case, *of_ranks in zip(cases, *every_rank, strict=True):
        plan = planned(*case, ranks, module=__name__)
        holds, sends, peaks = zip(*of_ranks, strict=True)
        assert plan.memory == {name: max(one[name] for one in holds) for name in holds[0]}, case
        assert set(sends) == {plan.sent_bytes}, case
        for phase, peak in peaks[0].items():
            # The batches of all three steps, the metrics, and gloo's handles: a few KiB.
            assert plan.peaks[phase] == pytest.approx(peak, abs=24 * 512), (case, phase)
