"""Compiled blocks, recomputed blocks and a loss in chunks give the same gradients."""

from contextlib import contextmanager
from functools import cache
from itertools import product
from unittest.mock import patch

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.diagnostics.nonfinite_replay import find_nonfinite
from dist_amp.errors import ConfigError
from dist_amp.scaling import compile as compiling
from dist_amp.scaling.compile import check_compile, stance
from dist_amp.settings import CompileConfig
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
    return on_ranks(
        LAYOUTS[strategy], gradients, Bytes(), ["--parallel.strategy", strategy, *precision]
    )[0]


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
    "every_second": ("off", EVERY_SECOND, 0.0),
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
@pytest.mark.parametrize(
    "more", [[], FULL, SELECTIVE], ids=["compiled", "and_recomputed", "and_in_part"]
)
def test_inductors_code_gives_the_gradients_of_none(strategy, more):
    # Its kernels sum in another order, and fused ones keep float32 where bf16 would be rounded to
    # in between: in bf16 both are about as far from float32, so from one another at most twice as
    # far as plain bf16 is.
    assert error(strategy, Bytes(), [*FP32, *INDUCTOR, *more]) < 1e-6
    plain, truth = (plain_gradients(strategy, tuple(precision)) for precision in (BF16, FP32))
    bound = 2 * max(relative_error(a, b) for a, b in zip(plain, truth, strict=True))
    assert error(strategy, Bytes(), [*BF16, *INDUCTOR, *more]) < bound < 0.05


def test_weights_that_are_not_tied_get_the_same_gradients_from_a_loss_in_chunks():
    plain, chunked = (
        gradients(World(), Bytes(chunk, tied=False), FP32) for chunk in ("off", CHUNK)
    )
    # Of the first step: after it, AdamW has divided each gradient by its size, and so enlarged the
    # roundings of those next to zero.
    assert relative_error(chunked[0], plain[0]) <= 1e-6


class Largest(TorchDispatchMode):
    """The most rows of logits that one tensor holds: of those with a vocabulary at the end."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (256,):
                self.rows = max(self.rows, tensor.numel() // 256)
        return out


@pytest.mark.parametrize(("chunk", "rows"), [("off", TOKENS), (CHUNK, CHUNK)])
def test_no_more_logits_than_a_chunks_exist_at_any_time(chunk, rows):
    run = bytes_run(World(), Bytes(chunk), *FP32)
    with Largest() as largest:
        take_steps(run, 1)
        with run.parallel.evaluating(), run.precision.autocast():
            run.task.metrics(run.model, next(run.data)[0])
    assert largest.rows == rows
    assert run.model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 256), "for a sample"


def test_names_stay_as_the_task_has_them():
    plain, changed = bytes_run(World(), Bytes()), bytes_run(World(), Bytes(), *FULL, *COMPILED)
    assert list(changed.model.state_dict()) == list(plain.model.state_dict())
    assert str(changed.model) == str(plain.model)


def compilations(world, words):
    """How many graphs there are after each use of the model."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    run = bytes_run(world, Bytes(layers=4), *words, *COMPILED)
    counts = []

    def evaluate(batch):
        with run.parallel.evaluating():
            run.task.loss_sum(run.model, batch)

    def sample():
        with run.parallel.evaluating(), stance("eager_on_recompile"):
            run.task.sample_bytes = 10
            run.task.sample(run.parallel.module)

    batch = next(run.data)[0]
    few = {name: batch[name][:3] for name in ("input_ids", "labels")}
    for use in (
        lambda: take_steps(run, 3),
        lambda: evaluate(batch),
        lambda: evaluate(few),
        lambda: loss_of(run.task, run.model, few, world.device).backward(),
        lambda: (take_steps(run, 2), evaluate(batch), evaluate(few), sample()),
    ):
        use()
        counts.append(counters["unique_graphs"])
    return counts


def test_four_blocks_are_compiled_once_for_each_mode_and_shape():
    # Two graphs: a block, and the head that computes the loss.
    assert compilations(World(), FULL) == [2, 4, 6, 8, 8]


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
    assert [report.loss_sum.item() for report in compiled] == [
        report.loss_sum.item() for report in plain
    ]
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


