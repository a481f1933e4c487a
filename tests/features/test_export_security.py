"""Core as test_security.py tests it, with export."""

import test_security

from dist_amp.commands import export

# Fixtures.
hostile = test_security.hostile


def test_a_target_of_the_command_line_is_taken_whatever_the_checkpoint_names(hostile, capsys):
    folder = hostile("../runs/mine/evil.py:Task", "evil.py")
    words = [str(folder), "--out", "out", "--task.target", "tiny:Tiny"]
    assert export.main(words) == 0
    assert "named by" not in capsys.readouterr().err
