"""Core as test_strangers.py tests it, with explain."""

import pytest
import torch
from test_strangers import with_forward
from tiny import Tiny, make_run, take_steps
from torch import nn

from dist_amp.errors import DataError
from dist_amp.supervise.explain import explain_copies, explain_data
from dist_amp.world import World


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.mm(weight.t()), x.t().mm(gradient)


class OwnFunction(Tiny):
    def build_model(self):
        def forward(model, x):
            return Product.apply(model.net(x), model.weight)

        model = with_forward(forward, net=nn.Linear(8, 8))
        model.weight = nn.Parameter(torch.randn(8, 1))
        return model


@pytest.mark.bad_input("a torch.autograd.Function without custom_fwd under autocast")
def test_an_own_function_that_mixes_dtypes_under_autocast_is_explained():
    run = make_run(World(), OwnFunction(), "--precision.dtype", "bf16")
    with pytest.raises(RuntimeError) as error:
        take_steps(run, 1)
    explained = explain_data(error.value, 0)
    assert isinstance(explained, DataError)
    message = str(explained)
    assert message.startswith("rank 0: a torch.autograd.Function mixes dtypes, since autocast")
    assert "test_strangers.py, line" in message
    assert "torch.amp.custom_fwd" in message


def test_an_average_of_the_model_under_fsdp_is_explained():
    words = "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert"
    error = DataError("the task's on_step(run, report) failed after step 1: it; fix it")
    error.__cause__ = RuntimeError(words)
    message = str(explain_copies(error))
    assert message.startswith("the task's on_step(run, report) failed after step 1: it; FSDP2's")
    assert "use optim.ema for an average of the weights" in message
