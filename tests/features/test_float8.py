"""Float8 matrix products (precision.dtype=fp8), emulated on CPUs: values, shards, checkpoints."""

import importlib.util
import re
import sys

import pytest
import torch
from messages import message_of
from tiny import Rows, Tiny, make_run
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.scaling.float8 import check_float8
from dist_amp.world import World

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
FP8 = ["--precision.dtype", "fp8"]


class Wide(Tiny):
    """Four blocks of 16: one has a hook, one a frozen weight, and two share theirs if tied."""

    def __init__(self, tied=False):
        super().__init__()
        self.tied = tied

    def build_model(self):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 1))
        model[1].register_forward_hook(lambda part, args, output: output * 1.0)
        model[2].requires_grad_(False)
        if self.tied:
            model[3].weight = model[0].weight
        return model

    def blocks(self, model):
        return list(model[:-1])

    def build_dataset(self, split):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        return Rows(x=x, y=x[:, :1], counts=torch.ones(64))


def test_layers_with_hooks_or_frozen_weights_stay_as_they_are():
    module = make_run(World(), Wide(), *FP8).parallel.module
    kinds = [type(part).__name__ for part in module]
    assert kinds == ["Float8Linear", "Linear", "Linear", "Float8Linear", "Linear"]


@pytest.mark.bad_input("`precision.dtype=fp8` for a model without a layer that it can convert")
@pytest.mark.bad_input("`precision.dtype=fp8` on a GPU without float8 tensor cores")
@pytest.mark.bad_input("`precision.dtype=fp8` without torchao")
def test_what_float8_lacks_is_refused_with_the_fix(monkeypatch):
    for task in (Tiny(), Wide(tied=True)):
        said = message_of(64, make_run, World(), task, *FP8)
        assert re.search("none of the . linear layers .* multiples of 16, and", said)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    a100 = World(device=torch.device("cuda", 0))
    said = message_of(64, check_float8, load_config(FP8, environ={}), a100)
    assert "needs compute capability 8.9 " in said
    assert "NVIDIA A100 has 8.0; or use precision.dtype=bf16" in said
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    said = message_of(64, make_run, World(), Wide(), *FP8)
    assert re.search(r"needs torchao .*: pip install torchao, or", said)
