"""Compiled by default on GPUs: what auto decides, graph breaks, and where the code is kept."""

import pytest
import torch
from byte_model import nothing_compiled_yet  # noqa: F401
from forked import TESTS
from tiny import Tiny, make_run, take_steps
from torch import nn
from torch._inductor import config as inductor

from dist_amp.config.load import load_config
from dist_amp.scaling import compile as compiling
from dist_amp.scaling.compile import pick_compile
from dist_amp.world import World

GPU = World(device=torch.device("cuda", 0))


def picked(*words, world=GPU):
    config = load_config(words, environ={})
    return pick_compile(config, "single", Tiny(), Tiny().build_model(), world).blocks


def test_blocks_are_compiled_on_a_gpu_and_not_on_a_cpu():
    assert picked() == "auto"
    assert picked("--compile.blocks", "dynamic") == "dynamic"
    assert picked("--compile.blocks", "false") is False
    assert picked(world=World()) is False


def losses(task, *words):
    return [float(report.loss_sum) for report in take_steps(make_run(World(), task, *words), 3)]


class Branch(nn.Linear):
    """Looks at its values, as a mixture of experts does."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum().item() > 0 else y.sin()


class Branches(Tiny):
    def build_model(self):
        return nn.Sequential(Branch(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))

    def blocks(self, model):
        return list(model[:2])


@pytest.mark.bad_input("a block that is not one graph, under auto")
@pytest.mark.bad_input("`compile.blocks=auto` without a compiler")
@pytest.mark.parametrize(
    ("task", "mode", "said"),
    [
        (Branches(), "eager", "Branch uncompiled: "),
        (Tiny(), "default", "Sequential uncompiled: InvalidCxxCompiler: No working"),
    ],
)
def test_a_block_that_can_not_be_compiled_runs_as_written_under_auto(
    monkeypatch, capsys, task, mode, said
):
    monkeypatch.setattr(compiling, "pick_compile", lambda config, *_: config.compile)  # as on a GPU
    plain = losses(task, "--compile.blocks", "false")
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert losses(task, "--compile.mode", mode) == plain
    assert capsys.readouterr().err.count(f"compile.blocks=auto runs {said}") == 1


@pytest.mark.slow
def test_a_resumed_run_finds_its_compiled_code_beside_the_runs(launch, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it
    words = ["--task.target", f"{TESTS}/tiny.py:Tiny", "--eval.every", "off", "--run.dir", "run"]
    words += ["--compile.blocks", "true", "--use_amp", "false", "--train.steps"]
    launch(0, *words, 2)
    cache = tmp_path / "compile_cache"
    compiled = sorted(cache.rglob("*.py"))
    assert compiled
    assert "resumed from step 2" in launch(0, *words, 4).stdout
    assert sorted(cache.rglob("*.py")) == compiled
