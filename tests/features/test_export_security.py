"""Core as test_security.py tests it, with export."""

from dist_amp.commands import export


def test_a_target_of_the_command_line_is_taken_whatever_the_checkpoint_names(hostile, capsys):
    folder = hostile("../runs/mine/evil.py:Task", "evil.py")
    words = [str(folder), "--out", "out", "--task.target", "tiny:Tiny"]
    assert export.main(words) == 0
    assert "named by" not in capsys.readouterr().err
