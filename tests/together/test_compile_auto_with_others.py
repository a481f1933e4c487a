"""What test_compile_auto.py tests, with other features."""

import re
from functools import partial

import pytest
import test_compile_auto
import tiny_hf
import torch
import torch._dynamo
from conftest import ROOT
from test_compile_auto import (
    nothing_compiled_yet,  # noqa: F401
    picked,
)
from tiny import Tiny, make_run, take_steps
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from dist_amp.errors import ConfigError
from dist_amp.supervise.explain import explain_error
from dist_amp.supervise.lifecycle import Job
from dist_amp.world import World

# Fixtures.
compiler = test_compile_auto.compiler

EAGER = ["--compile.blocks", "true", "--compile.mode", "eager"]


class Penalty(Tiny):
    def loss_sum(self, model, batch):
        x = batch["x"].requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return super().loss_sum(model, batch) + slope.square().sum()


@pytest.mark.bad_input("a loss that differentiates twice, with compiled blocks")
def test_a_loss_that_differentiates_compiled_blocks_twice_is_told_to_leave_them_as_they_are():
    words = ["--compile.blocks", "true", "--compile.mode", "aot_eager"]
    run = make_run(World(), Penalty(), *words, "--use_amp", "false")
    with pytest.raises(RuntimeError) as error:
        take_steps(run, 1)
    explained = explain_error(error.value, Job(run.config, run.world, run=run))
    assert isinstance(explained, ConfigError)
    assert str(explained).startswith("rank 0: the loss differentiates twice (create_graph)")
    assert str(explained).endswith("use compile.blocks=false")


class OneLayer(Tiny):
    def build_model(self):
        return nn.Linear(8, 1)


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), ["--parallel.bit_exact", "true"], "what another machine compiles may round"),
        (Tiny(), ["--debug.detect_anomaly", "true"], "names operations, not compiled code"),
        (OneLayer(), [], "the model has no blocks"),
    ],
)
def test_auto_says_why_it_compiles_nothing_on_a_gpu(task, words, said, compiler, capsys):
    assert picked(*words, task=task) is False
    out = capsys.readouterr().out
    assert out.startswith("compile.blocks=auto: nothing is compiled, because ")
    assert re.search(said, out)


def breaks(*words):
    """Reasons of graph breaks in two steps, but for the loss's call of the model."""
    counters.clear()
    take_steps(make_run(World(), None, *EAGER, *words), 2)
    return [why for why in counters["graph_break"] if "torch.compiler.disable" not in why]


def language_model(folder, family, pack):
    more = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "llama": {}, "mistral": {}}
    config = AutoConfig.for_model(family, **tiny_hf.LLAMA, **more.get(family, {"head_dim": 8}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    rows = [{"text": "ab" * (1 + n % 9)} for n in range(64)]
    return ["dist_amp.tasks.hf_causal_lm:HFCausalLM", "--data.pack", pack], rows


def classifier(folder):
    tiny_hf.make_model(folder, "bert")
    rows = [{"text": "ab" * (1 + n % 9), "label": n % 2} for n in range(64)]
    return ["dist_amp.tasks.hf_classification:HFClassification", "--task.args.classes", 2], rows


def preference(folder):
    tiny_hf.make_model(folder, "llama")
    row = {"prompt": "say", "chosen": "abab", "rejected": "ba"}
    return [f"{ROOT}/examples/preference.py:DPO"], [row] * 64


QUICK = [("llama", "best_fit"), ("gpt2", "off"), ("gemma", "off")]
SLOW = [("qwen3", "best_fit"), ("mistral", "off"), ("gpt2", "best_fit"), ("gemma", "best_fit")]
MAKERS = [
    *(pytest.param(partial(language_model, family=f, pack=p), id=f"{f}-{p}") for f, p in QUICK),
    *(
        pytest.param(
            partial(language_model, family=f, pack=p), id=f"{f}-{p}", marks=pytest.mark.slow
        )
        for f, p in SLOW
    ),
    classifier,
    preference,
]


@pytest.mark.parametrize("make", MAKERS)
def test_the_tasks_of_transformers_have_no_graph_break(make, tmp_path, capsys):
    target, rows = make(tmp_path / "model")
    tiny_hf.make_tokenizer(tmp_path / "model")
    path = tiny_hf.write_rows(tmp_path / "rows.jsonl", rows)
    words = ["--task.target", *target, "--task.args.model", tmp_path / "model"]
    words += ["--data.path", path]
    assert breaks(*words, "--task.args.length", 32) == []
    assert "is not one graph" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "target",
    [
        f"{ROOT}/examples/sinusoid.py:Sinusoid",
        "dist_amp.tasks.image_classification:ImageClassification",
        "dist_amp.tasks.causal_lm:CausalLM",
    ],
)
def test_the_shipped_tasks_have_no_graph_break(target, capsys):
    assert breaks("--task.target", target) == []
    assert "is not one graph" not in capsys.readouterr().err
