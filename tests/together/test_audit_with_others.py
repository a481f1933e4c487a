"""What test_audit.py tests, with other features."""

import json

from ranks import on_ranks
from test_audit import EACH, EXACT, FP32

from dist_amp import train

FAULTY = '''
import os
from tiny import Tiny


class Faulty(Tiny):
    """The first layer of rank 1 is wrong by one bit in step 7, from a hook on its output."""

    steps = 0

    def build_model(self):
        model = super().build_model()
        model[0].register_forward_hook(self.flip)
        return model

    def flip(self, module, inputs, output):
        if self.steps == 6 and os.environ["RANK"] == "1":
            output = output.clone()
            output.view(-1)[:1] += 2**-12
        return output

    def on_step(self, run, report):
        self.steps = run.step
'''


def test_the_main_job_ends_with_status_70_before_the_update_and_names_the_rank(launch, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = [*EXACT, *EACH, *FP32, "--parallel.strategy", "fsdp", "--run.device", "cpu"]
    words += ["--task.target", "faulty.py:Faulty", "--run.dir", "run", "--checkpoint.every", 2]
    done = launch.each(2, *words)
    assert [one.returncode for one in done] == [70, 70]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["cause"].startswith("audit of step 7, micro-batch ")
    assert "ranks [0] against ranks [1], each with the same result twice" in summary["cause"]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())[-1].endswith("6")


def fingerprinted(world, folder):
    words = ["--task.target", "tiny:Tiny", "--parallel.bit_exact", "true", "--run.dir", folder]
    words += ["--train.global_batch_size", "8", "--train.micro_batch_size", "2"]
    words += ["--train.steps", "4", "--debug.audit_every", "1", "--metrics.fingerprint", "1"]
    return train.main([*words, "--eval.every", "off", "--use_amp", "false"])


def test_an_audit_and_fingerprints_watch_the_same_step(tmp_path):
    assert on_ranks(2, fingerprinted, str(tmp_path / "run")) == [0, 0]
