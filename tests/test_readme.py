"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_the_readmes_task_trains_and_its_notebook_snippet_runs(launch, tmp_path):
    task, notebook = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_file.py").write_text(task)
    (tmp_path / "notebook.py").write_text(notebook)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    last, held_out = map(float, re.fullmatch(r"last loss ([\d.]+), held out ([\d.]+)\n", done.stdout).groups())
    assert last < 2, "from 16 at the start, the mean of |x| squared"
    assert held_out < 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] not in "._") == ["my_file.py", "notebook.py"]

    (command,) = re.findall(r"^python (-m dist_amp.train --task.target my_file.*)$", README, re.MULTILINE)
    done = launch(0, *command.split()[2:], "--run.dir", "run", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "done: 300 steps (300 applied, 0 skipped)" in done.stdout


def test_every_file_key_and_test_that_the_readme_names_is_there():
    from dist_amp.config.load import load_config
    from dist_amp.config.parse import flat_values

    keys = dict(flat_values(load_config([], environ={})))
    for key in re.findall(r"--([a-z_]+\.[a-z_.]+)", README):
        assert key in keys or key.startswith("task.args"), key
    for path in re.findall(r"(?:configs|launch|dist_amp|tests)/[\w./]+\w", README):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"^(\w+\.py)  ", README, re.MULTILINE):
        assert (ROOT / "dist_amp" / name).exists(), name
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for word in re.findall(r"launch/test\.sh (?:-m slow )?-k (\w+)", README):
        assert re.search(rf"def test_\w*{word}", tests), word
