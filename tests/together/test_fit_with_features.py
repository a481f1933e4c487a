"""Core as test_fit.py tests it, with several features."""

import re
from pathlib import Path


def test_the_pages_cell_runs(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs/own_loop.md"
    _, cell = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_file.py").write_text("from tiny import Tiny as TinyRegression\n")
    monkeypatch.setenv("DIST_AMP_TRAIN__STEPS", "3")
    names = {}
    exec(cell, names)
    assert names["summary"]["steps"] == 3
