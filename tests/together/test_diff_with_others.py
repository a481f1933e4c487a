"""What test_diff.py tests, with other features."""

import shutil
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_diff
from test_diff import train_in

from dist_amp.commands import diff, diff_deep
from dist_amp.errors import DataError

# Fixtures.
trained = test_diff.trained

VERSION = """
from dist_amp.tasks.sinusoid import Sinusoid
from scaled import SCALE

class Mine(Sinusoid):
    def loss_sum(self, model, batch):
        return SCALE * super().loss_sum(model, batch)
"""


def version(folder, scale):
    """The path of a task, which has the same name in each folder."""
    folder.mkdir(exist_ok=True)
    (folder / "versioned.py").write_text(VERSION)
    (folder / "scaled.py").write_text(f"SCALE = {scale}")
    return folder / "versioned.py"


def test_deep_compares_two_versions_of_one_module(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    for name, scale in (("one", 1.0), ("two", 2.0)):
        diff_deep.make_room_for(version(tmp_path / name, scale))
        words = {"task__target": f"{name}/versioned.py:Mine", "train__steps": 2}
        folders.append(str(train_in(tmp_path / "runs" / name, **words)))
    capsys.readouterr()
    assert diff.main([*folders, "--deep"]) == 1
    out = capsys.readouterr().out
    assert "both replayed: step 1: the loss of the model" in out
    assert not out.startswith("the task's source file"), "versioned.py is the same"


@pytest.mark.bad_input("`diff --deep` of a run whose task was edited since")
def test_an_edited_task_is_the_first_line_and_the_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = version(tmp_path / "mine", 1.0)
    diff_deep.make_room_for(task)
    words = {"task__target": "mine/versioned.py:Mine", "train__steps": 2}
    a = train_in(tmp_path / "a", **words)
    task.write_text(VERSION.replace("return SCALE", "return 1.5 * SCALE"))
    for name in ("versioned", "scaled"):
        del sys.modules[name]
    b = train_in(tmp_path / "b", **words)
    capsys.readouterr()
    assert diff.main([str(a), str(b), "--deep"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the task's source file differs (hashes ")
    assert f"not replayed: {task} was edited since {a} was started; put " in lines[-1]


def test_steps_that_are_taken_again_forget_the_settings_of_before(trained, tmp_path):
    words = {"optim__schedule": "constant", "checkpoint__keep": 9}
    folder = Path(shutil.copytree(trained(**words), tmp_path / "copy"))
    words["run__allow_config_change"] = "true"
    for step in (6, 4):
        for later in (8, step + 2):
            shutil.rmtree(folder / f"checkpoints/step_0000000{later}", ignore_errors=True)
        train_in(folder, **words, optim__lr=1.0 / step, train__steps=8)
    assert [path.name for path in folder.glob("config_until*")] == [
        "config_until_step_00000004.toml"
    ]
    assert diff.RunFiles(folder).settings_at(4)["optim.lr"] == 1e-2
    assert diff.RunFiles(folder).settings_at(5)["optim.lr"] == 0.25
    with pytest.raises(DataError, match="replays the steps 4 to 6 with one config"):
        diff_deep.where_they_part([folder, folder], 3, 6)


def test_parts_of_the_model_itself_are_named_so():
    a, b = (
        SimpleNamespace(
            values=defaultdict(list, forward=[diff_deep.Value("", [bits], [])]),
            operations=defaultdict(list, {"": [("aten.mul", [bits])]}),
        )
        for bits in (1, 2)
    )
    assert diff_deep.first_part(a, b) == "the forward of the model, aten.mul"