def refusal(task, *words, steps=0):
    with pytest.raises(ConfigError) as error:
        take_steps(make_run(World(), task, *words), steps)
    assert "\n" not in str(error.value)
    return str(error.value)


class NoBlocks(Tiny):
    def build_model(self):
        return nn.Linear(8, 1)


RECOMPUTE = "--parallel.activation_checkpointing"


@pytest.mark.bad_input(
    "activation checkpointing of more blocks than the model has, or of a model without blocks"
)
@pytest.mark.bad_input("an unknown `compile.mode`")
@pytest.mark.bad_input("a `loss_chunk` that is not a number of tokens")
@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Bytes(), [RECOMPUTE, 4], "=4 is more than the model's 3 blocks; use 1 to 3, or"),
        (NoBlocks(), FULL, "=full: the model has no blocks; add `def blocks(self, model)` to the"),
        (Tiny(), [RECOMPUTE, 0], "activation_checkpointing=0 on the command line must be"),
        (Tiny(), [RECOMPUTE, "half"], "must be a whole number or one of none, full, selective"),
        (Tiny(), ["--compile.mode", "fast"], "=fast on the command line must be one of default, "),
        (Tiny(), ["--compile.blocks", "maybe"], "must be true or false or one of auto, dynamic"),
        (None, ["--task.args.loss_chunk", 0], "must be at least 1 or one of auto, off"),
        (None, ["--task.args.loss_chunk", "none"], "must be a whole number or one of auto, off"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(task, words, said):
    assert said in refusal(task, *words)


@contextmanager
def compiled_by(backend):
    """A context in which torch.compile uses this backend."""
    real = torch.compile
    with patch.object(torch, "compile", lambda f, **more: real(f, **{**more, "backend": backend})):
        yield


@pytest.mark.bad_input("a block that the compiler's backend fails on")
def test_a_backend_that_fails_is_named_with_the_block():
    def fails(graph, inputs):
        raise ValueError("no kernel")

    with compiled_by(fails):
        said = refusal(Tiny(), *COMPILED, steps=1)
    assert "compile.mode=aot_eager can't compile 0: " in said
    assert "no kernel" in said


@pytest.mark.bad_input("inductor without a C++ compiler, or without Triton on a GPU")
def test_inductor_without_a_compiler_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pytest.raises(ConfigError, match="needs Triton on a GPU; install"):
        check_compile(CompileConfig(blocks=True), "single", 1, World(device=torch.device("cuda")))
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = refusal(Tiny(), *INDUCTOR)
    assert "compile.mode=default needs a C++ compiler on a CPU" in text
    assert "use compile.mode=aot_eager (no faster than without) or compile.blocks=false" in text


def test_blocks_compile_without_any_private_name(monkeypatch):
    monkeypatch.setattr(compiling, "private", lambda path, default: default)
    take_steps(make_run(World(), Tiny(), *COMPILED), 2)
    take_steps(make_run(World(), InParts(), *COMPILED), 2)


@pytest.mark.bad_input("CUDA graphs (`compile.mode`) with parameters that FSDP gathers")
def test_cuda_graphs_of_gathered_parameters_are_refused():
    with pytest.raises(ConfigError, match="replays CUDA graphs, .* fsdp gathers them anew"):
        check_compile(CompileConfig(blocks=True, mode="reduce-overhead"), "fsdp", 1, World())


def test_settings_without_effect_get_a_warning(capsys):
    make_run(World(), Tiny(), "--compile.mode", "max-autotune")
    check_compile(CompileConfig(blocks=True, mode="reduce-overhead"), "single", 1, World())
    make_run(World(), NoBlocks(), *COMPILED)
    out, err = capsys.readouterr()
    assert "compile.mode=max-autotune has no effect, since nothing is compiled: set comp" in err
    assert "compile.mode=reduce-overhead has no effect on a CPU" in err
    assert "compile.blocks: the whole model, which has no blocks, will be compiled" in out


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


def test_a_block_that_is_used_twice_is_wrapped_once_and_its_own_mistakes_are_its_own():
    run = make_run(World(), Shared(), *FULL, *COMPILED)
    take_steps(run, 2)
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
