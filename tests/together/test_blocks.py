"""Compiled and recomputed blocks and losses in chunks: equal gradients, and what is compiled."""

from functools import cache
from itertools import product

import pytest
import tiny_hf
import torch
import torch._dynamo
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
from messages import message_of
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps, variant
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.activations import kept_and_flops
from dist_amp.config.load import load_config
from dist_amp.diagnostics.nonfinite_replay import find_nonfinite
from dist_amp.scaling.compile import pick_compile, stance
from dist_amp.step import loss_of
from dist_amp.verify.cells import capture
from dist_amp.verify.reference import relative_error
from dist_amp.world import World

INDUCTOR = ["--compile.blocks", "true"]
TOKENS, CHUNK = 64, 20  # of a micro-batch; at a time: the last chunk is smaller


def gradients(world, task, words):
    """Two steps' unscaled gradients, whole, on rank 0."""
    run = bytes_run(world, task, *words)
    states = capture(run)
    take_steps(run, 2)
    return [state.gradients for state in states]


@cache
def gradients_of(strategy, *words, chunk="off"):
    run = Bytes(chunk), ["--parallel.strategy", strategy, *words]
    if strategy == "single":
        return gradients(World(), *run)
    return on_ranks(2, gradients, *run, timeout_seconds=3600)[0]


def error(a, b):
    """How far two runs' gradients are apart, relative to the largest."""
    return max(relative_error(mine, true) for mine, true in zip(a, b, strict=True))


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
QUICK = [("full", FP32, "ddp"), ("selective", FP32, "fsdp"), ("chunked", FP32, "fsdp")]
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
    changed = gradients_of(strategy, *precision, *words, chunk=chunk)
    assert error(changed, gradients_of(strategy, *precision)) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_inductors_code_gives_the_gradients_of_none(strategy):
    # Its kernels sum in another order, and fused ones keep float32 where bf16 would be rounded to
    # in between: in bf16 both are about as far from float32, so from one another at most twice as
    # far as plain bf16 is.
    truth, plain = (gradients_of(strategy, *precision) for precision in (FP32, BF16))
    fp32, bf16 = (
        gradients_of(strategy, *precision, *INDUCTOR, *SELECTIVE) for precision in (FP32, BF16)
    )
    assert error(fp32, truth) < 1e-6
    assert error(bf16, plain) < 2 * error(plain, truth) < 0.05


def test_selective_lies_between_full_and_none_in_memory_and_recomputes_hardly_any_arithmetic():
    none, half, selective, full = (
        kept_and_flops(bytes_run(World(), Bytes(layers=4), *BF16, *words))
        for words in ([], EVERY_SECOND, SELECTIVE, FULL)
    )
    assert full[0] < selective[0] < 0.75 * none[0]
    assert full[0] < half[0] < none[0]
    assert none[1] == selective[1] < half[1] < full[1]


def test_all_blocks_are_compiled_once_for_each_mode_and_shape():
    run = bytes_run(World(), Bytes(CHUNK), *FULL, *COMPILED)
    graphs = counters["stats"]
    graphs.clear()
    batch = next(run.data)[0]
    few = {name: batch[name][:3] for name in ("input_ids", "labels")}
    counts = []
    take_steps(run, 2)
    counts.append(graphs["unique_graphs"])
    for _ in range(2):
        for each in (batch, few):
            with run.parallel.evaluating():
                run.task.loss_sum(run.model, each)
            counts.append(graphs["unique_graphs"])
        loss_of(run.task, run.model, few, run.world.device).backward()
        counts.append(graphs["unique_graphs"])
    with run.parallel.evaluating(), stance("eager_on_recompile"):
        run.task.sample_bytes = 10
        run.task.sample(run.parallel.module)
    take_steps(run, 1)
    counts.append(graphs["unique_graphs"])
    # Two graphs each: a block, and the head that computes the loss in chunks.
    assert counts == [2, 4, 6, 8, 8, 8, 8, 8]


class Branching(nn.Linear):
    """Not one graph: which way it goes depends on what is in a tensor."""

    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return super().forward(x)


def with_branches():
    return nn.Sequential(nn.Linear(8, 8), Branching(8, 8), Branching(8, 8), nn.Linear(8, 1))


@pytest.mark.bad_input("a block that is not one graph")
def test_a_block_that_is_not_one_graph_is_compiled_in_parts():
    task = variant(build_model=with_branches)
    plain, compiled = (take_steps(make_run(World(), task, *FP32, *w), 2) for w in ([], COMPILED))
    losses = [[float(report.loss_sum) for report in reports] for reports in (plain, compiled)]
    assert losses[0] == losses[1]
    assert counters["stats"]["unique_graphs"] > 3, "of four blocks in parts"


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def with_a_log():
    """Inside its second block a negative number becomes nan."""
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(Log(), nn.Tanh()), nn.Linear(8, 1))


def test_a_replay_sees_into_compiled_and_recomputed_blocks():
    run = make_run(World(), variant(build_model=with_a_log), *FP32, *COMPILED, *FULL)
    take_steps(run, 1)  # it is compiled by now
    with run.parallel.gradient_sync(True):
        fault = find_nonfinite(run, run.task, next(run.data)[0], torch.ones(()))
    assert (fault.phase, fault.module, fault.module_class) == ("forward", "1.0", "Log")


