"""`python -m dist_amp.verify` checks a task on this machine, and names what is wrong with it."""

import itertools
import os
import re
import sys
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import families
import pytest
import torch
import torch.nn.functional as F
from byte_model import Bytes
from conftest import ROOT
from ranks import on_ranks
from test_strangers import Mixture
from tiny import Tiny, variant
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_amp import train
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.verify import __main__ as verify_main
from dist_amp.verify import cells
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell, Verdict, gradient_fault
from dist_amp.verify.dtypes import dtype_report
from dist_amp.verify.findings import WrongTask, inspect_task
from dist_amp.verify.reference import Reference
from dist_amp.world import World


@pytest.fixture
def verify(monkeypatch, capfd):
    """verify(words): (status, output, errors) of the command here; its ranks are forked."""
    ranks = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(cells, "spawn", ranks)

    def run(words):
        capfd.readouterr()
        return verify_main.main(words.split()), *capfd.readouterr()

    return run


def results_in(output):
    return re.findall(r"^ +\d+  \w+ +\w+ .* (pass|FAIL|refused)$", output, re.MULTILINE)


@pytest.mark.slow
def test_verify_proves_the_readmes_task(verify, tmp_path):
    task = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "my_file.py").write_text(task)
    status, output, errors = verify(
        f"--task.target {tmp_path}/my_file.py:TinyRegression --world_sizes 1,2"
    )
    assert status == 0, output + errors
    assert results_in(output) == ["pass"] * 12


class Faulty(Tiny):
    """Right in one process; DDP breaks on a rank, FSDP is refused, HSDP has half the gradients."""

    def loss_sum(self, model, batch):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward")
        if os.environ.get("RANK") == "1" and isinstance(model, DistributedDataParallel):
            raise RuntimeError("no luck on this rank")
        mesh = getattr(next(model.parameters()), "device_mesh", None)
        if mesh is not None and mesh.ndim == 1:
            raise ConfigError("no units for this one; use ddp")
        loss = super().loss_sum(model, batch)
        return loss if mesh is None else loss.detach() / 2 + loss / 2


FAULTY = "--task.target test_verify:Faulty --task.args.samples 300 --precisions"
PASSED = "compute the steps of one process with the whole batch"


@pytest.mark.bad_input("`verify` of a task that fails on one rank, or is refused, by its strategy")
@pytest.mark.bad_input("`verify` in a precision that plain torch can't compute on this device")
def test_each_row_has_its_result_and_its_cause_stands_below_the_table(verify):
    status, output, errors = verify(f"{FAULTY} fp32,bf16 --world_sizes 1,2")
    assert results_in(output) == ["pass", "FAIL", "refused", "FAIL"], output + errors
    assert status == 1
    assert f"\nfailed: 1 of 4 {PASSED}, 1 refused, as in training (" in output
    for cause in (
        r"2 ddp fp32:\n    rank 1: RuntimeError: no luck on this rank \(test_verify.py, line",
        r"2 fsdp fp32:\n    no units for this one; use ddp\n\n",
        r"2 hsdp fp32:\n.*all .* 0.5 times what they should be; .* by the number of ranks twice",
        r"note     bf16 is skipped: plain torch can't compute this task in it on this device \(cou",
    ):
        assert len(re.findall(cause, output)) == 1, output
    assert "Traceback" not in output + errors


def test_a_factor_of_one_has_no_mistake():
    reference = SimpleNamespace(bound=lambda precision: 0.01)
    states = [SimpleNamespace(gradients={"w": torch.tensor([1.015, 1.015])})]
    record = SimpleNamespace(
        cell=Cell("single", "fp32"), ranks=1, states=states, reference=reference
    )
    text = gradient_fault(record, 0, {"w": torch.ones(2)})
    assert text.endswith(": all of them are 1.015 times what they should be")


REFUSED = "refused: use ddp"


@pytest.mark.parametrize(
    ("words", "results", "status", "said"),
    [
        ("fp32", [[Verdict()], REFUSED, REFUSED], 0, f"passed: 1 of 3 {PASSED}, 2 refused, as in"),
        ("fp32", [REFUSED] * 3, 1, f"failed: 0 of 3 {PASSED}, 3 refused, as in"),
        ("bf16", [], 1, f"failed: 0 of 0 {PASSED} ("),
    ],
)
def test_what_is_refused_or_skipped_does_not_fail_while_a_row_passes_and_a_cause_is_said_once(
    verify, monkeypatch, words, results, status, said
):
    monkeypatch.setattr(
        cells, "results_on_ranks", lambda _, rows, __: zip(rows, results, strict=True)
    )
    ended, output, _ = verify(f"{FAULTY} {words} --world_sizes 2")
    assert ended == status, output
    assert f"\n{said}" in output
    refused = ["2 ddp fp32"] * (results == [REFUSED] * 3) + ["2 fsdp fp32", "2 hsdp fp32"]
    assert output.count(f"\n{', '.join(refused)}:\n    use ddp\n") == bool(results)


