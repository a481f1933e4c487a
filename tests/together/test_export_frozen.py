"""What test_frozen.py tests, with export."""

import pytest
import torch
from messages import message_of
from test_checkpoint import settings
from test_frozen import AdapterTask, trained_run
from tiny import make_run, parameters_of

from dist_amp.checkpoint.weights import load_weights
from dist_amp.world import World


@pytest.mark.bad_input("a checkpoint of an adapter resumed or exported on another frozen base")
def test_another_base_is_refused_by_name(tmp_path):
    trained_run(World(), tmp_path, "single", 1)
    other = AdapterTask(base=1e-3)
    text = message_of(65, trained_run, World(), tmp_path, "single", 2, task=other)
    assert "was trained on another frozen base.weight (1 such), which it" in text
    torch.manual_seed(0)  # run.seed
    checkpoint = tmp_path / "checkpoints/step_00000001"
    text = message_of(65, load_weights, other.build_model(), checkpoint)
    assert "another frozen base.weight" in text


def test_a_checkpoint_that_has_all_parameters_is_resumed_with_some_of_them_frozen(tmp_path):
    task = AdapterTask(freeze=False)
    whole = trained_run(World(), tmp_path, "single", 2, task=task)
    run = make_run(World(), AdapterTask(), *settings(tmp_path / "b", "single", "fp32"))
    load_weights(run.parallel.module, tmp_path / "checkpoints/step_00000002")
    torch.testing.assert_close(parameters_of(run), whole, rtol=0, atol=0)
