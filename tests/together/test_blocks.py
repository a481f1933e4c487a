"""Compiled blocks, recomputed blocks and a loss in chunks give the same gradients."""

from functools import cache
from itertools import product

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from byte_model import (
    BF16,
    COMPILED,
    EVERY_SECOND,
    FP32,
    FULL,
    SELECTIVE,
    Bytes,
    bytes_run,
    nothing_compiled_yet,  # noqa: F401
)
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps
from torch import nn

from benchmarks.activations import kept_and_flops
from dist_amp.diagnostics.nonfinite_replay import find_nonfinite
from dist_amp.scaling.compile import stance
from dist_amp.step import loss_of
from dist_amp.verify.cells import capture
from dist_amp.verify.reference import relative_error
from dist_amp.world import World

LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2}
INDUCTOR = ["--compile.blocks", "true"]
TOKENS, CHUNK = 64, 20  # of a micro-batch; at a time: the last chunk is smaller


def gradients(world, task, words):
    """Two steps' unscaled gradients, whole, on rank 0."""
    run = bytes_run(world, task, *words)
    states = capture(run)
    take_steps(run, 2)
    return [state.gradients for state in states]


@cache
def plain_gradients(strategy, precision):
    words = ["--parallel.strategy", strategy, *precision]
    return on_ranks(LAYOUTS[strategy], gradients, Bytes(), words)[0]


def error(strategy, task, words):
    """How far a step's gradients are from those without the settings, relative to the largest."""
    precision = BF16 if BF16[1] in words else FP32
    words = ["--parallel.strategy", strategy, *words]
    changed = on_ranks(LAYOUTS[strategy], gradients, task, words, timeout_seconds=3600)[0]
    plain = plain_gradients(strategy, tuple(precision))
    return max(relative_error(mine, true) for mine, true in zip(changed, plain, strict=True))


# The same operations on the same numbers: what is recomputed, or traced and run by torch's kernels,
# is equal in its bits. A loss in chunks is the same sum in another order: some roundings of 2^-24.
SETTINGS = {
    "compiled": ("off", COMPILED, 0.0),
    "full": ("off", FULL, 0.0),
    "selective": ("off", SELECTIVE, 0.0),
    "selective_compiled": ("off", [*SELECTIVE, *COMPILED], 0.0),
    "chunked": (CHUNK, [], 1e-6),
    "all": (CHUNK, [*COMPILED, *EVERY_SECOND], 1e-6),
}
QUICK = [(name, FP32, "fsdp") for name in ("full", "selective", "chunked")]
QUICK.append(("all", FP32, "single"))
CELLS = product(SETTINGS, (FP32, BF16), ["fsdp"])
SLOW = [pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS if cell not in QUICK]


@pytest.mark.parametrize(("name", "precision", "strategy"), [*QUICK, *SLOW])
def test_each_setting_and_all_together_give_the_gradients_of_none(name, precision, strategy):
    chunk, words, bound = SETTINGS[name]
    if bound and precision is BF16:
        # The head's gradient is then a sum of one bf16 matrix per chunk, and each partial sum is
        # rounded by 2^-9 of it.
        bound = 2 * -(-TOKENS // CHUNK) * 2**-9
    assert error(strategy, Bytes(chunk), [*precision, *words]) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_inductors_code_gives_the_gradients_of_none(strategy):
    # Its kernels sum in another order, and fused ones keep float32 where bf16 would be rounded to
    # in between: in bf16 both are about as far from float32, so from one another at most twice as
    # far as plain bf16 is.
    words = [*INDUCTOR, *SELECTIVE]
    assert error(strategy, Bytes(), [*FP32, *words]) < 1e-6
    plain, truth = (plain_gradients(strategy, tuple(precision)) for precision in (BF16, FP32))
    bound = 2 * max(relative_error(a, b) for a, b in zip(plain, truth, strict=True))
    assert error(strategy, Bytes(), [*BF16, *words]) < bound < 0.05


class Normed(Tiny):
    """Batch statistics, which a forward that runs twice would gather twice, and dropout."""

    def build_model(self):
        blocks = [
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
            for _ in range(3)
        ]
        return nn.Sequential(*blocks, nn.Linear(8, 1))


def gradients_and_buffers(world, words):
    run = bytes_run(world, Normed(), "--parallel.strategy", "ddp", *FP32, *words)
    states = capture(run)
    take_steps(run, 2)
    return [state.gradients for state in states], dict(run.parallel.module.named_buffers())


@pytest.mark.parametrize("setting", [FULL, SELECTIVE], ids=["full", "selective"])
def test_batch_norm_gathers_its_statistics_once_and_gradients_are_those_of_none(setting):
    plain, mine = (on_ranks(2, gradients_and_buffers, words)[0] for words in ([], setting))
    torch.testing.assert_close(mine, plain, rtol=0, atol=0)  # the same operations


def test_selective_lies_between_full_and_none_in_memory_and_recomputes_hardly_any_arithmetic():
    none, half, selective, full = (
        kept_and_flops(bytes_run(World(), Bytes(layers=4), *BF16, *words))
        for words in ([], EVERY_SECOND, SELECTIVE, FULL)
    )
    assert full[0] < selective[0] < 0.75 * none[0]
    assert full[0] < half[0] < none[0]
    assert none[1] == selective[1] < half[1] < full[1]


def test_four_blocks_are_compiled_once_for_each_mode_and_shape():
    run = bytes_run(World(), Bytes(layers=4), *FULL, *COMPILED)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()

    def evaluate(batch):
        with run.parallel.evaluating():
            run.task.loss_sum(run.model, batch)

    def sample():
        with run.parallel.evaluating(), stance("eager_on_recompile"):
            run.task.sample_bytes = 10
            run.task.sample(run.parallel.module)

    batch = next(run.data)[0]
    few = {name: batch[name][:3] for name in ("input_ids", "labels")}
    counts = []
    for use in (
        lambda: take_steps(run, 3),
        lambda: evaluate(batch),
        lambda: evaluate(few),
        lambda: loss_of(run.task, run.model, few, run.world.device).backward(),
        lambda: (take_steps(run, 2), evaluate(batch), evaluate(few), sample()),
    ):
        use()
        counts.append(counters["unique_graphs"])
    # Two graphs each: a block, and the head that computes the loss.
    assert counts == [2, 4, 6, 8, 8]


class Branching(nn.Linear):
    """Not one graph: which way it goes depends on what is in a tensor."""

    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return super().forward(x)


class InParts(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), Branching(8, 8), Branching(8, 8), nn.Linear(8, 1))


