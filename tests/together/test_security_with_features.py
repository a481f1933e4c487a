"""Core as test_security.py tests it, with several features."""

import pytest
from test_security import ADDRESS, SECRETS
from test_train import TINY

TASK = """
import os
from tiny import Tiny

class Secretive(Tiny):
    def __init__(self, address: str, token: str = "", fails: bool = False):
        super().__init__()
        self.address = address
        self.fails = fails

    def on_step(self, run, report):
        if self.fails:
            raise OSError(f"GET {self.address} failed with {{'secret': 'hunter2'}}")
"""


@pytest.fixture
def secretive(launch):
    """Words of a run with secrets, in its folder."""
    (launch.folder / "secretive.py").write_text(TASK)
    words = ["--task.target", "secretive:Secretive", "--run.dir", "run"]
    steps = ["--checkpoint.every", "2", "--optim.schedule", "constant", "--data.path", ADDRESS]
    return [*TINY, *words, *steps]


def given(*words):
    return ["--task.args.address", ADDRESS, "--task.args.token", "hf_secret", *words]


def check_nothing_leaks(folder, *texts):
    contents = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    contents |= {f"screen {number}": text.encode() for number, text in enumerate(texts)}
    for name, content in contents.items():
        for secret in SECRETS:
            assert secret.encode() not in content, name
    assert b"s3://***@bucket/x" in contents["config.toml"]
    assert any(name.startswith("events.out") for name in contents)


@pytest.mark.bad_input("a password, token or signed address in a setting or variable")
def test_a_run_writes_and_prints_no_secret_and_resumes_with_them(launch, secretive, monkeypatch):
    environ = {
        "HF_HUB_X": "hunter2",
        "MASTER_PWD": "hunter2",
        "LOCAL_DSN": "postgres://u:hunter2@h",
    }
    first = launch(0, *secretive, *given("--train.steps", "2"), **environ)
    assert first.returncode == 0, first.stderr
    assert "s3://***@bucket/x" in first.stderr  # the warning that nothing reads data.path
    failed = launch(0, *secretive, *given("--train.steps", "4", "--task.args.fails", "true"))
    assert "resumed from step 2" not in failed.stdout  # another config: with all secrets masked
    assert "task.args.fails" in failed.stderr
    allowed = ("--run.allow_config_change", "true", "--task.args.fails", "true")
    failed = launch(0, *secretive, *given("--train.steps", "4", *allowed), **environ)
    assert "OSError: GET s3://***@bucket/x" in failed.stderr
    assert "OSError: GET s3://***@bucket/x" in (launch.folder / "run/summary.json").read_text()
    again = launch(0, *secretive, *given("--train.steps", "4"), **environ)
    assert again.returncode == 0, again.stderr
    assert "resumed from step 2" in again.stdout
    printed = launch(0, *secretive, *given("--print_config"))
    runs = (first, failed, again, printed)
    shown = [text for run in runs for text in (run.stdout, run.stderr)]
    check_nothing_leaks(launch.folder / "run", *shown)
