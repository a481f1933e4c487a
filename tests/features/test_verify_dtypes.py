"""The dtype report shows what autocast did: per module, per costly operation, and in the loss."""

import re

import pytest
import torch
from tiny import Tiny
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.verify.dtypes import dtype_report
from dist_amp.world import World


def report(words="", task=None):
    return dtype_report(load_config(words.split(), environ={}), World(), task)


def row(text, path):
    """The cells of a module's row: class, inputs, weights, computed in, outputs."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{path} ")]
    return re.split(" {2,}", line.strip())[1:]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("def sum(a, b): return a + b\n" * 200)
    model = "--task.args.width 16 --task.args.context 8 --task.args.layers 3"
    return f"{model} --train.micro_batch_size 2 --data.path {folder}/a.txt"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_and_attention_are_in_half_precision_and_norms_and_loss_in_float32(gpt, dtype):
    seen = report(f"{gpt} --precision.dtype {dtype}")
    assert row(seen, "embedding") == ["Embedding", "int64", "fp32", "fp32", "fp32"]
    assert row(seen, "blocks.*.up") == ["Linear", "fp32", "fp32", dtype, dtype]
    assert row(seen, "blocks.*.attention")[3:] == [dtype, dtype]
    assert row(seen, "norm")[3] == "fp32"
    # The head computes the loss.
    assert row(seen, "head")[3:] == [dtype, "fp32"]
    assert f"autocast to {dtype} on cpu" in seen
    # Four matrices and attention per block, and the head.
    about = f"All 16 costly operations (products, convolutions, attention) run in {dtype}"
    assert about in seen
    assert max(map(len, seen.splitlines())) <= 120


def test_without_mixed_precision_all_is_float32_by_request(gpt):
    seen = report(f"{gpt} --use_amp false")
    assert "precision.use_amp=false: all is computed in float32, by request" in seen
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
    task = Tiny()
    task.build_model = Careful
    seen = report("--precision.dtype bf16", task=task)
    assert "1 of 3 costly operations:\n  head: addmm in fp32\n" in seen
    assert "autocast(enabled=False)" in seen
    assert row(seen, "body")[1] == "fp32 bf16", "called twice"
