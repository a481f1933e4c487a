"""Without a clone: the installed wheel runs the README's commands and finds the shipped configs.

The environment has the packages that the wheel declares, and no extra.
"""

import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import built_wheel
import pytest
from conftest import ROOT

from dist_amp import files
from dist_amp.commands import __main__ as commands
from dist_amp.config.load import collect, load_config
from dist_amp.errors import ConfigError

README = (ROOT / "README.md").read_text()
TASK = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
STARTS = ("bash", "dist_amp", "pip", "python", "sbatch", "source", "torchrun")
NOT_RUN = {  # what a command begins with: why it is not run here
    "bash launch/": "a clone's script",
    "source .venv/": "a clone's environment",
    "pip install .": "what the fixture does, from the wheel that it builds",
    "sbatch launch/": "a clone's script, and it needs Slurm",
    "python -m dist_amp.train --task": "what the fixture trained runs",
    "python -m benchmarks": "the benchmarks are in a clone",
    "dist_amp adopt": "changes a project; test_update.py runs it",
    "dist_amp update": "changes a project; test_update.py runs it",
}
QUICK = ("dist_amp plan", "dist_amp$")
# Only the size of the work; the last of equal options counts.
GPT = "--train.micro_batch_size 2 --eval.batches 1 --task.args.width 32 --task.args.sample_bytes 8"
FEW_STEPS = "--train.steps 3"
OF_RUN = {"RUN": "run", "A": "run", "B": "copy", "N": "2"}


def readme_commands():
    """Those in blocks without a language and in the text, without comments."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fence.findall(README) if not language]
    found = "".join(blocks).splitlines() + re.findall(r"`([^`]+)`", fence.sub("", README))
    commands = [" ".join(command.partition("  #")[0].split()) for command in found]
    return [command for command in dict.fromkeys(commands) if command.split(" ")[0] in STARTS]


def run_here():
    """The README's commands that are run, as parameters of a test."""
    found = []
    for command in readme_commands():
        if not command.startswith(tuple(NOT_RUN)):
            is_quick = re.match("|".join(QUICK), command)
            found.append(pytest.param(command, marks=[] if is_quick else pytest.mark.slow))
    return found


