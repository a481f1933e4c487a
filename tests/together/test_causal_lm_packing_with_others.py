"""What test_causal_lm_packing.py tests, with other features."""

import pytest
import torch
from tiny import make_run, take_steps

from dist_amp.supervise.callbacks import train_metrics
from dist_amp.world import World


@pytest.mark.usefixtures("own_cache")
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
