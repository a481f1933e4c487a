"""Core as test_strangers.py tests it, with explain."""

from dist_amp.errors import DataError
from dist_amp.supervise.explain import explain_copies


def test_an_average_of_the_model_under_fsdp_is_explained():
    words = "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert"
    error = DataError("the task's on_step(run, report) failed after step 1: it; fix it")
    error.__cause__ = RuntimeError(words)
    message = str(explain_copies(error))
    assert message.startswith("the task's on_step(run, report) failed after step 1: it; FSDP2's")
    assert "use optim.ema for an average of the weights" in message
