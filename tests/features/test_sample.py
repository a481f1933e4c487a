"""The command sample: no code of a checkpoint is run, and tasks that no config names are asked for.

Core as test_script_run.py and test_security.py test it, with sample.
"""

from dataclasses import replace

import pytest
import test_security
from test_script_run import Unkept, recorded, trained

from dist_amp import train
from dist_amp.checkpoint.format import CONFIG, MANIFEST, hash_files, read_manifest
from dist_amp.commands import export, sample

hostile = test_security.hostile  # a fixture
STEP = "checkpoints/step_00000002"


@pytest.mark.bad_input("a checkpoint whose config names code that lies in or beside it")
@pytest.mark.parametrize(
    ("command", "at", "path", "target"),
    [
        (sample, "", "evil.py", "{run}/evil.py:Task"),
        (sample, "exported", "evil.py", "../runs/mine/evil.py:Task"),
        (export, "", "../evil.py", "{run}/../evil.py:Task"),
        (export, STEP, f"{STEP}/evil.py", "{run}/checkpoints/step_00000002/evil.py:Task"),
    ],
)
def test_no_file_beside_a_checkpoint_is_imported(hostile, capsys, command, at, path, target):
    folder = hostile(target, path)
    for config in folder.rglob(CONFIG):
        config.write_text(config.read_text().replace("{run}", str(folder)))
    manifest = read_manifest(folder / STEP)
    files = hash_files(folder / STEP / name for name in manifest.files)
    (folder / STEP / MANIFEST).write_text(replace(manifest, files=files).to_text())
    words = ["--out", "out"] if command is export else []
    assert command.main([str(folder / at), *words]) == 64
    assert "is only named by the config in" in capsys.readouterr().err


@pytest.mark.bad_input("export in the folder of a checkpoint that brings a module, or a package")
@pytest.mark.parametrize(
    ("paths", "target"),
    [
        (("evil.py",), "evil:Task"),
        (("space/task.py",), "space.task:Task"),
        (("evil.py",), "evil.py:Task"),
    ],
)
def test_no_module_of_a_current_folder_that_holds_the_checkpoint_is_imported(
    hostile, capsys, monkeypatch, paths, target
):
    folder = hostile(target, *paths)
    monkeypatch.chdir(folder)
    assert export.main([str(folder), "--out", "out"]) == 64
    assert "could run any code" in capsys.readouterr().err


@pytest.mark.bad_input("a command on a run whose task was an object that no config builds again")
def test_a_task_that_no_config_builds_again_must_be_named_to_commands(tmp_path, capsys):
    trained(tmp_path, Unkept())
    assert recorded(tmp_path) == {"target": "given:Unkept", "args": {}}
    for command, *words in (
        (export, f"{tmp_path}/run", "--out", f"{tmp_path}/exported"),
        (sample, f"{tmp_path}/run"),
        (train, "--config", f"{tmp_path}/run/config.toml"),
    ):
        assert command.main(words) == 64
        assert "task.target=given:Unkept: the run's task was an object" in capsys.readouterr().err
    assert train.main(["--run.dir", f"{tmp_path}/run", "--train.steps", "9"]) == 64
    assert "task.target=given:Unkept, now dist_amp.tasks.causal_lm" in capsys.readouterr().err
