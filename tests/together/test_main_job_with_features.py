"""The main job, as a process, with features that look at how it goes on and ends."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from test_security import ADDRESS, SECRETS
from test_train import TINY
from tiny import Tiny
from torch.utils.data import default_collate

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError
from dist_amp.telemetry.startup import FAILED_AT, PHASES


def target(task):
    return ["--task.target", f"{__name__}:{task.__name__}", "--run.dir", "run"]


class Faulty(Tiny):
    """The loss of rank 1 is wrong by a few bits in step 7."""

    steps = 0

    def loss_sum(self, model, batch):
        is_wrong = self.steps == 6 and os.environ["RANK"] == "1"
        return super().loss_sum(model, batch) * (1 + 2**-12 * is_wrong)

    def on_step(self, run, report):
        self.steps = run.step


def test_an_audit_ends_the_job_with_status_70_before_the_update(launch, tmp_path):
    words = "--parallel.bit_exact true --train.global_batch_size 8 --use_amp false --eval.every off"
    words += " --train.micro_batch_size 2 --debug.audit_every 1 --parallel.strategy fsdp"
    words += " --run.device cpu --checkpoint.every 2"
    done = launch.each(2, *target(Faulty), *words.split())
    assert [one.returncode for one in done] == [70, 70]
    cause = json.loads((tmp_path / "run/summary.json").read_text())["cause"]
    assert cause.startswith("audit of step 7, micro-batch ")
    assert "can't be told: no result has a majority" in cause
    assert max(path.name for path in (tmp_path / "run/checkpoints").iterdir()).endswith("6")


class Ends(Tiny):
    def on_step(self, run, report):
        how = os.environ.get(f"AT_{run.step}")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "error":
            raise RuntimeError("planted")


def test_an_evaluation_that_two_resumes_repeat_is_logged_once(launch):
    def evaluated():
        lines = (launch.folder / "run/metrics.jsonl").read_text().splitlines()
        return [line["step"] for line in map(json.loads, lines) if "eval/loss" in line]

    words = (*target(Ends), *"--metrics.log_every 1 --eval.every 2".split())
    words += ("--checkpoint.every", 4, "--train.steps", 4)
    assert launch(0, *words, AT_2="signal").returncode == 75  # saved before its evaluation
    assert launch(0, *words, AT_3="error").returncode == 65
    assert evaluated() == [2]
    assert launch(0, *words).returncode == 0
    assert evaluated() == [2, 4]


class Secretive(Tiny):
    def __init__(self, address: str, token: str = "", fails: bool = False):
        super().__init__()
        self.address = address
        self.fails = fails

    def on_step(self, run, report):
        if self.fails:
            raise OSError(f"GET {self.address} failed with {{'secret': 'hunter2'}}")


@pytest.mark.bad_input("a password, token or signed address in a setting or variable")
@pytest.mark.bad_input("a masked secret of a run's config.toml in a task's argument")
def test_a_run_writes_and_prints_no_secret_and_never_uses_a_masked_one(launch):
    words = [*TINY, *target(Secretive), "--task.args.address", ADDRESS, "--data.path", ADDRESS]
    words += ["--task.args.token", "hf_secret", "--checkpoint.every", "2"]
    words += ["--optim.schedule", "constant", "--train.steps"]
    environ = {"HF_HUB_X": "hunter2", "LOCAL_DSN": "postgres://u:hunter2@h"}
    first = launch(0, *words, "2", **environ)
    assert "s3://***@bucket/x" in first.stderr  # the warning that nothing reads data.path
    fails = ("--task.args.fails", "true", "--run.allow_config_change", "true")
    failed = launch(0, *words, "4", *fails, **environ)
    assert "OSError: GET s3://***@bucket/x" in failed.stderr
    again = launch(0, *words, "4", **environ)
    assert "resumed from step 2" in again.stdout, again.stderr
    printed = launch(0, *words, "4", "--print_config")
    contents = {path: path.read_bytes() for path in (launch.folder / "run").rglob("*.*")}
    for number, done in enumerate((first, failed, again, printed)):
        contents[number] = f"{done.stdout}{done.stderr}".encode()
    for name, content in contents.items():
        assert [secret for secret in SECRETS if secret.encode() in content] == [], name
    assert b"s3://***@bucket/x" in contents[launch.folder / "run/config.toml"]
    assert any("events.out" in str(name) for name in contents)
    with pytest.raises(ConfigError, match=r"task.args.address in .*config.toml is masked"):
        load_config(["--config", str(launch.folder / "run/config.toml")], {})


class Slow(Tiny):
    def build_model(self):
        time.sleep(0.2)
        return super().build_model()

    def collate(self, samples):
        time.sleep(0.02)
        return default_collate(samples)

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
    words = (
        *TINY,
        *target(Slow),
        *"--eval.every off --data.workers 0 --checkpoint.every 2".split(),
    )
    began = time.time()
    first = launch(0, *words, "--train.steps", 2)
    assert first.returncode == 0, first.stderr
    seconds = json.loads((tmp_path / "run/summary.json").read_text())["start_seconds"]
    assert list(seconds) == list(PHASES)
    assert seconds["processes"] == 0, "nothing has failed"
    assert seconds["model"] >= 0.2
    assert seconds["data"] >= 0.02
    assert seconds["first_step"] >= 0.1
    stepped = float((tmp_path / "stepped1").read_text())
    # The process is started before its first clock tick is known, to a hundredth of a second.
    assert 0 < sum(seconds.values()) <= stepped - began + 0.02

    second = launch(0, *words, "--train.steps", 4, **{FAILED_AT: str(time.time() - 100)})
    assert second.returncode == 0, second.stderr
    seconds = json.loads((tmp_path / "run/summary.json").read_text())["start_seconds"]
    assert 99.98 <= seconds["processes"] < 200, "to two ticks of the kernel's clock"
    assert seconds["restore"] >= 0.3
