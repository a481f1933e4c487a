"""`verify` passes on models that were not written for it: Hugging Face's, experts, LoRA ..."""

import itertools
import re

import families
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from tiny import Rows, Tiny
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell
from dist_amp.verify.findings import inspect_task
from dist_amp.verify.reference import Reference, stay_in_evaluation_mode

SAMPLES = 250  # five steps of 48

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SMALL = {**WIDTHS, "vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 16}


class Causal:
    """Next tokens; a model of transformers, built from its config without the network."""

    def __init__(self, kind, config, **settings):
        self.kind = kind
        self.config = config
        self.settings = settings

    def build_model(self):
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, self.kind)(getattr(transformers, self.config)(**self.settings))

    def batch_of(self, generator):
        return {"input_ids": torch.randint(3, 64, (SAMPLES, 8), generator=generator)}

    def build_dataset(self, split):
        return Rows(**self.batch_of(torch.Generator().manual_seed(0))) if split == "train" else None

    def loss_sum(self, model, batch):
        ids = batch["input_ids"]
        logits = model(input_ids=ids).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    def weight(self, batch):
        return batch["input_ids"][:, 1:].numel()


class LibrarysLoss(Causal):
    """Weights the library's own loss, a mean over the labels that are not -100."""

    def loss_sum(self, model, batch):
        return model(**batch).loss * self.weight(batch)

    def weight(self, batch):
        return (batch["labels"] != -100).sum()


class Images(LibrarysLoss):
    def batch_of(self, generator):
        images = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
        return {
            "pixel_values": images,
            "labels": torch.randint(0, 3, (SAMPLES,), generator=generator),
        }


class FrozenStatistics(Images):
    """Batch norm that stays in evaluation mode, as for fine-tuning."""

    def build_model(self):
        model = super().build_model()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                stay_in_evaluation_mode(module)
        return model


class Seq2Seq(LibrarysLoss):
    def batch_of(self, generator):
        labels = torch.randint(3, 64, (SAMPLES, 6), generator=generator)
        labels[torch.arange(6) >= torch.randint(2, 7, (SAMPLES, 1), generator=generator)] = -100
        return {**super().batch_of(generator), "labels": labels}


