"""What test_causal_lm_packing.py tests, with other features."""

import pytest
import torch
from messages import message_of
from tiny import make_run, take_steps

from dist_amp.config.load import load_config
from dist_amp.supervise.callbacks import train_metrics
from dist_amp.world import World

HF = "--task.target dist_amp.tasks.hf_causal_lm:HFCausalLM --task.args.model ."


@pytest.mark.parametrize("pack", ["off", "best_fit"])
def test_the_shipped_model_trains_on_rows_of_each_kind_and_its_shares_are_metrics(tmp_path, pack):
    rows = "".join(f'{{"text": "{"ab" * (5 + n // 2)}"}}\n' for n in range(60))
    (tmp_path / "texts.jsonl").write_text(rows)
    words = (
        "--task.args.context 31 --task.args.width 16 --task.args.heads 2 --task.args.layers 1 "
        f"--data.path {tmp_path}/texts.jsonl --use_amp false --data.pack {pack}"
    )
    run = make_run(World(), None, *words.split())
    (report,) = take_steps(run, 1)
    values = {name: float(value) for name, value in train_metrics(run, report).items()}
    batch = run.data.last_step[0][0]
    filled = batch["tokens"] / batch["labels"].numel()
    assert values["train/counted_pct"] == pytest.approx(100 * batch["counted"] / batch["tokens"])
    assert values["train/padding_pct"] == pytest.approx(100 - 100 * filled)
    assert torch.isfinite(report.losses[0])
    assert float(report.weight) == batch["counted"]
    assert ("position_ids" in batch) == (pack == "best_fit")


@pytest.mark.bad_input("`task.args.context 0`, or `task.args.length 1`")
@pytest.mark.bad_input("`task.args.pad_to_multiple_of` below 1")
@pytest.mark.parametrize(
    ("words", "least"),
    [
        ("--task.args.context 0", 1),
        (f"{HF} --task.args.length 1", 2),
        (f"{HF} --task.args.pad_to_multiple_of 0", 1),
    ],
)
def test_rows_that_are_too_short_are_refused(words, least):
    *_, key, value = words.split()
    text = message_of(64, load_config, words.split(), environ={})
    assert text.startswith(f"{key[2:]}={value} ")
    assert f"must be at least {least}" in text
