"""What test_schema.py tests, with other features."""

from test_schema import problems

from dist_amp.config.help import json_schema
from examples.sinusoid import Sinusoid


def test_the_arguments_of_a_task_are_checked_if_it_is_named():
    of_task = json_schema(Sinusoid)
    arguments = '[task]\ntarget = "examples/sinusoid.py:Sinusoid"\n[task.args]\n'
    assert problems(arguments + "hidden_layers = 8", of_task) == []
    (said,) = problems(arguments + "hidden_layer = 8", of_task)
    assert "hidden_layer" in said
    assert problems(arguments + "hidden_layer = 8") == [], "of an unknown task nothing is known"
