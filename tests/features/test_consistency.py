"""Ranks with other code, versions or settings are refused before there is a run."""

import platform
import sys
from importlib.metadata import version

import pytest
import torch
from conftest import needs
from ranks import on_ranks

from dist_amp.checkpoint.compatibility import FREE_TO_CHANGE
from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.diagnostics import consistency
from dist_amp.diagnostics.consistency import check_ranks_agree
from dist_amp.errors import ConfigError


def difference_of_ranks(world, differs=None):
    """The error of check_ranks_agree if rank 1 differs; "" for none."""
    text = to_toml(load_config(["--task.target", "tiny:Tiny", "--data.path", "/disk"], environ={}))
    changes = {
        "a setting": {"lr = 0.0003": "lr = 0.001"},
        "per-machine settings": {"workers = 0": "workers = 2", '"/disk"': '"/scratch"'},
        "data": {'path = "/disk"': 'path = "off"'},
    }
    real = consistency.code_hashes
    if world.rank == 1:
        for old, new in changes.get(differs, {}).items():
            text = text.replace(old, new)
    if world.rank == 1 and differs == "a file":
        changed = real("tiny:Tiny") | {"dist_amp/step.py": "0123abcd", "own.py": "89abcdef"}
        consistency.code_hashes = lambda target: changed
    try:
        check_ranks_agree("tiny:Tiny", text, world)
    except ConfigError as error:
        return str(error)
    finally:
        consistency.code_hashes = real
    return ""


@pytest.mark.parametrize("differs", [None, "per-machine settings"])
def test_ranks_that_agree_are_not_reported(differs):
    assert on_ranks(2, difference_of_ranks, differs) == ["", ""]


def test_per_machine_settings_do_not_change_the_results():
    assert all(name.startswith(FREE_TO_CHANGE) for name in consistency.PER_MACHINE)


@pytest.mark.bad_input("nodes with different code, config or versions")
@pytest.mark.parametrize(
    ("differs", "what"),
    [
        ("data", "data.path is off, and given on rank 0"),
        ("a setting", "optim.lr is 0.001, and 0.0003 on rank 0"),
        (
            "a file",
            "dist_amp/step.py is 0123abcd, and MINE on rank 0; own.py is 89abcdef, and absent on "
            "rank 0",
        ),
    ],
)
def test_ranks_with_other_code_or_settings_get_each_difference_with_both_values(differs, what):
    mine = consistency.code_hashes("tiny:Tiny")["dist_amp/step.py"]
    what = what.replace("MINE", mine)
    fix = "start all of them with the same code, versions and settings (environment, config files)"
    expected = f"the ranks differ: on rank 1 ({platform.node()}): {what}; {fix}"
    assert on_ranks(2, difference_of_ranks, differs) == [expected] * 2


def test_the_users_task_file_and_the_versions_are_compared():
    assert "tiny.py" in consistency.code_hashes("tiny:Tiny")
    assert consistency.versions() == {
        "python": "{}.{}".format(*sys.version_info),
        "torch": torch.__version__,
        "datasets": version("datasets"),
    }


@needs("tasks.causal_lm")
def test_a_task_of_the_package_is_compared_by_its_path():
    assert "causal_lm.py" not in consistency.code_hashes("dist_amp.tasks.causal_lm:CausalLM")


def test_hidden_files_of_editors_and_notebooks_are_not_compared(tmp_path, monkeypatch):
    for name in ("step.py", ".step.py", "tasks/own.py", ".ipynb_checkpoints/step-checkpoint.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(consistency, "__file__", str(tmp_path / "diagnostics" / "consistency.py"))
    expected = {"dist_amp/step.py", "dist_amp/tasks/own.py", "tiny.py"}
    assert set(consistency.code_hashes("tiny:Tiny")) == expected
