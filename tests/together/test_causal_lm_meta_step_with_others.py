"""What test_causal_lm_meta_step.py tests, with other features."""

import pytest
from test_causal_lm_meta_step import META, Text, batch_on_meta, meta_kernels
from tiny import make_run

from dist_amp.step import train_step
from dist_amp.world import World

OPTIMIZERS = ("adamw", "sgd", "muon")
PRECISIONS = ("fp32", "bf16", "fp16")
CLIPS = ("norm", "value", "off")


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_reads_nothing_from_the_device(optimizer, precision, clip):
    words = ["--optim.name", optimizer, "--train.clip_by", clip]
    words += ["--optim.ema", 0.99, "--train.accumulation_steps", 2]
    words += ["--use_amp", "false"] if precision == "fp32" else ["--precision.dtype", precision]
    with meta_kernels():
        run = make_run(World(device=META), Text(loss_chunk=100), *map(str, words))
        if optimizer == "muon":
            for group in run.optimizer.param_groups:
                group["fused"] = True  # on meta it is not, for dist_amp.plan
        for _ in range(2):
            report = train_step(run, [batch_on_meta(), batch_on_meta()])
            run.metrics.record(report)
    assert report.norm.device == META
