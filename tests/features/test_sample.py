"""The command sample: no code of a checkpoint is run, and tasks that no config names are asked for.

Core as test_script_run.py and test_security.py test it, with sample.
"""

import pytest
import test_security
from test_script_run import Unkept, recorded, trained
from tiny import seal_again

from dist_amp import train
from dist_amp.checkpoint.format import CONFIG
from dist_amp.commands import export, sample

hostile = test_security.hostile  # a fixture
STEP = "checkpoints/step_00000002"


@pytest.mark.bad_input("a checkpoint whose config names code that lies in or beside it")
@pytest.mark.bad_input("export in the folder of a checkpoint that brings a module, or a package")
@pytest.mark.parametrize(
    ("is_inside", "command", "at", "path", "target"),
    [
        (False, sample, "", "evil.py", "{run}/evil.py:Task"),
        (False, sample, "exported", "evil.py", "../runs/mine/evil.py:Task"),
        (False, export, "", "../evil.py", "{run}/../evil.py:Task"),
        (False, export, STEP, f"{STEP}/evil.py", "{run}/checkpoints/step_00000002/evil.py:Task"),
        (True, export, "", "evil.py", "evil:Task"),
        (True, export, "", "space/task.py", "space.task:Task"),
        (True, export, "", "evil.py", "evil.py:Task"),
    ],
)
def test_no_file_beside_a_checkpoint_is_imported_wherever_the_command_is_run(
    hostile, capsys, monkeypatch, is_inside, command, at, path, target
):
    folder = hostile(target, path)
    for config in folder.rglob(CONFIG):
        config.write_text(config.read_text().replace("{run}", str(folder)))
    seal_again(folder / STEP)
    if is_inside:
        monkeypatch.chdir(folder)
    words = ["--out", "out"] if command is export else []
    assert command.main([str(folder / at), *words]) == 64
    assert "is only named by the config in" in capsys.readouterr().err


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
