"""The dtype report shows what autocast did: per module, per costly operation, and in the loss."""

import pytest
import torch
from tiny import Tiny
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.verify.dtypes import dtype_report
from dist_amp.world import World

TINY_GPT = "--task.args.width 16 --task.args.context 8 --task.args.layers 3"


def report(words="", task=None):
    return dtype_report(load_config(words.split(), environ={}), World(), task)


def row(report, path):
    return next(row for row in report.rows if row.path == path)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("def sum(a, b): return a + b\n" * 200)
    return f"{TINY_GPT} --train.micro_batch_size 2 --data.path {folder}/a.txt"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_and_attention_are_in_half_precision_and_norms_and_loss_in_float32(gpt, dtype):
    seen = report(f"{gpt} --precision.dtype {dtype}")
    assert row(seen, "embedding")[2:] == ("int64", "fp32", "fp32", "fp32")
    assert row(seen, "blocks.1.up")[1:] == ("Linear", "fp32", "fp32", dtype, dtype)
    assert row(seen, "blocks.2.attention")[4:] == (dtype, dtype)
    assert row(seen, "norm")[4] == "fp32"
    # The head computes the loss.
    assert row(seen, "head")[4:] == (dtype, "fp32")
    assert row(seen, "loss_sum")[1:] == ("the task", "int64", "-", "-", "fp32")
    assert len(seen.costly) == 3 * 5 + 1  # four matrices and attention per block, and the head
    assert not seen.in_float32
    assert f"autocast to {dtype} on cpu" in seen.text
    about = f"All 16 costly operations (products, convolutions, attention) run in {dtype}"
    assert about in seen.text
    lines = seen.text.splitlines()
    assert max(map(len, lines)) <= 120
    shown = [line.split()[0] for line in lines[: lines.index(about + ".")] if line]
    assert shown.count("blocks.*.attention.qkv") == 1, (
        "equal rows of numbered blocks are shown once"
    )


def test_without_mixed_precision_all_is_float32_by_request(gpt):
    seen = report(f"{gpt} --use_amp false")
    assert {row.computed for row in seen.rows if row[0] != "loss_sum"} == {"fp32"}
    assert not seen.in_float32
    assert "precision.use_amp=false: all is computed in float32, by request" in seen.text
    assert "costly" not in seen.text


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
    (product,) = seen.in_float32
    assert (product.path, product.name, product.operands) == ("head", "addmm", "fp32 x fp32")
    assert "1 of 3 costly operations:\n  head (Linear): addmm fp32 x fp32" in seen.text
    assert "autocast(enabled=False)" in seen.text
    assert row(seen, "body").inputs == "fp32 bf16", "called twice"


def test_the_report_says_whether_a_sharded_run_casts_by_policy():
    assert "FSDP's policy" in report("--parallel.strategy fsdp", Tiny()).text
    for words in ("fsdp --precision.cast_by autocast", "ddp"):
        assert "FSDP's policy" not in report(f"--parallel.strategy {words}", Tiny()).text
