"""Core as test_tensorboard.py tests it, with board."""

import pytest

from dist_amp.commands.board import main as board


@pytest.mark.bad_input("`dist_amp board` of a folder without a run")
@pytest.mark.parametrize("words", [[], ["nowhere"]])
def test_board_of_no_run_is_refused(words, capsys):
    assert board(words) == 64
    assert "there is no run; give the folder of a run, or" in capsys.readouterr().err
