"""What test_callbacks.py tests, with other features."""

import pytest
from test_callbacks import Watched
from tiny import Tiny, log_row, make_run, take_steps

from dist_amp.checkpoint.format import all_checkpoints
from dist_amp.diagnostics.consistency import check_schedule
from dist_amp.errors import ConfigError
from dist_amp.supervise.callbacks import misspelt_methods
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.tasks.hf_causal_lm import HFCausalLM
from dist_amp.tasks.hf_classification import HFClassification
from dist_amp.tasks.sinusoid import Sinusoid
from dist_amp.world import World


class ByState(Tiny):
    share = 1.0

    def schedule(self, step):
        return self.share


@pytest.mark.bad_input("a `schedule(step)` that depends on what changes in training")
def test_a_schedule_that_changes_later_is_refused_in_a_script_too(tmp_path):
    run = make_run(World(), ByState(), "--eval.every", 1, "--run.dir", tmp_path)
    run.evaluate()
    take_steps(run, 2)
    run.task.share = 0.5
    said = "schedule(2) makes the learning rate 0.00015 now, and 0.0003 when the run was built"
    for call in (run.evaluate, run.save):
        with pytest.raises(ConfigError) as error:
            call()
        assert said in str(error.value)
    assert all_checkpoints(tmp_path), "the steps so far are saved"
    with pytest.raises(ConfigError, match=r"schedule\(1\) makes the learning rate"):
        check_schedule(run, log_row(run))


class Helpers(Tiny):
    """Helpers of a task, some with names much like an optional method's."""

    def collate(self, samples):
        return self.collated(samples)

    def on_step(self, run, report):
        return self.on_log_step(run)

    def collated(self, samples): ...
    def on_log_step(self, run): ...
    def tokenize(self, text): ...
    def load_rows(self, path): ...
    def _metric(self): ...


def test_helpers_of_a_task_are_not_warned_of():
    assert misspelt_methods(Helpers()) == {}
    for kind in (Tiny, Watched, CausalLM, Sinusoid, HFCausalLM, HFClassification):
        assert misspelt_methods(kind.__new__(kind)) == {}
