"""What a start costs, by phase, from the failure before it to the end of the first step."""

import json
import time
from pathlib import Path

from test_train import TINY
from tiny import Rows, Tiny

from dist_amp.telemetry.startup import FAILED_AT, PHASES


class SlowRows(Rows):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class Slow(Tiny):
    def build_model(self):
        time.sleep(0.2)
        return super().build_model()

    def build_dataset(self, split):
        return SlowRows(**super().build_dataset(split).columns)

    def load_state_dict(self, state):
        time.sleep(0.3)

    def state_dict(self):
        return {}

    def loss_sum(self, model, batch):
        time.sleep(0.1)
        return super().loss_sum(model, batch)

    def on_step(self, run, report):
        Path(f"stepped{run.step}").write_text(str(time.time()))


def test_each_phase_of_a_start_and_of_a_resume_has_its_time_and_they_add_up(launch, tmp_path):
    words = (*TINY, "--task.target", f"{__name__}:Slow", "--run.dir", "run", "--eval.every", "off")
    words += ("--data.workers", 0, "--checkpoint.every", 2)
    began = time.time()
    first = launch(0, *words, "--train.steps", 2)
    assert first.returncode == 0, first.stderr
    seconds = json.loads((tmp_path / "run/summary.json").read_text())["start_seconds"]
    assert list(seconds) == list(PHASES)
    assert seconds["processes"] == 0, "nothing has failed"
    assert seconds["model"] >= 0.2
    assert seconds["data"] >= 2 * 0.01
    assert seconds["first_step"] >= 0.1
    stepped = float((tmp_path / "stepped1").read_text())
    # The process is started before its first clock tick is known, to a hundredth of a second.
    assert 0 < sum(seconds.values()) <= stepped - began + 0.02

    again = {FAILED_AT: str(time.time() - 100)}
    second = launch(0, *words, "--train.steps", 4, **again)
    assert second.returncode == 0, second.stderr
    seconds = json.loads((tmp_path / "run/summary.json").read_text())["start_seconds"]
    assert 99.98 <= seconds["processes"] < 200, "to two ticks of the kernel's clock"
    assert seconds["restore"] >= 0.3
