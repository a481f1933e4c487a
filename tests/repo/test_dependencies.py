"""The package imports nothing that pyproject.toml does not declare, and runs without extras."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib

import built_wheel
import pytest
from conftest import ROOT

# Imported names that differ from the distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
# Which extra each optional module is for.
NEEDS_EXTRA = {
    "hf": "hf_causal_lm hf_classification huggingface".split(),
    "images": ["labelled_images"],
}
# Where an extra's package is imported by a function that says what to install.
ASKS_FOR_EXTRA = {
    "hf": ["tokenizer", "pretrained"],
    "gpu": ["health"],
    "float8": ["float8"],
    "plot": ["plot"],
}


def declared(extra=None):
    """The distributions that pyproject.toml names, of the base package or of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {re.split(r"[<>=\[ ]", line)[0] for line in lines}


def imports_of(path):
    """(third-party distribution, whether it is imported when the module is)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top != "dist_amp" and top not in sys.stdlib_module_names:
                yield DISTRIBUTIONS.get(top, top).replace("_", "-"), node in tree.body


def undeclared(path):
    """The distributions that a module imports and can not rely on."""
    at_once = set(declared())
    later = set(declared())
    for extra, modules in NEEDS_EXTRA.items():
        if path.stem in modules:
            at_once |= declared(extra)
            later |= declared(extra)
    for extra, modules in ASKS_FOR_EXTRA.items():
        if path.stem in modules:
            later |= declared(extra)
    return {name for name, top in imports_of(path) if name not in (at_once if top else later)}


def test_every_import_of_the_package_is_declared():
    modules = sorted((ROOT / "dist_amp").rglob("*.py"))
    wrong = {str(path): names for path in modules if (names := undeclared(path))}
    assert wrong == {}


@pytest.mark.slow
def test_pip_installs_the_wheel_with_what_it_needs_and_the_demo_runs(tmp_path):
    built = built_wheel.build(built_wheel.copy_source(tmp_path / "source"), tmp_path)
    bin_folder = tmp_path / "environment/bin"
    subprocess.run([sys.executable, "-m", "venv", bin_folder.parent], check=True)
    constraints = ROOT / "launch/constraints.txt"
    install = [bin_folder / "pip", "install", "--quiet", "-c", constraints, built]
    subprocess.run(install, check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    words = "--train.steps 3 --eval.batches 1 --task.args.sample_bytes 8".split()
    done = built_wheel.run(bin_folder, empty, "dist_amp", "demo", *words)
    shutil.rmtree(bin_folder.parent)  # a gigabyte
    assert done.returncode == 0, done.stderr
    assert "done: 3 steps" in done.stdout
