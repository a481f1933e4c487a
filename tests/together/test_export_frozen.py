"""What test_frozen.py tests, with export."""

import pytest
import torch
from test_checkpoint import settings
from test_frozen import AdapterTask, trained_run
from tiny import make_run, parameters_of

from dist_amp.checkpoint.weights import load_weights
from dist_amp.errors import DataError
from dist_amp.world import World


@pytest.mark.bad_input("a checkpoint of an adapter resumed or exported on another frozen base")
def test_another_base_is_refused_by_name(tmp_path):
    trained_run(World(), tmp_path, "single", 1)
    with pytest.raises(DataError) as error:
        trained_run(World(), tmp_path, "single", 2, task=AdapterTask(base=1e-3))
    assert "was trained on another frozen base.weight (1 such), which it" in str(error.value)
    torch.manual_seed(0)  # run.seed
    with pytest.raises(DataError, match="another frozen base.weight"):
        load_weights(AdapterTask(base=1e-3).build_model(), tmp_path / "checkpoints/step_00000001")


def test_a_checkpoint_that_has_all_parameters_is_resumed_with_some_of_them_frozen(tmp_path):
    task = AdapterTask(freeze=False)
    whole = trained_run(World(), tmp_path, "single", 2, task=task)
    run = make_run(World(), AdapterTask(), *settings(tmp_path / "b", "single", "fp32"))
    load_weights(run.parallel.module, tmp_path / "checkpoints/step_00000002")
    assert all(torch.equal(value, whole[name]) for name, value in parameters_of(run).items())