SINGLE, THREE = (1, "single"), [(3, "ddp"), (3, "fsdp")]


@pytest.mark.parametrize(
    ("device", "strategies", "note"),
    [
        ("cpu", [SINGLE, *THREE, (4, "ddp"), (4, "fsdp"), (4, "hsdp")], ""),
        ("cuda", [SINGLE, *THREE], "note     4 ranks are skipped: there are 3 GPUs\n"),
    ],
)
def test_each_number_of_ranks_has_its_strategies_and_each_rank_a_gpu(
    monkeypatch, capsys, device, strategies, note
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    options, _ = verify_main.parse(["--world_sizes", "4,3,1", "--precisions", "fp32"])
    rows = verify_main.rows_of(options, torch.device(device))
    assert [row[:2] for row in rows] == strategies
    assert capsys.readouterr().out == note


# ---- findings: problems of the task itself ----


def reference_of(task, *words):
    return Reference(load_config(list(words), environ={}), torch.device("cpu"), task)


def inspected(reference):
    """(the notes on a task, what is wrong with it)."""
    notes = []
    try:
        notes.extend(inspect_task(reference))
    except WrongTask as error:
        return notes, str(error)
    return notes, ""


def made(**parts):
    """Tiny, long enough to compare, with other methods: made(loss_sum=squares)."""
    return variant(samples=300, **parts)


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def applies(function):
    """A task whose model does this in its middle."""
    return made(
        build_model=lambda: nn.Sequential(nn.Linear(8, 8), Layer(function), nn.Linear(8, 1))
    )


def squares(model, batch):
    return (model(batch["x"]).float().squeeze(-1) - batch["y"]).pow(2)


class Recurrent(nn.LSTM):
    """A root that draws random numbers itself, by an argument of torch's layer."""

    def forward(self, x):
        return super().forward(x[:, None])[0].squeeze(1)


def recurrent():
    return Recurrent(8, 1, num_layers=2, dropout=0.5, batch_first=True)


def in_half(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"].bfloat16()).pow(2).sum().float()


def noise_of_the_system(module, x):
    return x + torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).float()


def faintly_balanced(model, batch):
    """A term of the whole batch that changes the loss by less than rounding would."""
    output = model(batch["x"]).float().squeeze(-1)
    balance = output.mean() - output.mean().detach()
    return squares(model, batch).sum() + 0.01 * len(output) * balance * output.mean().detach()


def scaled():
    """Its loss has a parameter of the task itself, which nothing trains."""
    task = made(loss_sum=lambda m, b: squares(m, b).sum() * task.temperature)
    task.temperature = nn.Parameter(torch.ones(()))
    return task


COUPLED = r"1 \(Layer\): the result depends on the whole batch \(batch stat.*, such as group norm"
NO_TERMS = "it must be a sum over samples, without terms of the whole batch, such as a mixture's"


@pytest.mark.bad_input(
    "`verify` of a task that can't be compared: random, a mean, coupled, untrained"
)
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (applies(lambda _, x: x - x.mean(0)), COUPLED),
        (applies(noise_of_the_system), r"1 \(Layer\) is not deterministic: two identical runs"),
        (made(loss_sum=lambda m, b: squares(m, b).mean()), "a sum over samples, not a mean"),
        (made(loss_sum=lambda m, b: squares(m, b).sum() * (1 + b["x"].mean() ** 2)), NO_TERMS),
        (made(loss_sum=faintly_balanced), NO_TERMS),
        (scaled(), "task's attribute temperature holds 1 trainable parameters that are not in"),
        (made(loss_sum=in_half), "loss is computed in half precision"),
        (made(weight=lambda batch: 1), "weight of 8 samples is 1, but its halves add up to 2"),
        *(
            (families.TASKS[name](), ".*".join(map(re.escape, words)))
            for name, words in families.FAILS.items()
        ),
    ],
)
def test_a_wrong_task_fails_with_the_rule_that_it_breaks_and_a_remedy(task, said):
    if isinstance(task, families.OfTransformers):
        pytest.importorskip("transformers")
    _, text = inspected(reference_of(task))
    assert re.search(said, text), text


class Drawn(Tiny):
    """Samples and augmentations are drawn at random, and collate takes the samples apart."""

    def build_dataset(self, split):
        return [{"x": torch.rand(8)} for _ in range(300)]

    def augment(self, sample, rng):
        return {"x": sample["x"] + torch.rand(8, generator=rng)}

    def collate(self, samples):
        return torch.stack([sample.pop("x") for sample in samples])


