"""The recipe of an LSTM on a CPU that emulates bf16."""

import re
import textwrap

import torch
from conftest import ROOT
from tiny import Rows, take_steps

from dist_amp.config import native_precision as native
from dist_amp.config.load import load_config
from dist_amp.run import build_run


def test_the_lstm_that_the_recipes_show_trains_in_float32_where_bf16_is_emulated(monkeypatch):
    page = (ROOT / "docs/recipes.md").read_text()
    (example,) = re.findall(r"(?s)## Train an LSTM on a CPU\n\n```py\n(.*?)```", page)
    exec(textwrap.dedent(example), shown := {"F": torch.nn.functional, "nn": torch.nn})
    methods = {name: shown[name] for name in ("build_model", "loss_sum")}
    rows = Rows(x=torch.randn(16, 5, 8), y=torch.zeros(16, 5, 1))
    methods |= {"build_dataset": lambda self, split: rows, "weight": lambda self, batch: 8}
    monkeypatch.setattr(native, "cpu_slowdown", lambda dtype: 30)
    native.cpu_dtype.cache_clear()
    for words in ([], ["--use_amp", "false"]):
        config = load_config(["--run.device", "cpu", "--run.dir", "unused", *words], environ={})
        run = build_run(config, task=type("Shown", (), methods)())
        (report,) = take_steps(run, 1)
        assert (run.precision.name, bool(report.losses[0].isfinite())) == ("fp32", True)
    native.cpu_dtype.cache_clear()
