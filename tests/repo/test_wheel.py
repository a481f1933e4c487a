"""Without a clone: the installed wheel runs every command and finds the shipped configs.

The environment has the packages that the wheel declares, and no extra.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys

import built_wheel
import pytest
from conftest import ROOT
from messages import message_of

from dist_amp import files
from dist_amp.config.load import collect, load_config

TASK = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
# Only the size of the work; the last of equal options counts.
GPT = "--train.micro_batch_size 2 --eval.batches 1 --task.args.width 32 --task.args.sample_bytes 8"
FEW_STEPS = "--train.steps 3"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """run(folder, *words): a command of an environment with the wheel, without extras."""
    folder = tmp_path_factory.mktemp("wheel")
    built = built_wheel.build(built_wheel.copy_source(folder / "source"), folder)
    bin_folder = built_wheel.install(built, folder / "environment")
    return lambda *words: built_wheel.run(bin_folder, *words)


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory):
    """A folder with the README's task, a run of it in `run`, and one of a GPT in `gpt`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my_file.py").write_text(TASK)
    (folder / "mine.toml").write_text("train.steps = 7\n")
    quick = "dist_amp train --train.steps 3 --run.dir"
    gpt = f"--config debug {GPT} --checkpoint.every 3"
    for words in (f"{quick} run --task.target my_file.py:TinyRegression", f"{quick} gpt {gpt}"):
        done = installed(folder, *words.split())
        assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "run", folder / "copy")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("project", ["pyproject.toml", "template/pyproject.toml.in"])
def test_a_folder_of_the_packages_name_does_not_shadow_an_editable_install(tmp_path, project):
    text = re.sub(r"^\$[a-z]+$", "", (ROOT / project).read_text(), flags=re.MULTILINE)
    clone = tmp_path / "clone"
    (clone / "dist_amp").mkdir(parents=True)
    (clone / "pyproject.toml").write_text(text.replace("$name", "dist_amp"))
    (clone / "dist_amp/__init__.py").write_text("__version__ = '1'\n")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "from setuptools import build_meta; build_meta.build_editable('.')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    shutil.unpack_archive(next(clone.glob("*.whl")), tmp_path / "packages", "zip")
    (path,) = (tmp_path / "packages").glob("*.pth")
    assert path.read_text().strip() == str(clone), "a plain path: no finder that comes last"


# ---- commands


@pytest.mark.bad_input("an unknown config name")
def test_an_unknown_config_is_refused_with_the_names_of_those_that_are_installed(
    installed, tmp_path
):
    done = installed(tmp_path, "dist_amp", "train", "--config", "dbug")
    assert done.returncode == 64
    names = ", ".join(sorted(path.stem for path in (ROOT / "configs").glob("*.toml")))
    assert done.stderr == (
        "error: --config dbug: neither a file here nor a shipped config; give the path of a TOML "
        f"file, or one of {names}\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.bad_input("a command, config or setting whose optional package is not installed")
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (f"launch --nproc_per_node=2 --config ddp_bf16 {FEW_STEPS} {GPT}", 0, "done: 3 steps"),
        (f"demo {FEW_STEPS} {GPT}", 0, "done: 3 steps"),
        ("replay run --step 2", 0, "loss"),
        ("diff run copy", 0, "step"),
        ("export run --out model", 0, "model: model in fp32, from step 3"),
        ("runs .", 0, "TinyRegression  done"),
        ("report run", 0, "run/report.html"),
        ("doctor --device cpu", 0, "ready to train"),
        ("schema --config debug", 0, '"title": "dist_amp"'),
        ("launch --config demo --config mine.toml --print_config", 0, "steps = 7"),
        ("plan --config demo --world_size 2", 0, "426,624 parameters"),
        ("sample gpt --config debug", 0, "def "),
        ("verify --config debug --world_sizes 1 --precisions fp32", 0, "passed: "),
        ("tokenize --data.path my_file.py --data.tokenizer bytes --out t", 0, "token"),
        ("plot run", 64, "pip install matplotlib"),
        ("follow run --to wandb --once", 64, "pip install wandb"),
        ("train --config images", 64, "pip install scikit-learn"),
        ("train --config hf_finetune", 64, "pip install transformers"),
        ("train --config debug --data.tokenizer gpt2", 64, "pip install transformers"),
        ("train --config demo --precision.dtype fp8", 64, "pip install torchao"),
    ],
)
def test_a_command_runs_without_a_clone_or_says_what_to_install(
    command, status, said, installed, trained
):
    done = installed(trained, "dist_amp", *command.split())
    assert done.returncode == status, done.stderr
    assert said in (done.stderr.splitlines()[-1] if status else done.stdout)
    assert "Traceback" not in done.stderr


# ---- configs by name


def test_a_config_is_found_by_its_name_a_file_here_comes_before_it_and_a_later_one_wins(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for path in (ROOT / "configs").glob("*.toml"):
        assert collect(["--config", path.stem], {}) == collect(["--config", str(path)], {})
    (tmp_path / "mine.toml").write_text("train.steps = 7\n")
    config = load_config(["--config", "demo", "--config", "mine.toml"], {})
    assert (config.train.steps, config.optim.lr) == (7, 4e-3)
    assert load_config(["--config", "mine.toml", "demo"], {}).train.steps == 1500
    (tmp_path / "debug").mkdir()  # as the folder of a run or a project
    (tmp_path / "demo").write_text("train.steps = 7\n")
    assert load_config(["--config", "debug"], {}).train.steps == 20
    assert load_config(["--config", "demo"], {}).train.steps == 7


@pytest.mark.bad_input("a package that was installed without its configs")
def test_an_installation_without_its_files_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "__file__", str(tmp_path / "site-packages/dist_amp/files.py"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    text = "is installed without configs/debug.toml and its other files; install its wheel"
    assert text in message_of(64, load_config, ["--config", "demo"], {})
    assert load_config([], {}).train.steps == 100