def test_samples_are_the_same_in_every_process_and_on_every_reading():
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        reference = reference_of(Drawn())
        batches += [reference.batch([3, 4]), reference.batch([3, 4])]
    assert all(torch.equal(batch, batches[0]) for batch in batches)


def test_a_wrong_task_is_not_compared(verify):
    status, output, _ = verify("--task.target tiny:AlwaysNan --task.args.samples 300")
    assert status == 1
    assert "\nfail     loss or gradients of the first samples are not finite in float32" in output
    assert output.endswith("as one process would; fix the task first\n")


class Noted(Tiny):
    def build_model(self):
        dropout = Layer(lambda self, x: F.dropout(x, 0.5, self.training))
        moded = Layer(lambda self, x: x * (1 + self.training))
        # As from_pretrained returns it, in evaluation mode.
        trunk = nn.Sequential(nn.Linear(8, 8), moded).eval()
        norms = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Dropout())
        return nn.Sequential(trunk, norms, dropout, nn.Linear(8, 1))

    def optimizer(self, groups, lr):
        raise AssertionError("not to be called")

    def schedule(self, step):
        return 0.0


@pytest.mark.parametrize(
    ("task", "said"),
    [
        # Weight decay must not make the comparison diverge where gradients are small.
        (made(loss_sum=lambda m, b: squares(m, b).sum() * 1e-4), []),
        (made(build_model=recurrent), [r"Recurrent \(1 such\): dropout is off for the compa"]),
        (families.Byol(), [r"forward changes target.0.weight \(3 such\): each micro-batch over"]),
        (made(build_model=lambda: Tiny().build_model().bfloat16()), []),
        (
            Noted(samples=300),
            [
                r"not compared: the task's optimizer\(\) and schedule\(\); the steps",
                r"1.2 \(Dropout\) \(1 such\): dropout is off for the comparison$",
                r"1.0 \(BatchN.* depends on the whole batch.*d is compared in evaluation mode$",
                r"2 \(Layer\): .* drawn at random in training mode; every Layer is compared",
            ],
        ),
    ],
)
def test_a_sound_task_has_notes_at_most_and_its_steps_are_those_of_one_process(task, said):
    reference = reference_of(task)
    notes, failure = inspected(reference)
    assert failure == ""
    assert len(notes) == len(said), notes
    for words in said:
        assert any(re.match(words, note) for note in notes), notes
    # Batch statistics and dropout, which are off, would make it larger.
    assert reference.bound("fp32") < 1e-4
    for optimizer in ("adamw",) if said else ("sgd", "adamw"):
        assert check_cell(World(), reference, Cell("single", "fp32", optimizer)).cause == ""


def test_the_partial_step_of_an_epoch_is_compared_and_large_errors_are_judged_by_plain_torchs():
    reference = reference_of(made(), "--data.drop_last", "true")  # a run would drop that step
    assert check_cell(World(), reference, Cell("single", "fp32")).cause == ""
    reference._bounds["fp32"] = 1e-12
    verdict = check_cell(World(), reference, Cell("single", "fp32"))
    assert verdict.cause == ""
    assert verdict.gradient_error <= verdict.gradient_bound < 1e-4


def test_a_dataset_too_short_to_compare_is_rejected():
    rule = r"has 64 samples; .* takes 5 steps of 48 \(not the config.s\) = 240"
    with pytest.raises(DataError, match=rule):
        inspected(reference_of(Tiny(samples=64)))


@pytest.mark.bad_input("an output that nobody reads any more, as in `--help | head`")
@pytest.mark.parametrize("command", [train.main, verify_main.main])
def test_help_that_nobody_reads_to_its_end_ends_quietly(monkeypatch, capfd, command):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        with suppress(SystemExit):
            assert command(["--help"]) == 1
    assert capfd.readouterr().err == ""


# ---- models that were not written for it: Hugging Face's, experts, LoRA ...


class Lora(families.Language):
    """A frozen base in bf16 and adapters that train."""

    def build_model(self):
        import peft

        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(super().build_model().bfloat16(), config)


