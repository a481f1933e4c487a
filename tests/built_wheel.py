"""Build the wheel, and install it beside nothing but the packages that it declares."""

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from forked import ROOT

from dist_amp.commands.new import needed_by

TORCHRUN = "#!{python}\nfrom torch.distributed.run import main\n\nmain()\n"
NOT_COPIED = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".*_cache")


def settings_of_pip() -> dict[str, str]:
    """What this machine's pip is told, by its name; an option of several words is one text."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.check_output(command, text=True)
    told = dict(re.findall(r"^global\.([\w-]+)=(.*)$", listed, re.MULTILINE))
    told |= dict(re.findall(r"^:env:\.([\w-]+)=(.*)$", listed, re.MULTILINE))  # it wins
    return {key: str(ast.literal_eval(value)) for key, value in told.items()}


def copy_source(folder: Path) -> Path:
    """A copy of what the wheel is built from: setuptools leaves its files beside the source."""
    for name in ("dist_amp", "configs", "launch", "template", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_COPIED)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    return folder


def build(source: Path, folder: Path) -> Path:
    """The wheel of a copy of the source, built by this environment's setuptools."""
    options = "wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir".split()
    subprocess.run([sys.executable, "-m", "pip", *options, folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel and links to its dependencies, without extras.

    Returns its bin folder.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    options = "install --quiet --no-deps --no-index".split()
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *options, wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (metadata,) = packages.glob("dist_amp-*.dist-info")
    lines = Distribution.at(metadata).requires or []
    for name in needed_by(line for line in lines if "extra ==" not in line):
        link_files(distribution(name), packages)
    torchrun = folder / "bin/torchrun"
    torchrun.write_text(TORCHRUN.format(python=python))
    torchrun.chmod(0o755)
    return folder / "bin"


def link_files(found: Distribution, packages: Path) -> None:
    """Link a distribution's folders and modules into another environment's packages."""
    for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        link = packages / name
        if not link.is_symlink():
            link.symlink_to(found.locate_file(name))


def run(bin_folder: Path, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment in a folder, and nothing of this clone."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("DIST_AMP_")
    }
    environ |= {"PATH": f"{bin_folder}:{environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [shutil.which(str(words[0]), path=environ["PATH"]), *map(str, words[1:])]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
