"""`dist_amp board`: a run says how to watch it, and a folder without one is refused."""

import pytest
from tiny import Tiny, make_run

from dist_amp.commands.board import main
from dist_amp.supervise.banner import print_banner
from dist_amp.world import World


def test_a_run_names_the_command_that_shows_it(tmp_path, capsys):
    print_banner(make_run(World(), Tiny(), "--run.dir", tmp_path))
    assert f"watch  dist_amp board {tmp_path}\n" in capsys.readouterr().out


@pytest.mark.bad_input("`dist_amp board` of a folder without a run")
@pytest.mark.parametrize(
    ("words", "said"), [([], "required: RUN|FOLDER"), (["nowhere"], "nowhere holds no run; give")]
)
def test_board_of_no_run_is_refused(words, said, capsys):
    assert main(words) == 64
    assert said in capsys.readouterr().err
