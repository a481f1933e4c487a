"""What a failed call says."""

import pytest

from dist_amp.errors import Failure


def message_of(status, call, *args, **settings):
    """The message of the Failure: one line, with this exit status."""
    with pytest.raises(Failure) as caught:
        call(*args, **settings)
    assert caught.value.exit_code == status
    assert "\n" not in str(caught.value)
    return str(caught.value)