@pytest.mark.bad_input("a block that is not one graph")
def test_a_block_that_is_not_one_graph_is_compiled_in_parts():
    plain, compiled = (
        take_steps(make_run(World(), InParts(), *FP32, *words), 2) for words in ([], COMPILED)
    )
    losses = [[float(report.loss_sum) for report in reports] for reports in (plain, compiled)]
    assert losses[0] == losses[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 3, "of four blocks in parts"


class Log(nn.Module):
    def forward(self, x):
        return x.log()


class LogOf(nn.Linear):
    """Its inside is where a negative number becomes nan."""

    def __init__(self):
        super().__init__(8, 8)
        self.inside = Log()

    def forward(self, x):
        return super().forward(self.inside(x))


class Spoilt(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), LogOf(), nn.Linear(8, 1))


def first_fault(world, words):
    run = make_run(world, Spoilt(), *FP32, *words)
    take_steps(run, 1)  # it is compiled by now
    with run.parallel.gradient_sync(True):
        return find_nonfinite(run, run.task, next(run.data)[0], torch.ones(()))


def test_a_replay_sees_into_compiled_and_recomputed_blocks():
    for fault in on_ranks(2, first_fault, ["--parallel.strategy", "fsdp", *COMPILED, *FULL]):
        assert (fault.phase, fault.module, fault.module_class) == ("forward", "1.inside", "Log")


class Shared(Tiny):
    """One layer used twice, and named twice."""

    def build_model(self):
        layer = nn.Linear(8, 8)
        return nn.Sequential(layer, layer, nn.Linear(8, 1))

    def blocks(self, model):
        return [model[0], model[1]]


class Misfit(Tiny):
    def loss_sum(self, model, batch):
        return F.mse_loss(model(batch["x"][:, :3]), batch["y"], reduction="sum")


def test_a_block_that_is_used_twice_is_wrapped_once_and_names_and_mistakes_stay_the_tasks():
    run = make_run(World(), Shared(), *FULL, *COMPILED)
    take_steps(run, 2)
    plain = make_run(World(), Shared())
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    assert str(run.model) == str(plain.model)
    once_each = run.model[0].forward.__wrapped__.__wrapped__  # compiled, and recomputed
    assert not hasattr(once_each, "__wrapped__")
    with pytest.raises(RuntimeError, match="same reduction dim"):
        take_steps(make_run(World(), Misfit(), *COMPILED), 1)


def test_cuda_graphs_leave_out_the_head_that_computes_the_loss():
    # A graph's results are overwritten by the next step, and losses are kept until a log step.
    words = ["--compile.blocks", "true", *FP32]
    graphs = bytes_run(World(), Bytes(), *words, "--compile.mode", "reduce-overhead")
    assert "forward" in vars(graphs.parallel.module.blocks[0])
    assert "forward" not in vars(graphs.parallel.module.head)
    assert "forward" in vars(bytes_run(World(), Bytes(), *words).parallel.module.head)
