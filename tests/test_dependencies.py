"""The package imports nothing that pyproject.toml does not declare, and runs without extras."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

from dist_amp.commands.__main__ import COMMANDS

# Imported names that differ from the distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
# Which extra each optional module is for.
NEEDS_EXTRA = {
    "hf": [
        "tasks/hf_causal_lm",
        "tasks/hf_classification",
        "tasks/huggingface",
        "tasks/image_text",
        "tasks/preference",
    ],
    "images": ["sources/labelled_images"],
}
# Where an extra's package is imported by a function that says what to install.
ASKS_FOR_EXTRA = {
    "hf": ["sources/tokenizer", "tasks/pretrained"],
    "gpu": ["telemetry/health"],
    "float8": ["scaling/float8"],
    "plot": ["commands/plot"],
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
    module = path.relative_to(ROOT / "dist_amp").with_suffix("").as_posix()
    at_once = set(declared())
    later = set(declared())
    for extra, modules in NEEDS_EXTRA.items():
        if module in modules:
            at_once |= declared(extra)
            later |= declared(extra)
    for extra, modules in ASKS_FOR_EXTRA.items():
        if module in modules:
            later |= declared(extra)
    return {name for name, top in imports_of(path) if name not in (at_once if top else later)}


def test_every_import_of_the_package_is_declared():
    modules = sorted((ROOT / "dist_amp").rglob("*.py"))
    wrong = {str(path): names for path in modules if (names := undeclared(path))}
    assert wrong == {}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An environment with the installed package, without extras; the path of its bin folder."""
    folder = tmp_path_factory.mktemp("plain")
    source = folder / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "fake_gpu", "old_checkpoints")
    for name in ("dist_amp", "configs", "launch", "template", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "features.toml", "Dockerfile"):
        shutil.copy(ROOT / name, source)
    bin_folder = folder / "environment/bin"
    subprocess.run([sys.executable, "-m", "venv", bin_folder.parent], check=True)
    constraints = ROOT / "launch/constraints.txt"
    install = [bin_folder / "pip", "install", "--quiet", "-c", constraints, source]
    subprocess.run(install, check=True)
    yield bin_folder
    shutil.rmtree(bin_folder.parent)  # a gigabyte


def run(plain, folder, *words):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{plain}:{environment['PATH']}"
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_command_prints_its_help_without_extras(plain, tmp_path):
    assert "tabulate" not in run(plain, tmp_path, "pip", "freeze")
    for command in COMMANDS:
        if command == "bench":  # of a clone
            continue
        assert f"dist_amp.{command}" in run(plain, tmp_path, "dist_amp", command, "--help")


@pytest.mark.slow
def test_the_readmes_commands_run_without_extras(plain, tmp_path):
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "my_file.py").write_text(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0])
    commands = re.findall(r"^((?:python|torchrun|dist_amp) .*my_file:.*)$", readme, re.MULTILINE)
    assert len(commands) >= 3
    for number, command in enumerate(commands):
        command = command.partition("  #")[0].replace("--nproc_per_node=8", "--nproc_per_node=2")
        words = command.split()
        if "verify" in command:
            words += ["--world_sizes", "1", "--precisions", "fp32"]
        elif "plan" not in command:
            words += ["--train.steps", "3", "--run.dir", f"run{number}"]
        run(plain, tmp_path, *words)
