"""No secret is written or printed, a checkpoint runs no code, and one machine listens locally."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
from ranks import on_ranks
from tiny import Tiny, make_run, save, seal_again, take_steps

from dist_amp.checkpoint.format import CONFIG
from dist_amp.config.load import load_config
from dist_amp.config.text import command_line, flat, to_toml
from dist_amp.errors import Failure, masked
from dist_amp.world import World

SECRETS = ("hunter2", "sl/ash", "c0ffee", "AKIA1234", "hf_secret")
ADDRESS = "s3://AKIA1234:sl/ash@bucket/x?X-Amz-Signature=c0ffee&versionId=7"
MASKED_ADDRESS = "s3://***@bucket/x?X-Amz-Signature=***&versionId=7"


PLAIN = (
    "hf://datasets/user/name@main/**/*.parquet",
    "user/name:config@v1.0",
    "http://host:8080/a@b",
    "https://h/a?config=x&design=y&versionId=7",
    "unexpected token: 'x'",
    "data.path=corpus/*.jsonl, me@example.org",
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (ADDRESS, MASKED_ADDRESS),
        ("postgres://me:hunter2@db:5432/x", "postgres://***@db:5432/x"),
        ("https://hf_secret@host/a", "https://***@host/a"),
        ("s3://u:p@ss@bucket/a, s3://u:p@b", "s3://***@bucket/a, s3://***@b"),
        ("zip://*.csv::https://u:p@h/a.zip", "zip://*.csv::https://***@h/a.zip"),
        ("https://h/a?sv=1&sig=c0ffee&se=2", "https://h/a?sv=1&sig=***&se=2"),
        ("https://h/a?token=hf_secret", "https://h/a?token=***"),
        ("{'key': 'AKIA', 'secret': 'hunter2'}", "{'key': 'AKIA', 'secret': '***'}"),
        ('connect(password="hunter2")', 'connect(password="***")'),
        *((text, text) for text in PLAIN),
    ],
)
def test_secrets_in_a_text_are_masked_and_a_text_without_any_stays(text, shown):
    assert masked(text) == shown
    assert masked(shown) == shown
    assert str(Failure(text)) == shown


def test_a_config_is_written_without_secrets_and_keeps_what_only_looks_like_one():
    kept = {"image_key": "a", "pad_token": "<pad>", "tokenizer": "bytes", "steps": 3}
    secret = dict.fromkeys(("token", "hf_token", "api_key", "db_password", "aws_secret"), 'x"y')
    table = tomli_w.dumps({**kept, **secret, "path": [ADDRESS]})
    assert flat(table) == kept | dict.fromkeys(secret, "***") | {"path": [MASKED_ADDRESS]}
    config = to_toml(load_config(["--data.path", ADDRESS], {}))
    assert not [secret for secret in SECRETS if secret in config]


def test_a_command_line_is_shown_without_secrets():
    words = ["--task.args.hf-token", "x y", "--task.args.api_key=z z", "--task.args.pad_token", "p"]
    shown = command_line([*words, "--data.path", ADDRESS])
    expected = "--task.args.hf-token '***' '--task.args.api_key=***' --task.args.pad_token p"
    assert shown == f"{expected} --data.path '{MASKED_ADDRESS}'"


HOSTILE = "from pathlib import Path\nPath({!r}).touch()\nfrom tiny import Tiny as Task\n"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """make(target, *paths): a run whose config names the target, with code at these paths in it."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    words = ("--run.dir", str(tmp_path / "runs/mine"), "--train.steps", "10")
    run = make_run(World(), Tiny(), *words)
    take_steps(run, 2)
    save(run)
    ran = tmp_path / "ran"

    def make(target, *paths):
        checkpoint, exported = run.folder / "checkpoints/step_00000002", run.folder / "exported"
        exported.mkdir()
        (exported / "model.safetensors").touch()
        for folder in (checkpoint, exported, run.folder):
            (folder / CONFIG).write_text(f'[task]\ntarget = "{target}"\n')
        seal_again(checkpoint)
        for path in paths:
            file = run.folder / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(HOSTILE.format(str(ran)))
        return run.folder

    yield make
    assert not ran.exists(), "its code has run"


def listening(pid):
    """The addresses at which a process listens, as /proc/net/tcp has them."""
    sockets = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(handle))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                addresses.append(fields[1].partition(":")[0])
    return addresses


def _listens(world):
    return listening(os.getpid())


def test_ranks_at_a_loopback_address_listen_there_alone():
    for addresses in on_ranks(2, _listens):
        assert set(addresses) <= {"0100007F"}
