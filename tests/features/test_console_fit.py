"""Core as test_fit.py tests it, with console."""

import test_fit
import torch
from test_fit import OFTEN, end_of, handlers
from test_script_run import built, same

from dist_amp.config.load import load_config
from dist_amp.run import build_run
from dist_amp.train import fit, main
from dist_amp.world import World

# Fixtures.
undisturbed = test_fit.undisturbed


def test_fit_ends_bit_for_bit_as_the_command_does(tmp_path, undisturbed, capsys):
    words = ["--run.dir", f"{tmp_path}/run", "--task.target", "tests/core/test_script_run.py:Noisy"]
    words += ["--train.steps", "6", "--optim.lr", "1e-2", *map(str, OFTEN)]
    assert main(words) == 0
    by_command = build_run(load_config(words, environ={}))
    by_command.resume()
    assert same(list(end_of(by_command)), list(undisturbed))
    run = built(World(), tmp_path / "peeked", *OFTEN)
    before = handlers()
    next(run.data)
    torch.rand(3)
    capsys.readouterr()
    fit(run)
    assert same(list(end_of(run)), list(undisturbed))
    assert handlers() == before
    said = capsys.readouterr().out
    for line in ("run    ", "step      2/6", "eval       3", "done: 6 steps"):
        assert line in said
    assert (run.folder / "tensorboard").is_dir()
    assert fit(run)["stopped_by"] == "completed"
    assert f"{run.folder} is finished: it took 6 of train.steps=6" in capsys.readouterr().out
