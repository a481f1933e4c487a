"""The package imports nothing that pyproject.toml does not declare, and runs without extras."""

import ast
import shutil
import subprocess
import sys
import tomllib

import built_wheel
import pytest
from conftest import ROOT

from dist_amp.commands.new import distribution, distributions
from dist_amp.commands.parts import imported

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


def declared(*extras):
    """The distributions that pyproject.toml names, of the base package and of these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return {distribution(line) for group in groups for line in group}


def undeclared(path):
    """The distributions that a module imports and can not rely on."""
    at_once = [extra for extra, modules in NEEDS_EXTRA.items() if path.stem in modules]
    later = [extra for extra, modules in ASKS_FOR_EXTRA.items() if path.stem in modules]
    tree = ast.parse(path.read_text())
    outside = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    needed = distributions(imported(ast.Module(outside, []))) - declared(*at_once)
    return needed | distributions(imported(tree)) - declared(*at_once, *later)


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
