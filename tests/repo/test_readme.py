"""The Python of the README, docs/recipes.md and docs/own_loop.md does what it shows."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from ranks import on_ranks
from tiny import Rows, take_steps, whole

from dist_amp.config.load import load_config
from dist_amp.distributed import machine
from dist_amp.run import build_run
from dist_amp.world import World

README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs/recipes.md").read_text()
TASK, SNIPPET = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(NOTEBOOK,) = re.findall(r"```python\n(.*?)```", RECIPES, re.DOTALL)
OWN_LOOP = ROOT / "docs/own_loop.md"
LOOP, CELL = re.findall(r"```python\n(.*?)```", OWN_LOOP.read_text(), re.DOTALL)


def test_the_readmes_task_trains_by_the_command_that_it_shows(launch, tmp_path):
    (tmp_path / "my_file.py").write_text(TASK)
    (arguments,) = re.findall(
        r"^python -m dist_amp.train (--task.target my_file.*)$", README, re.MULTILINE
    )
    done = launch(0, *arguments.split(), "--run.dir", "run", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "done: 300 steps (300 applied, 0 skipped)" in done.stdout


def test_the_readmes_snippet_trains_and_leaves_no_files(launch, tmp_path):
    (tmp_path / "my_file.py").write_text(TASK)
    (tmp_path / "notebook.py").write_text(SNIPPET)
    done = launch.module("notebook.py", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    printed = re.search(r"last loss ([\d.]+), held out ([\d.]+)\n$", done.stdout)
    losses = [float(loss) for loss in printed.groups()]
    assert max(losses) < 2, "from 16 at the start, the mean of |x| squared"
    files = sorted(path.name for path in tmp_path.iterdir() if path.name[0] not in "._")
    assert files == ["my_file.py", "notebook.py"]


KILLED = "import os\nfrom pathlib import Path\n"
KILL = """
        if run.step == 30 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), 9)
"""


def test_the_recipes_loop_is_killed_run_again_and_ends_as_if_undisturbed(launch, tmp_path):
    (tmp_path / "my_file.py").write_text(TASK)
    (tmp_path / "undisturbed.py").write_text(NOTEBOOK)
    script = KILLED + NOTEBOOK.replace("--run.dir mine", "--run.dir killed_run")
    script = script.replace("        run.save()\n", f"        run.save(){KILL}")
    (tmp_path / "killed.py").write_text(script)

    scripts = ("undisturbed.py", "killed.py", "killed.py")
    through, killed, rerun = (launch.module(name, HOME=str(tmp_path)) for name in scripts)
    assert through.returncode == 0, through.stderr
    assert killed.returncode != 0
    assert rerun.returncode == 0, rerun.stderr
    evaluations = re.findall(r"^eval .*$", through.stdout, re.MULTILINE)
    assert len(evaluations) == 5
    assert re.findall(r"^eval .*$", rerun.stdout, re.MULTILINE) == evaluations[-2:]
    (shard,) = tmp_path.glob("mine/checkpoints/step_00000050/*.distcp")
    (other,) = tmp_path.glob("killed_run/checkpoints/step_00000050/*.distcp")
    assert other.read_bytes() == shard.read_bytes()


def test_the_lstm_that_the_recipes_show_trains_in_float32_where_bf16_is_emulated(monkeypatch):
    (example,) = re.findall(r"(?s)## Train an LSTM on a CPU\n\n```py\n(.*?)```", RECIPES)
    exec(textwrap.dedent(example), shown := {"F": torch.nn.functional, "nn": torch.nn})
    methods = {name: shown[name] for name in ("build_model", "loss_sum")}
    rows = Rows(x=torch.randn(16, 5, 8), y=torch.zeros(16, 5, 1))
    methods |= {"build_dataset": lambda self, split: rows, "weight": lambda self, batch: 8}
    monkeypatch.setattr(machine, "is_native", lambda *_: False)
    for words in ([], ["--use_amp", "false"]):
        config = load_config(["--run.device", "cpu", "--run.dir", "unused", *words], environ={})
        run = build_run(config, task=type("Shown", (), methods)())
        (report,) = take_steps(run, 1)
        assert (run.precision.name, bool(report.losses[0].isfinite())) == ("fp32", True)


# ---- docs/own_loop.md: two models in a loop of one's own, and fit ----


def trained(world, loop, *words):
    """Both models' parameters after some steps of the page's loop."""
    config = load_config(["--train.steps", "6", "--optim.lr", "1e-2", *words], environ={})
    names = {"__name__": "gan"}
    exec(compile(loop, OWN_LOOP, "exec"), names)
    sides = names["train"](world, config)
    return [whole(p) for side in sides for p in side.parameters]


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (2, "fsdp"), (4, "hsdp")])
def test_two_models_on_ranks_with_the_same_data_take_the_steps_of_one_process(ranks, strategy):
    same_data = LOOP.replace("config.run.seed + 1 + world.rank", "config.run.seed + 1")
    alone = trained(World(), same_data, "--use_amp", "false")
    words = ["--parallel.strategy", strategy, "--use_amp", "false"]
    for parameters in on_ranks(ranks, trained, same_data, *words):
        # Six steps of Adam add up roundings of 1e-7.
        torch.testing.assert_close(parameters, alone, rtol=0, atol=1e-5)


def test_both_models_learn_in_half_precision_and_an_overflow_skips_their_step():
    words = ["--precision.dtype", "fp16", "--train.steps", "1"]
    # The rate is no number that moves a parameter.
    begun = trained(World(), LOOP, *words, "--optim.lr", "1e-30")
    skipped = trained(World(), LOOP, *words, "--precision.scaler.init_scale", str(2.0**60))
    torch.testing.assert_close(skipped, begun, rtol=0, atol=1e-12)
    for before, after in zip(begun, trained(World(), LOOP, *words), strict=True):
        assert after.isfinite().all()
        assert not torch.equal(before, after)


def test_the_cell_trains_in_a_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_file.py").write_text("from tiny import Tiny as TinyRegression\n")
    monkeypatch.setenv("DIST_AMP_TRAIN__STEPS", "3")
    names = {}
    exec(CELL, names)
    assert names["summary"]["steps"] == 3
