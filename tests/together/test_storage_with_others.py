"""What test_storage.py tests, with other features."""

import time
from pathlib import Path

import pytest
import test_storage
import torch
from safetensors.torch import load_file
from test_storage import address_of, damage, run

from dist_amp.commands import export, follow
from dist_amp.commands.board import main as board

# Fixtures.
bucket = test_storage.bucket

# ---- what commands read ----


def test_commands_read_a_run_at_its_address(launch, tmp_path, bucket, monkeypatch, capsys):
    run(launch, "first", "--parallel.strategy", "single", ranks=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIST_AMP_CACHE", "second")
    words = ["--task.target", "tiny:Tiny", "--out", "model"]
    for inside, step in (("", 8), ("/checkpoints/step_00000006", 6), ("/", 8)):
        assert export.main([f"{address_of(tmp_path)}{inside}", *words]) == 0
        assert f"from step {step} (second/run-" in capsys.readouterr().out
    fetched = sorted(path.name for path in Path("second").rglob("*.distcp"))
    assert len(fetched) == 2, "of the two checkpoints that were asked for"
    exported = load_file(tmp_path / "model/model.safetensors")
    (local,) = Path("first").glob("run-*")
    assert export.main([str(local), *words]) == 0
    expected = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.bad_input("export of a damaged checkpoint at an address")
def test_a_command_takes_the_newest_valid_checkpoint_of_an_address(
    launch, tmp_path, bucket, monkeypatch, capsys
):
    run(launch, "first", "--parallel.strategy", "single", ranks=1)
    (path,) = (bucket / "checkpoints/step_00000008").glob("__0_0*")
    damage("flipped", path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("DIST_AMP_CACHE", "second")
    words = ["--task.target", "tiny:Tiny", "--out", "model"]
    assert export.main([address_of(tmp_path), *words]) == 0
    assert "from step 6" in capsys.readouterr().out


@pytest.mark.bad_input("an address for a command that takes a path on a disk, or without a run")
def test_an_address_where_it_can_not_be_read_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    address = address_of(tmp_path)
    assert export.main([address, "--out", "model"]) == 65
    assert f"{address} holds no run; give what its run.dir was" in capsys.readouterr().err
    assert export.main(["s3://bucket", "--out", "model"]) == 64
    assert "is no address for a run: use s3://BUCKET/RUN" in capsys.readouterr().err
    for command, words in (
        (export.main, ["run", "--out", address]),
        (follow.main, [address, "--to", "wandb"]),
        (board, [address]),
    ):
        assert command(words) == 64
        assert (
            f"{address} is an address, and this needs a folder on a disk" in capsys.readouterr().err
        )
