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
from dist_amp.scaling import compile as compiling
from dist_amp.scaling.compile import check_compile, pick_compile
from dist_amp.settings import CompileConfig
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
def test_auto_says_why_it_compiles_nothing_on_a_gpu(task, words, said, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    config = load_config(words, environ={})
    assert pick_compile(config, "single", task, task.build_model(), GPU).blocks is False
    out = capsys.readouterr().out
    assert out.startswith("compile.blocks=auto: nothing is compiled, because ")
    assert re.search(said, out)


@pytest.mark.bad_input("activation checkpointing of more blocks than the model has, or of none")
@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), [*FULL[:1], 4], "=4 is more than the model's 2 blocks; use 1 to 2, or"),
        (ONE_LAYER, FULL, "=full: the model has no blocks; add `def blocks(self, model)` to the"),
        (Tiny(), ["--compile.mode", "fast"], "=fast on the command line must be 'default', "),
    ],
)
def test_settings_of_blocks_that_cannot_be_are_refused(task, words, said):
    assert said in message_of(64, make_run, World(), task, *words)


@pytest.mark.bad_input("inductor without a C or C++ compiler, Python's headers, or Triton on a GPU")
@pytest.mark.bad_input("CUDA graphs (`compile.mode`) with parameters that FSDP gathers")
@pytest.mark.parametrize(
    ("there", "world", "strategy", "mode", "said"),
    [
        ("triton clang Python.h", GPU, "single", "default", ""),
        ("clang Python.h", GPU, "single", "default", "needs Triton, a C compiler (gcc or clang)"),
        ("triton Python.h", GPU, "single", "default", "needs Triton, a C compiler (gcc or clang)"),
        ("triton gcc", GPU, "single", "default", "/Python.h (Debian: python3-dev); install it"),
        ("", World(), "single", "default", "compile.mode=default needs a C++ compiler on a CPU"),
        ("g++", World(), "fsdp", "reduce-overhead", "replays CUDA graphs, which need par"),
    ],
)
def test_what_compiled_code_needs_is_checked_before_the_first_step(
    there, world, strategy, mode, said, monkeypatch, tmp_path
):
    there = there.split()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    if "Python.h" in there:
        (tmp_path / "Python.h").touch()
    arguments = CompileConfig(blocks=True, mode=mode), strategy, 1, world
    if said:
        assert said in message_of(64, check_compile, *arguments)
    else:
        check_compile(*arguments)


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
