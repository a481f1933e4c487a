"""Which blocks are compiled with other features' tasks and settings, and what that needs."""

import re

import pytest
import tiny_hf
import torch
from byte_model import FULL, nothing_compiled_yet  # noqa: F401
from conftest import ROOT
from messages import message_of
from tiny import Tiny, make_run, take_steps, variant
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from dist_amp.config.load import load_config
from dist_amp.scaling.compile import pick_compile
from dist_amp.world import World

GPU = World(device=torch.device("cuda", 0))


ONE_LAYER = variant(build_model=lambda: nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), ["--parallel.bit_exact", "true"], "what another machine compiles may round"),
        (Tiny(), ["--debug.detect_anomaly", "true"], "names operations, not compiled code"),
        (ONE_LAYER, [], "the model has no blocks"),
    ],
)
def test_auto_says_why_it_compiles_nothing_on_a_gpu(task, words, said, capsys):
    config = load_config(words, environ={})
    assert pick_compile(config, "single", task, task.build_model(), GPU).blocks is False
    out = capsys.readouterr().out
    assert out.startswith("compile.blocks=auto: nothing is compiled, because ")
    assert re.search(said, out)


@pytest.mark.bad_input("activation checkpointing of more blocks than the model has, or of none")
@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), [*FULL[:1], 4], "=4 needs 4 or more blocks, and the model has 2; use"),
        (ONE_LAYER, FULL, "=full needs 1 or more blocks, and the model has 0; use a lower"),
        (Tiny(), ["--compile.mode", "fast"], "=fast on the command line must be 'default', "),
    ],
)
def test_settings_of_blocks_that_cannot_be_are_refused(task, words, said):
    assert said in message_of(64, make_run, World(), task, *words)


@pytest.mark.bad_input("CUDA graphs (`compile.mode`) with parameters that FSDP gathers")
@pytest.mark.bad_input("CUDA graphs (`compile.mode`) with several micro-batches")
@pytest.mark.parametrize(
    ("strategy", "words", "said"),
    [
        ("fsdp", [], "CUDA graphs, which need fixed addresses, and fsdp"),
        ("single", ["--train.accumulation_steps", 2], "gradients the next of several micro"),
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
PREFERENCE = f"{ROOT}/examples/preference.py:DPO"
SHIPPED = [
    (f"{ROOT}/examples/sinusoid.py:Sinusoid", "", []),
    ("dist_amp.tasks.image_classification:ImageClassification", "", []),
    ("dist_amp.tasks.causal_lm:CausalLM", "", []),
    (LANGUAGE, "llama", ["--data.pack", "best_fit"]),
    (LANGUAGE, "gpt2", ["--data.pack", "off"]),
    (LANGUAGE, "gemma", ["--data.pack", "off"]),
    (CLASSES, "bert", ["--task.args.classes", 2]),
    (PREFERENCE, "llama", []),
]
SLOW = [(LANGUAGE, family, ["--data.pack", "best_fit"]) for family in ("qwen3", "gemma")]


@pytest.mark.parametrize(
    ("target", "family", "words"),
    [*SHIPPED, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_no_task_has_a_graph_break(target, family, words, tmp_path):
    if family in tiny_hf.MODELS:
        tiny_hf.make_model(tmp_path, family)
    elif family:
        config = AutoConfig.for_model(family, **tiny_hf.LLAMA, head_dim=8)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if family:
        tiny_hf.make_tokenizer(tmp_path)
        rows = [{"text": "ab" * (1 + n % 9), "label": n % 2} for n in range(64)]
        if target == PREFERENCE:
            rows = [{"prompt": "say", "chosen": "abab", "rejected": "ba"}] * 64
        path = tiny_hf.write_rows(tmp_path / "rows.jsonl", rows)
        words = [*words, "--task.args.model", tmp_path, "--data.path", path]
        words += ["--task.args.length", 32]
    counters.clear()
    eager = ["--compile.blocks", "true", "--compile.mode", "eager"]
    take_steps(make_run(World(), None, *eager, "--task.target", target, *words), 2)
    # The loss's call of the model is one.
    breaks = [why for why in counters["graph_break"] if "torch.compiler.disable" not in why]
    assert breaks == []