def words_of(command):
    """Its words, for two processes and few steps, and with a run in place of RUN."""
    words = shlex.split(command.replace("--nproc_per_node=8", "--nproc_per_node=2"))
    words = [OF_RUN.get(word, word) for word in words]
    trains = re.search(r"dist_amp[. ](train|launch|demo)", command)
    if "verify" in command and "--world_sizes" not in words:
        words += "--world_sizes 1 --precisions fp32".split()
    elif trains and "--help" not in words:
        words += FEW_STEPS.split()
        if "my_file" not in command:
            words += GPT.split()
    return words


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """run(folder, *words): a command of an environment with the wheel, without extras."""
    folder = tmp_path_factory.mktemp("wheel")
    built = built_wheel.build(built_wheel.copy_source(folder / "source"), folder)
    bin_folder = built_wheel.install(built, folder / "environment")
    return lambda *words: built_wheel.run(bin_folder, *words)


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory):
    """A folder with the README's task, and a run of it in `run`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my_file.py").write_text(TASK)
    train = "python -m dist_amp.train --task"
    (command,) = (one for one in readme_commands() if one.startswith(train))
    done = installed(folder, *words_of(command), "--run.dir", "run")
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "run", folder / "copy")
    return folder


# ---- an editable install


@pytest.mark.parametrize("project", ["pyproject.toml", "template/pyproject.toml.in"])
def test_a_folder_of_the_packages_name_does_not_shadow_an_editable_install(tmp_path, project):
    text = re.sub(r"^\$[a-z]+$", "", (ROOT / project).read_text(), flags=re.MULTILINE)
    clone = tmp_path / "clone"
    here = tmp_path / "here"
    (here / "dist_amp").mkdir(parents=True)
    (clone / "dist_amp").mkdir(parents=True)
    (clone / "pyproject.toml").write_text(text.replace("$name", "dist_amp"))
    (clone / "dist_amp/__init__.py").write_text("__version__ = '1'\n")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "from setuptools import build_meta; build_meta.build_editable('.')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    shutil.unpack_archive(next(clone.glob("*.whl")), tmp_path / "packages", "zip")
    # `python -m` has the current folder in front.
    imports = f"import sys, site; sys.path.insert(0, {str(here)!r})\n"
    imports += f"site.addsitedir({str(tmp_path / 'packages')!r}); import dist_amp\n"
    command = [sys.executable, "-I", "-S", "-c", f"{imports}print(dist_amp.__file__)"]
    found = subprocess.check_output(command, text=True).strip()
    assert found == str(clone / "dist_amp/__init__.py")


# ---- the README


def test_every_command_that_is_not_run_is_in_the_readme_and_begins_as_listed():
    for start in NOT_RUN:
        assert any(command.startswith(start) for command in readme_commands()), start


@pytest.mark.parametrize("command", run_here())
def test_the_readmes_command_runs_without_a_clone(command, installed, tmp_path, request):
    folder = tmp_path
    (folder / "my_file.py").write_text(TASK)
    words = words_of(command)
    if "run" in words:
        folder = request.getfixturevalue("trained")
    done = installed(folder, *words)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("export run --out model", "model: 1,153 parameters"),
        ("runs .", "TinyRegression  done"),
        ("report run", "run/report.html"),
        ("doctor --device cpu", "ready to train"),
        ("schema --config debug", '"title": "dist_amp"'),
        ("train --config demo --print_config", "steps = 1500"),
        ("launch --config demo --config mine.toml --print_config", "steps = 7"),
        ("plan --config demo --world_size 2", "426,624 parameters"),
        ("sample gpt --config debug", "def "),
        ("verify --config debug --world_sizes 1 --precisions fp32", "passed: "),
        ("tokenize --config debug --data.path my_file.py --data.tokenizer bytes --out t", "tokens"),
    ],
)
def test_other_commands_run_without_a_clone_too(command, said, installed, trained):
    (trained / "mine.toml").write_text("train.steps = 7\n")
    if "gpt" in command and not (trained / "gpt").exists():
        train = f"dist_amp train --config debug --run.dir gpt {FEW_STEPS} {GPT}"
        done = installed(trained, *f"{train} --checkpoint.every 3".split())
        assert done.returncode == 0, done.stderr
    done = installed(trained, "dist_amp", *command.split())
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_command_prints_its_help_without_extras(command, installed, tmp_path):
    done = installed(tmp_path, "dist_amp", command, "--help")
    if command == "bench":
        assert done.returncode == 64
        assert done.stderr.startswith("error: the benchmarks are not installed; ")
    else:
        assert done.returncode == 0, done.stderr
        assert re.search(rf"dist_amp[. ]{command}", done.stdout)


# ---- what is missing


@pytest.mark.slow
@pytest.mark.bad_input("a command, config or setting whose optional package is not installed")
@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("plot run", "'plotext<6'"),
        ("plot run --out loss.png", "matplotlib"),
        ("follow run --to wandb --once", "wandb"),
        ("follow run --to trackio --once", "trackio"),
        ("follow run --to mlflow --once", "mlflow"),
        ("train --config images", "scikit-learn"),
        ("train --config hf_finetune", "transformers"),
        ("train --config debug --data.tokenizer gpt2", "transformers"),
        ("train --config demo --precision.dtype fp8", "torchao"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    command, package, installed, trained
):
    done = installed(trained, "dist_amp", *command.split())
    assert done.returncode == 64
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert f"pip install {package}" in done.stderr


@pytest.mark.bad_input("an unknown config name, to every command that takes settings")
@pytest.mark.parametrize(
    "command",
    ["train", *(pytest.param(each, marks=pytest.mark.slow) for each in commands.WITH_SETTINGS[1:])],
)
def test_every_command_names_the_nearest_config_and_all_that_are_installed(
    command, installed, tmp_path
):
    done = installed(tmp_path, "dist_amp", command, "--config", "dbug")
    assert done.returncode == 64
    names = ", ".join(sorted(path.stem for path in (ROOT / "configs").glob("*.toml")))
    assert done.stderr == (
        "error: --config dbug: neither a file here nor a shipped config; did you mean debug? give "
        f"the path of a TOML file, or one of {names}\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bad_input("`dist_amp demo` with a wrong setting")
@pytest.mark.bad_input("`dist_amp bench` without a clone")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["demo", "--train.stps", "3"],
            "unknown key train.stps on the command line; did you mean train.steps?",
        ),
        (
            ["bench", "overhead"],
            "the benchmarks are not installed; start them in the folder of a clone",
        ),
    ],
)
def test_what_can_not_be_started_is_refused_in_one_line(words, said, installed, tmp_path):
    done = installed(tmp_path, "dist_amp", *words)
    assert (done.returncode, done.stderr) == (64, f"error: {said}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.bad_input("`dist_amp demo` in a folder that can't be written")
def test_the_demo_names_a_folder_that_can_not_be_written(installed, tmp_path):
    (tmp_path / "runs").write_text("no folder")
    done = installed(tmp_path, "dist_amp", "demo", *FEW_STEPS.split(), *GPT.split())
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert re.match(r"error: run\.dir=runs/\S+ can't be written \(Not a directory\); ", line)
    assert (tmp_path / "runs").read_text() == "no folder"


# ---- configs by name


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_a_shipped_config_is_found_by_its_name(here, path):
    assert collect(["--config", path.stem], {}) == collect(["--config", str(path)], {})


def test_later_configs_override_earlier_ones_by_name_too(here):
    (here / "mine.toml").write_text("train.steps = 7\n")
    words = ["--config", "demo", "--config", "mine.toml"]
    config = load_config(words, {"DIST_AMP_EVAL__EVERY": "3"})
    assert (config.train.steps, config.optim.lr, config.eval.every) == (7, 4e-3, 3)
    assert load_config(["--config", "mine.toml", "demo"], {}).train.steps == 1500


def test_a_file_here_comes_before_a_shipped_config_and_a_folder_does_not(here):
    (here / "debug").mkdir()  # as the folder of a run or a project
    (here / "demo").write_text("train.steps = 7\n")
    assert load_config(["--config", "debug"], {}).train.steps == 20
    assert load_config(["--config", "demo"], {}).train.steps == 7


@pytest.mark.bad_input("a wrong value in a shipped config")
def test_an_error_in_a_shipped_config_names_its_path_and_line(here, monkeypatch):
    monkeypatch.setattr("dist_amp.config.load.shipped_folder", lambda: here)
    (here / "configs").mkdir()
    (here / "configs/demo.toml").write_text("[train]\nsteps = 0\n")
    with pytest.raises(ConfigError, match=rf"train\.steps=0 in {here}/configs/demo\.toml, line 2"):
        load_config(["--config", "demo"], {})


@pytest.mark.bad_input("a package that was installed without its configs")
@pytest.mark.parametrize(
    "recorded", [None, ["dist_amp/files.py"], ["share/dist_amp/configs/debug.toml"]]
)
def test_an_installation_without_its_files_is_named(here, monkeypatch, recorded):
    paths = [Recorded(here / path) for path in recorded] if recorded else None
    monkeypatch.setattr(files, "__file__", str(here / "site-packages/dist_amp/files.py"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: paths)
    text = "is installed without configs/debug.toml and its other files; install its wheel"
    with pytest.raises(ConfigError, match=text):
        load_config(["--config", "demo"], {})
    assert load_config([], {}).train.steps == 100


class Recorded(importlib.metadata.PackagePath):
    """A file of a distribution, at an absolute path."""

    def locate(self):
        return Path(self)