class Lora(Causal):
    """A frozen base in bf16 and adapters that train."""

    def build_model(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(super().build_model().bfloat16(), config)


class Mixture(nn.Module):
    """A block that sends each token to one of its experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6))

    def forward(self, x):
        share, chosen = self.router(x).float().softmax(-1).max(-1)
        out = x.clone()
        for number in chosen.unique().tolist():
            mine = chosen == number
            values = self.experts[number](x[mine]) * share[mine, None]
            out[mine] += values.to(out.dtype)
        return out


class Experts(Tiny):
    """Experts in ModuleLists, of which a micro-batch leaves some idle."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), Mixture(), Mixture(), nn.Linear(16, 1))

    def blocks(self, model):
        return [model[1], model[2]]


class SkippingExperts(Experts):
    ranks_skip_blocks = True


class LastBit(nn.Module):
    """Doubles where a weight's last bit is 1: the smallest drift has an effect."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * self.weight * (1 + (self.weight.detach().view(torch.int32) & 1))


class Brittle(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), LastBit(), nn.Tanh(), nn.Linear(8, 1))


MIXTRAL = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [2, 2, 2, 2]}
RESNET18 = {**STAGES, "embedding_size": 8, "layer_type": "basic", "num_labels": 3}

TASKS = {
    "tied_llama": Causal("LlamaForCausalLM", "LlamaConfig", **SMALL, tie_word_embeddings=True),
    "t5": Seq2Seq("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0),
    "mixtral": Causal("MixtralForCausalLM", "MixtralConfig", **MIXTRAL),
    "experts": Experts(samples=SAMPLES),
    "skipping_experts": SkippingExperts(samples=SAMPLES),
    "resnet": FrozenStatistics("ResNetForImageClassification", "ResNetConfig", **RESNET18),
    "resnet_train": Images("ResNetForImageClassification", "ResNetConfig", **RESNET18),
    "brittle": Brittle(samples=SAMPLES),
    "lora": Lora("LlamaForCausalLM", "LlamaConfig", **SMALL),
}


def proof(world, name, strategies, precisions, optimizers):
    """(notes besides dropout, classes in evaluation mode, what is wrong with each cell)."""
    reference = Reference(load_config([], environ={}), world.device, TASKS[name])
    findings = inspect_task(reference)
    assert not any(finding.fails for finding in findings)
    notes = [finding.text for finding in findings if "dropout is off" not in finding.text]
    causes = {}
    for cell in itertools.product(strategies, precisions, optimizers):
        if cause := check_cell(world, reference, Cell(*cell)).cause:
            causes[cell] = cause
    return notes, reference.task.eval_classes, causes


# Brittle: a drift of one rounding error in the parameters flips a ReLU, a max-pool or a router.
@pytest.mark.parametrize("name", ["tied_llama", "mixtral", "resnet", "lora", "brittle"])
def test_nothing_is_held_against_a_sound_model_whose_steps_on_two_ranks_are_those_of_one(name):
    assert on_ranks(2, proof, name, ["fsdp"], ["fp32"], ["adamw"])[0] == ([], frozenset(), {})


def test_experts_that_no_sample_reached_are_a_note():
    (text,), classes, causes = on_ranks(2, proof, "experts", ["ddp", "fsdp"], ["fp32"], ["sgd"])[0]
    pattern = r"\d\.experts\.\d\.0\.weight \(\d+ such\) gets no gradient from 8 samples"
    assert re.match(pattern, text)
    assert not classes
    assert causes == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", TASKS)
def test_every_strategy_and_precision_passes(name, ranks):
    strategies = ["ddp", "fsdp", "hsdp"] if ranks > 1 else ["single"]
    precisions = ["fp32", "bf16", "fp16"]
    if name == "brittle":
        precisions = ["fp32"]  # a cast weight has another last bit
    if name == "experts":
        precisions = ["fp32"]  # a policy refuses those idle in some micro-batches, but for skipping
    cells = strategies, precisions, ["sgd", "adamw"]
    assert on_ranks(ranks, proof, name, *cells, timeout_seconds=900)[0][2] == {}


# ---- families of models ----

FAMILIES = [name for name in families.TASKS if name not in families.FAILS]


def outcome(world, name, strategies, precisions):
    """(findings that fail, notes, {cell: what is wrong}, {cell: why it is refused}) of a family."""
    reference = Reference(load_config([], environ={}), world.device, families.build(name))
    findings = inspect_task(reference)
    fails = [finding.text for finding in findings if finding.fails]
    notes = [finding.text for finding in findings if not finding.fails]
    causes = {}
    refused = {}
    for strategy, precision in itertools.product([] if fails else strategies, precisions):
        try:
            cause = check_cell(world, reference, Cell(strategy, precision, "adamw")).cause
        except (ConfigError, DataError) as error:
            refused[strategy, precision] = str(error)
            continue
        if cause:
            causes[strategy, precision] = cause
    return fails, notes, causes, refused


def is_usual(note):
    """Whether a note is about dropout, or about parameters that the samples do not reach."""
    return "dropout is off" in note or "gets no gradient" in note


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_of_models_raises_a_false_alarm(name, ranks):
    pytest.importorskip("transformers")
    strategies = ["ddp", "fsdp"] if ranks > 1 else ["single"]
    precisions = ["fp32", "bf16"]
    if name in families.ALSO_IN_FP16:
        precisions.append("fp16")
    words = name, strategies, precisions
    fails, notes, causes, refused = on_ranks(ranks, outcome, *words, timeout_seconds=300)[0]
    assert fails == []
    assert causes == {}
    expected = families.NOTES.get(name, [])
    unusual = [note for note in notes if not is_usual(note)]
    assert len(unusual) == len(expected)
    for note, words in zip(unusual, expected, strict=True):
        assert words in note
    rule = families.REFUSED.get(name, "") if ranks > 1 else ""
    assert set(refused) == {("fsdp", precision) for precision in precisions[1:] if rule}
    assert all(rule in why for why in refused.values())


@pytest.mark.parametrize("name", families.FAILS)
def test_a_loss_that_is_random_or_no_sum_fails_once_with_its_cause_and_a_remedy(name):
    if name.startswith("mixtral"):
        pytest.importorskip("transformers")
    fails, notes, _, _ = on_ranks(1, outcome, name, [], [])[0]
    (text,) = fails
    for words in families.FAILS[name]:
        assert words in text
    assert [note for note in notes if not is_usual(note)] == []
