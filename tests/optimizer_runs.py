"""Settings of short runs of optimizers, their gradients, and counts of their operations."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp")]


def words(folder, strategy, *more):
    small = ["--train.steps", 10, "--train.micro_batch_size", 2, "--optim.lr", 0.01]
    small += ["--data.shuffle", "false", "--parallel.strategy", strategy]
    return [*small, "--run.dir", str(folder), *more]


class Counter(TorchDispatchMode):
    """Counts the operations with this in their names."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.name in str(function)
        return function(*args, **(kwargs or {}))


def given_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements, src_data_rank=None)
