"""Core as test_train.py tests it, with sampling."""

from test_train import TINY, summary_of


def test_a_sample_that_fails_does_not_undo_a_finished_training(launch, tmp_path):
    (tmp_path / "odd.py").write_text(
        "from tiny import Tiny\n\nclass Odd(Tiny):\n    def sample(self, model):\n        raise "
        "KeyError('no prompt')\n"
    )
    done = launch(0, *TINY, "--task.target", "odd:Odd", "--train.steps", "2", "--run.dir", "run")
    assert done.returncode == 0
    said = "the task's sample(model) failed: KeyError: 'no prompt' (odd.py, line 5); python -m"
    assert said in done.stderr
    assert summary_of(tmp_path / "run")["stopped_by"] == "completed"
