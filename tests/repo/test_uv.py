"""uv: `uv sync` in a new clone installs the pinned versions, and `uv run` trains."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import built_wheel
import pytest
from conftest import ROOT

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
UV = shutil.which("uv", path=PATH)
# What uv calls the settings of pip that say where packages come from.
NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def test_uv_gets_the_versions_that_pip_gets():
    pinned = re.findall(r"^[\w.-]+==.*$", (ROOT / "launch/constraints.txt").read_text(), re.M)
    assert len(pinned) > 100
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    assert tool["constraint-dependencies"] == pinned


def only_for_this_python(pyproject):
    """A machine's own builds of torch may be of its Python alone, and uv resolves for all."""
    minor = sys.version_info.minor
    here = f"platform_machine == '{os.uname().machine}' and python_full_version < '3.{minor + 1}'"
    text = pyproject.read_text()
    pyproject.write_text(text.replace("sys_platform == 'linux' and", f"{here} and"))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(UV is None, reason="needs uv: bash tests/engines.sh")
def test_after_uv_sync_uv_run_trains_with_the_pinned_versions_and_the_scripts_take_them(tmp_path):
    folder = built_wheel.copy_source(tmp_path / "clone")
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    environment |= {"PATH": PATH, "UV_PYTHON": sys.executable}
    settings = built_wheel.settings_of_pip()
    for name, uvs in NAMES.items():
        if name in settings:
            environment.setdefault(uvs, settings[name].replace(" ", ","))
    if "find-links" in settings:
        only_for_this_python(folder / "pyproject.toml")

    def run(*words):
        options = {"cwd": folder, "env": environment, "text": True}
        return subprocess.run(words, capture_output=True, timeout=1200, **options)

    done = run(UV, "sync")
    assert done.returncode == 0, done.stderr
    listed = run(UV, "run", "dist_amp", "--help")
    assert listed.stdout.startswith("usage: dist_amp COMMAND"), listed.stderr
    words = "--train.steps 3 --eval.batches 1 --task.args.sample_bytes 8 --run.dir runs/uv"
    done = run(UV, "run", "python", "-m", "dist_amp.train", *words.split())
    assert "done: 3 steps" in done.stdout, done.stderr
    checked = run(UV, "run", "python", "-m", "dist_amp.doctor").stdout
    assert re.search(r"^ok +torch", checked, re.M), checked
    assert "tested with" not in checked, checked
    done = run("bash", "launch/test.sh", "tests/core/test_optim.py", "--collect-only", "-q")
    assert "tests collected" in done.stdout, done.stderr
    shutil.rmtree(folder)  # gigabytes