def shared():
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, layer, nn.Linear(8, 1))


def test_a_block_that_is_used_twice_is_wrapped_once_and_names_and_mistakes_stay_the_tasks():
    task = variant(build_model=shared, blocks=lambda model: [model[0], model[1]])
    run = make_run(World(), task, *FULL, *COMPILED)
    take_steps(run, 2)
    plain = make_run(World(), task)
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    assert str(run.model) == str(plain.model)
    once_each = run.model[0].forward.__wrapped__.__wrapped__  # compiled, and recomputed
    assert not hasattr(once_each, "__wrapped__")
    misfit = variant(loss_sum=lambda model, batch: model(batch["x"][:, :3]).sum())
    with pytest.raises(RuntimeError, match="same reduction dim"):
        take_steps(make_run(World(), misfit, *COMPILED), 1)


def test_cuda_graphs_leave_out_the_head_that_computes_the_loss():
    # A graph's results are overwritten by the next step, and losses are kept until a log step.
    words = ["--compile.blocks", "true", *FP32]
    graphs = bytes_run(World(), Bytes(), *words, "--compile.mode", "reduce-overhead")
    assert "forward" in vars(graphs.parallel.module.blocks[0])
    assert "forward" not in vars(graphs.parallel.module.head)
    assert "forward" in vars(bytes_run(World(), Bytes(), *words).parallel.module.head)


GPU = World(device=torch.device("cuda", 0))
FP8 = ["--precision.dtype", "fp8"]
BIT_EXACT = ["--parallel.bit_exact", "true", "--train.global_batch_size", "8"]
ONE_LAYER = variant(build_model=lambda: nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), ["--parallel.bit_exact", "true"], "code compiled on another machine may round"),
        (Tiny(), ["--debug.detect_anomaly", "true"], "an operation inside compiled code"),
        (ONE_LAYER, [], "the model has no blocks"),
    ],
)
def test_auto_says_why_it_compiles_nothing_on_a_gpu(task, words, said, capsys):
    config = load_config(words, environ={})
    assert pick_compile(config, "single", task, task.build_model(), GPU).blocks is False
    out = capsys.readouterr().out
    assert out.startswith("compile.blocks=auto: nothing is compiled, because ")
    assert said in out


@pytest.mark.bad_input("`precision.dtype=fp8` in float32 or bit-exact")
@pytest.mark.bad_input("activation checkpointing of more blocks than the model has, or of none")
@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), [*FULL[:1], 4], "=4 needs 4 or more blocks, and the model has 2; use"),
        (ONE_LAYER, FULL, "=full needs 1 or more blocks, and the model has 0; use a lower"),
        (Tiny(), [*FP8, "--use_amp", "false"], "false computes in float32: use --use_amp true"),
        (Tiny(), [*FP8, *BIT_EXACT], "bit_exact=true does not allow precision.dtype=fp8: float8"),
    ],
)
def test_settings_that_do_not_fit_the_model_or_one_another_are_refused(task, words, said):
    assert said in message_of(64, make_run, World(), task, *words)


@pytest.mark.bad_input("CUDA graphs (`compile.mode`) with FSDP, or with several micro-batches")
@pytest.mark.parametrize(
    ("strategy", "words", "said"),
    [
        ("fsdp", [], "CUDA graphs, which need fixed addresses, and fsdp"),
        ("single", ["--train.accumulation_steps", 2], "which overwrite a micro-batch's gradients"),
        ("single", [], ""),
    ],
)
def test_cuda_graphs_of_what_moves_or_is_overwritten_are_refused(strategy, words, said):
    words = ["--compile.blocks", "true", "--compile.mode", "reduce-overhead", *map(str, words)]
    config = load_config(words, environ={})
    arguments = config, strategy, Tiny(), Tiny().build_model(), GPU
    if said:
        assert said in message_of(64, pick_compile, *arguments)
    else:
        assert pick_compile(*arguments) == config.compile


LANGUAGE = "dist_amp.tasks.hf_causal_lm:HFCausalLM"
CLASSES = "dist_amp.tasks.hf_classification:HFClassification"
SHIPPED = [
    ("dist_amp.tasks.image_classification:ImageClassification", "", []),
    ("dist_amp.tasks.causal_lm:CausalLM", "", []),
    (LANGUAGE, "llama", ["--data.pack", "best_fit"]),
    (LANGUAGE, "gpt2", ["--data.pack", "off"]),
    (CLASSES, "bert", ["--task.args.classes", 2]),
]


@pytest.mark.parametrize(("target", "family", "words"), SHIPPED)
def test_no_shipped_task_has_a_graph_break(target, family, words, tmp_path):
    if family:
        tiny_hf.make_tokenizer(tiny_hf.make_model(tmp_path, family))
        rows = [{"text": "ab" * (1 + n % 9), "label": n % 2} for n in range(64)]
        path = tiny_hf.write_rows(tmp_path / "rows.jsonl", rows)
        words = [*words, "--task.args.model", tmp_path, "--data.path", path]
        words += ["--task.args.length", 32]
    counters.clear()
    eager = ["--compile.blocks", "true", "--compile.mode", "eager"]
    take_steps(make_run(World(), None, *eager, "--task.target", target, *words), 2)
    # The loss's call of the model is one.
    breaks = [why for why in counters["graph_break"] if "torch.compiler.disable" not in why]
    assert breaks == []
