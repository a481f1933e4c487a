"""What test_storage.py tests, with other features."""

import shutil
import time
from pathlib import Path

import pytest
import test_storage
import torch
from safetensors.torch import load_file
from test_storage import address_of, damage

from dist_amp.commands import export, follow
from dist_amp.commands.board import main as board

finished, finished_once = test_storage.finished, test_storage.finished_once  # fixtures
WORDS = ["--task.target", "tiny:Tiny", "--out", "model"]


@pytest.mark.bad_input("export of a damaged checkpoint at an address")
def test_commands_read_a_run_at_its_address(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    for inside, step in (("", 8), ("/checkpoints/step_00000006", 6), ("/", 8)):
        assert export.main([f"{address_of(finished)}{inside}", *WORDS]) == 0
        assert f"from step {step} ({finished}/second/run-" in capsys.readouterr().out
    fetched = list(Path("second").rglob("*.distcp"))
    assert len(fetched) == 2, "of the two checkpoints that were asked for"
    exported = load_file("model/model.safetensors")
    (local,) = Path("cache").glob("run-*")
    assert export.main([str(local), *WORDS]) == 0
    expected = load_file("model/model.safetensors")
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    shutil.rmtree("second")
    damage("flipped", *finished.glob("bucket/run/checkpoints/step_00000008/__0_0*"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert export.main([address_of(finished), *WORDS]) == 0
    assert "from step 6" in capsys.readouterr().out, "the newest that is whole"


@pytest.mark.bad_input("an address for a command that takes a path on a disk, or without a run")
@pytest.mark.parametrize(
    ("command", "words", "status", "said"),
    [
        (export.main, ["{0}", "--out", "model"], 65, "{0} holds no run; give the run.dir of a run"),
        (export.main, ["s3://bucket", "--out", "model"], 64, "is no address for a run: use s3://"),
        (export.main, ["run", "--out", "{0}"], 64, "{0} is an address, and this needs a folder"),
        (follow.main, ["{0}", "--to", "wandb"], 64, "{0} is an address, and this needs a folder"),
        (board, ["{0}"], 64, "{0} is an address, and this needs a folder on a disk"),
    ],
)
def test_an_address_where_it_can_not_be_read_is_refused(
    command, words, status, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    address = address_of(tmp_path)
    assert command([word.format(address) for word in words]) == status
    assert said.format(address) in capsys.readouterr().err
