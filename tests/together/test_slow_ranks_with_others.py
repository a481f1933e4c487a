"""What test_slow_ranks.py tests, with other features."""

import pytest
from test_slow_ranks import check_is_named, warnings_of


@pytest.mark.bad_input(
    "a rank that is slower than the others by itself, or all ranks slower than before"
)
def test_a_rank_that_sleeps_in_its_backward_is_named(launch):
    lines = warnings_of(launch, "backward", ranks=2, steps=20, seconds=0.2)
    check_is_named(1, lines, "backward")
