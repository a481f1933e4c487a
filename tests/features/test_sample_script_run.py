"""Core as test_script_run.py tests it, with sample."""

import pytest
from test_script_run import Noisy, Unkept, recorded, trained

from dist_amp import train
from dist_amp.commands import export, sample


def local_task(width):
    class Local(Noisy):
        """It does not keep its argument."""

        def __init__(self, width: int = width):
            super().__init__()

    return Local()


@pytest.mark.bad_input("a command on a run whose task was an object that no config builds again")
@pytest.mark.parametrize("make", [lambda: local_task(4), Unkept], ids=["local", "unkept"])
def test_a_task_that_no_config_builds_again_must_be_named_to_commands(make, tmp_path, capsys):
    task = make()
    trained(tmp_path, task)
    name = type(task).__qualname__
    assert recorded(tmp_path) == {"target": f"given:{name}", "args": {}}
    said = capsys.readouterr().out
    assert "next: dist_amp export" not in said
    short = name.rpartition(".")[2]
    told = (
        f"task.target=given:{name}: the run's task was an object that a script or notebook gave to "
        f"build_run; name its class and its arguments, as --task.target my_file:{short} "
        "--task.args.NAME VALUE"
    )
    for command in (
        [export, f"{tmp_path}/run", "--out", f"{tmp_path}/exported"],
        [sample, f"{tmp_path}/run"],
        [train, "--config", f"{tmp_path}/run/config.toml"],
    ):
        module, *words = command
        assert module.main(words) == 64
        assert told in capsys.readouterr().err
    assert train.main(["--run.dir", f"{tmp_path}/run", "--train.steps", "9"]) == 64
    assert f"task.target=given:{name}, now dist_amp.tasks.causal_lm" in capsys.readouterr().err
