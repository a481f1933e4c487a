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
from dist_amp.storage.mirror import local_folder

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
    before = load_file(tmp_path / "model/model.safetensors")
    monkeypatch.setenv("DIST_AMP_CACHE", "first")
    assert export.main([address_of(tmp_path), *words]) == 0
    assert "(first/run-" in capsys.readouterr().out, "which is as new"
    after = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not list(Path("first").glob("*-read"))


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
    assert "names no folder in the bucket" in capsys.readouterr().err
    assert export.main(["run", "--out", address]) == 64
    assert (
        "give one; the first lines of a run at an address name the run's" in capsys.readouterr().err
    )
    folder = local_folder(address)
    (folder / ".lease.json").write_text("{}")
    assert follow.main([address, "--to", "wandb"]) == 64
    assert f"this needs a local folder: give {folder}" in capsys.readouterr().err
    assert board([address]) == 64
    assert "is an address, and this needs a local folder: give " in capsys.readouterr().err
