"""Core as test_native_precision.py tests it, with explain."""

import pytest

from dist_amp.errors import ConfigError
from dist_amp.precision import Precision
from dist_amp.settings import PrecisionConfig
from dist_amp.supervise.explain import explain_half
from dist_amp.world import World


@pytest.mark.bad_input("half precision that a CPU's library has no kernel for")
def test_a_layer_that_a_cpu_can_not_compute_in_half_precision_is_one_line():
    words = "could not create a primitive descriptor for the LSTM forward propagation primitive."
    precision = Precision(PrecisionConfig(), "autocast", World().device)
    explained = explain_half(RuntimeError(words), precision, 1)
    assert isinstance(explained, ConfigError)
    assert str(explained).startswith("rank 1: this CPU can't compute the model in bf16 (RuntimeErr")
    assert str(explained).endswith("; use --use_amp false")
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert explain_half(other, precision, 1) is other
    whole = Precision(PrecisionConfig(use_amp=False), "nothing", World().device)
    assert explain_half(explained, whole, 1) is explained
