"""Core as test_security.py tests it, with sample."""

from dataclasses import replace
from pathlib import Path

import pytest
import test_security

from dist_amp.checkpoint.format import CONFIG, MANIFEST, hash_files, read_manifest
from dist_amp.commands import export, sample

# Fixtures.
hostile = test_security.hostile

COMMANDS = {
    "export": lambda run: export.main([str(run), "--out", "out"]),
    "export a checkpoint": lambda run: export.main(
        [str(run / "checkpoints/step_00000002"), "--out", "out"]
    ),
    "sample": lambda run: sample.main([str(run)]),
    "sample an export": lambda run: sample.main([str(run / "exported")]),
}


@pytest.mark.bad_input("a checkpoint whose config names code that lies in or beside it")
@pytest.mark.parametrize("command", list(COMMANDS))
@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("evil.py", "{run}/evil.py:Task"),
        ("../evil.py", "{run}/../evil.py:Task"),
        ("checkpoints/step_00000002/evil.py", "{run}/checkpoints/step_00000002/evil.py:Task"),
        ("evil.py", "../runs/mine/evil.py:Task"),
    ],
)
def test_no_file_beside_a_checkpoint_is_imported(hostile, capsys, command, path, target):
    folder = hostile(target.format(run="{run}"), path)
    for config in folder.rglob(CONFIG):
        config.write_text(config.read_text().replace("{run}", str(folder)))
    checkpoint = folder / "checkpoints/step_00000002"
    manifest = read_manifest(checkpoint)
    files = hash_files(checkpoint / name for name in manifest.files)
    (checkpoint / MANIFEST).write_text(replace(manifest, files=files).to_text())
    assert COMMANDS[command](folder) == 64
    line = capsys.readouterr().err.splitlines()[-1]
    assert "is only named by the config in" in line
    assert "check it, and give --task.target" in line


@pytest.mark.bad_input("export in the folder of a checkpoint that brings a module, or a package")
@pytest.mark.parametrize(
    ("paths", "target"),
    [
        (("evil.py",), "evil:Task"),
        (("evil/__init__.py", "evil/task.py"), "evil.task:Task"),
        (("space/task.py",), "space.task:Task"),
        (("evil.py",), "evil.py:Task"),
    ],
)
def test_no_module_of_a_current_folder_that_holds_the_checkpoint_is_imported(
    hostile, capsys, monkeypatch, paths, target
):
    folder = hostile(target, *paths)
    monkeypatch.chdir(folder)
    assert COMMANDS["export"](folder) == 64
    assert "could run any code" in capsys.readouterr().err


def test_a_module_of_the_current_folder_is_said_before_it_is_imported(hostile, capsys, tmp_path):
    folder = hostile("mine_said:Task")
    Path("mine_said.py").write_text("from tiny import Tiny as Task\n")
    assert COMMANDS["export"](folder) == 0
    file = tmp_path / "here/mine_said.py"
    assert f"task   mine_said:Task, named by the saved config, from {file}" in (
        capsys.readouterr().err
    )
