"""Core as test_config.py tests it, with causal_lm."""

import pytest
from test_config import assert_says, load, refusal, values, written

from dist_amp.config.text import to_toml


@pytest.mark.parametrize("text", ["true", "--dashes first", "", "two\nlines", "a = 'b' \"c\" # d"])
def test_a_text_is_not_changed(tmp_path, text):
    config = load(f"--task.args.prompt={text}")
    assert config.task.args.prompt == text
    assert load("--config", written(tmp_path, to_toml(config))).task.args.prompt == text


def test_the_environment_sets_a_tasks_argument_and_may_have_the_launch_scripts_variable():
    assert load(DIST_AMP_TASK__ARGS__WIDTH="64").task.args.width == 64
    assert values(load(DIST_AMP_PYTHON="/usr/bin/python3")) == values(load())


# What is shown.


def test_written_toml_reads_back_the_same(tmp_path):
    words = "--optim.betas 0.8 0.9 --optim.eps 1e-12 --train.accumulation_steps 3 --eval.every off"
    words += " --use_amp false --task.args.width 64 --run.dir"
    config = load(*words.split(), 'a "b" \\c')
    assert values(load("--config", written(tmp_path, to_toml(config)))) == values(config)


def test_the_line_of_a_key_in_an_inline_table_or_after_a_longer_text_is_found(tmp_path):
    path = written(tmp_path, "[precision]\ntf32 = true\nscaler = { init_scale = 0.5 }")
    assert_says(
        refusal("--config", path), f"precision.scaler.init_scale=0.5 in {path}, line 3 must"
    )
    text = '[task.args]\nprompt = """\nsteps\n"""\n[ train ]\nsteps = 0'
    assert_says(refusal("--config", written(tmp_path, text)), "line 6 must be at least 1")
    text = '[task.args]\nprompt = """\n[train]\nsteps = 9\n"""\n[train]\nsteps = 0'
    assert_says(refusal("--config", written(tmp_path, text)), "line 7 must be at least 1")


@pytest.mark.bad_input("an unknown or wrong argument for the task's constructor")
def test_an_unknown_task_argument_lists_the_right_ones():
    message = refusal("--task.args.nope", "1")
    assert_says(message, "task.args.nope", "the task takes context,", "sample_bytes")
