"""`verify` passes on models that were not written for it: Hugging Face's, experts, LoRA ..."""

import itertools
import re

import families
import pytest
import torch
from ranks import on_ranks
from test_verify import inspected
from tiny import Tiny
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell
from dist_amp.verify.reference import Reference


class Lora(families.Language):
    """A frozen base in bf16 and adapters that train."""

    def build_model(self):
        import peft

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

    def __init__(self):
        super().__init__(samples=families.SAMPLES)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), Mixture(), Mixture(), nn.Linear(16, 1))

    def blocks(self, model):
        return [model[1], model[2]]


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
    "experts": Experts,
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


def skip_without_libraries(name):
    if name not in ("experts", "brittle"):
        pytest.importorskip("peft" if name == "lora" else "transformers")


IDLE = r"\d\.experts\.\d\.0\.weight \(\d+ such\) gets no gradient from 8 samples"


# Brittle: a drift of one rounding error in the parameters flips a ReLU, a max-pool or a router.
@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "optimizer", "expected"),
    [
        ("tied_llama", 1, "single", "adamw", []),
        ("brittle", 2, "fsdp", "adamw", []),
        ("experts", 2, "fsdp", "sgd", [IDLE]),
    ],
)
def test_nothing_but_idle_experts_is_said_of_sound_models_whose_steps_are_those_of_one_process(
    name, ranks, strategy, optimizer, expected
):
    skip_without_libraries(name)
    results = on_ranks(ranks, outcome, name, [strategy], ["fp32"], [optimizer])
    failure, notes, causes, refused = results[0]
    assert (failure, causes, refused) == ("", {}, {})
    assert len(notes) == len(expected)
    assert all(map(re.match, expected, notes))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [name for name in TASKS if name not in families.FAILS])
def test_no_model_raises_a_false_alarm_in_any_strategy_and_precision(name, ranks):
    skip_without_libraries(name)
    strategies, precisions, optimizers = ["ddp", "fsdp"], ["fp32", "bf16"], ["adamw"]
    if name in OWN:
        strategies, optimizers = [*strategies, "hsdp"], ["sgd", "adamw"]
    if name in OWN or name in families.ALSO_IN_FP16:
        precisions.append("fp16")
    # A cast weight has another last bit; a policy refuses idle experts.
    if name in ("brittle", "experts"):
        precisions = ["fp32"]
    if ranks == 1:
        strategies = ["single"]
    results = on_ranks(
        ranks, outcome, name, strategies, precisions, optimizers, timeout_seconds=900
    )
    failure, notes, causes, refused = results[0]
    assert (failure, causes) == ("", {})
    unusual = [note for note in notes if "gets no gradient" not in note]
    expected = families.NOTES.get(name, [])
    assert len(unusual) == len(expected), unusual
    for note, words in zip(unusual, expected, strict=True):
        assert words in note
    assert refused == {}


@pytest.mark.parametrize("name", families.FAILS)
def test_a_loss_that_is_random_or_no_sum_fails_once_with_its_cause_and_a_remedy(name):
    if name.startswith("mixtral"):
        pytest.importorskip("transformers")
    text, notes, _, _ = on_ranks(1, outcome, name)[0]
    assert all(words in text for words in families.FAILS[name])
    unusual = [note for note in notes if "gets no gradient" not in note]
    assert unusual == [] or name == "noisy", "which is first tried in evaluation mode"
