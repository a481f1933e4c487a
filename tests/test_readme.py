"""The snippets and commands of the README and of docs/recipes.md do what they show."""

import re

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs/recipes.md").read_text()
TASK, SNIPPET = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(NOTEBOOK,) = re.findall(r"```python\n(.*?)```", RECIPES, re.DOTALL)


def test_the_readmes_task_trains_by_the_command_that_it_shows(launch, tmp_path):
    (tmp_path / "my_file.py").write_text(TASK)
    (arguments,) = re.findall(
        r"^python -m dist_amp.train (--task.target my_file.*)$", README, re.MULTILINE
    )
    done = launch(0, *arguments.split(), "--run.dir", "run", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "done: 300 steps (300 applied, 0 skipped)" in done.stdout


@pytest.mark.parametrize(
    ("snippet", "printed"),
    [
        pytest.param(SNIPPET, r"last loss ([\d.]+)\n", id="README"),
        pytest.param(NOTEBOOK, r"last loss ([\d.]+), held out ([\d.]+)\n", id="recipes"),
    ],
)
def test_the_notebook_snippets_train_and_leave_no_files(launch, snippet, printed, tmp_path):
    (tmp_path / "my_file.py").write_text(TASK)
    (tmp_path / "notebook.py").write_text(snippet)
    done = launch.module("notebook.py", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.fullmatch(printed, done.stdout).groups()]
    assert max(losses) < 2, "from 16 at the start, the mean of |x| squared"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] not in "._") == [
        "my_file.py",
        "notebook.py",
    ]