class LastBit(nn.Module):
    """Doubles where a weight's last bit is 1: the smallest drift has an effect, as at a ReLU."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * self.weight * (1 + (self.weight.detach().view(torch.int32) & 1))


class Brittle(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), LastBit(), nn.Tanh(), nn.Linear(8, 1))


LLAMA = ("Llama", "ForCausalLM")
OWN = {
    "tied_llama": lambda: families.Language(*LLAMA, **families.LANGUAGE, tie_word_embeddings=True),
    "experts": lambda: Mixture(samples=families.SAMPLES),  # some idle in each micro-batch
    "brittle": lambda: Brittle(samples=families.SAMPLES),
    "lora": lambda: Lora(*LLAMA, **families.LANGUAGE),
}
TASKS = families.TASKS | OWN


def outcome(world, name, strategies=(), precisions=(), optimizers=("adamw",)):
    """(what is wrong with the task, unusual notes, {cell: what is wrong}, {cell: its refusal})."""
    reference = Reference(load_config([], environ={}), world.device, TASKS[name]())
    notes, failure = inspected(reference)
    notes = [note for note in notes if "dropout is off" not in note]
    causes, refused = {}, {}
    for cell in itertools.product([] if failure else strategies, precisions, optimizers):
        try:
            if cause := check_cell(world, reference, Cell(*cell)).cause:
                causes[cell] = cause
        except (ConfigError, DataError) as error:
            refused[cell] = str(error)
    return failure, notes, causes, refused


def all_cells(name, ranks):
    """(strategies, precisions, optimizers) in which a model is tried."""
    strategies, precisions, optimizers = ["ddp", "fsdp"], ["fp32", "bf16"], ["adamw"]
    if name in OWN:
        strategies, optimizers = [*strategies, "hsdp"], ["sgd", "adamw"]
    if name in OWN or name in families.ALSO_IN_FP16:
        precisions.append("fp16")
    # A cast weight has another last bit; a policy refuses idle experts.
    if name in ("brittle", "experts"):
        precisions = ["fp32"]
    return (strategies if ranks > 1 else ["single"]), precisions, optimizers


SOUND = [name for name in TASKS if name not in families.FAILS]
EVERY = [(name, ranks, *all_cells(name, ranks)) for name in SOUND for ranks in (1, 2)]


# Brittle: a drift of one rounding error in the parameters flips a ReLU or a max-pool.
@pytest.mark.parametrize(
    ("name", "ranks", "strategies", "precisions", "optimizers"),
    [
        ("tied_llama", 1, ["single"], ["fp32"], ["adamw"]),
        ("brittle", 2, ["fsdp"], ["fp32"], ["adamw"]),
        ("experts", 2, ["fsdp"], ["fp32"], ["sgd"]),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY),
    ],
)
def test_no_sound_model_raises_a_false_alarm(name, ranks, strategies, precisions, optimizers):
    if name not in ("experts", "brittle"):
        pytest.importorskip("peft" if name == "lora" else "transformers")
    cells = strategies, precisions, optimizers
    results = on_ranks(ranks, outcome, name, *cells, timeout_seconds=900)
    failure, notes, causes, refused = results[0]
    assert (failure, causes, refused) == ("", {}, {})
    unused = [note for note in notes if "gets no gradient" in note]
    if name in ("tied_llama", "brittle", "experts"):
        assert ["experts.3" in note for note in unused] == [True] * (name == "experts")
    expected = families.NOTES.get(name, [])
    unusual = [note for note in notes if note not in unused]
    assert len(unusual) == len(expected), unusual
    for note, words in zip(unusual, expected, strict=True):
        assert words in note


# ---- the dtype report: what autocast did, per module, per costly operation, and in the loss


def report(words, task):
    return dtype_report(load_config(words.split(), environ={}), World(), task)


def row(text, path):
    """The cells of a module's row: class, inputs, weights, computed in, outputs."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{path} ")]
    return re.split(" {2,}", line.strip())[1:]


def test_products_and_attention_are_in_half_precision_and_norms_and_loss_in_float32():
    seen = report("--precision.dtype fp16", Bytes())
    assert row(seen, "embedding") == ["Embedding", "int64", "fp32", "fp32", "fp32"]
    assert row(seen, "blocks.*.up") == ["Linear", "fp32", "fp32", "fp16", "fp16"]
    assert row(seen, "blocks.*.attention")[3:] == ["fp16", "fp16"]
    assert row(seen, "norm")[3] == "fp32"
    assert row(seen, "head")[3:] == ["fp16", "fp32"], "it computes the loss"
    assert "autocast to fp16 on cpu" in seen
    # Four matrices and attention per block, and the head.
    assert "All 16 costly operations (products, convolutions, attention) run in fp16" in seen


def test_without_mixed_precision_all_is_float32_by_request():
    seen = report("--use_amp false", Bytes())
    assert "precision.use_amp=false: everything is computed in float32\n" in seen
    assert "bf16" not in seen
    assert "costly" not in seen


class Careful(nn.Module):
    """The user turned autocast off for one product."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.body(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


def test_a_product_where_autocast_is_off_is_flagged():
    seen = report("--precision.dtype bf16", variant(build_model=Careful))
    assert "1 of 3 costly operations:\n  head: addmm in fp32\n" in seen
    assert "autocast(enabled=False)" in seen
    assert row(seen, "body")[1] == "fp32 bf16", "called twice"
