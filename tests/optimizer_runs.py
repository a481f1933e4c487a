"""Tasks that bring an optimizer of their own, short runs of them, and what operations they do."""

import torch
from tiny import Overflow
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.files import present

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp")]


def words(folder, strategy, *more):
    small = ["--train.steps", 10, "--train.micro_batch_size", 2, "--optim.lr", 0.01]
    small += ["--data.shuffle", "false", "--parallel.strategy", strategy]
    return [*small, "--run.dir", str(folder), *more]


class Operations(TorchDispatchMode):
    """The names of all operations, in order, and the ids of their first arguments."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.sources = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        self.sources.append(id(args[0]) if args else None)
        return function(*args, **(kwargs or {}))


class Counter(Operations):
    """Counts the operations with this in their names."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    @property
    def count(self):
        return sum(self.name in name for name in self.names)


def given_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements, src_data_rank=None)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675: as somebody writes it who does not know this template.

    Its state counts steps as a Python number.
    """

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p))
                state["step"] += 1
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                update = average.lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.lerp_(p.grad, 1 - beta2)


def adamw_8bit(groups, lr):
    import torchao.optim

    class AdamW8bit(torchao.optim.AdamW8bit):
        def step(self, closure=None):
            # It compiles its step, which takes half a minute.
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return AdamW8bit(groups, lr=lr, block_size=32)


MAKERS = {
    "adafactor": lambda groups, lr: torch.optim.Adafactor(groups, lr=lr),
    "lion": Lion,
    "adamw_8bit": adamw_8bit,
    # Its state starts at other numbers than zero.
    "nadam": lambda groups, lr: torch.optim.NAdam(groups, lr=lr),
    "rprop": lambda groups, lr: torch.optim.Rprop(groups, lr=lr),
    "fused adamw": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True),
    "fused sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=True),
}
if present("optimizers.muon"):
    from dist_amp.optimizers.muon import Muon

    MAKERS.update(muon=Muon)


class Own(Overflow):
    """Its optimizer is the one of that name. bad: rows whose gradients are infinite."""

    def __init__(self, kind: str = "lion", bad: tuple[int, ...] = (), width: int = 8):
        super().__init__(bad)
        self.kind = kind
        self.width = width

    def build_model(self):
        sizes = ((8, self.width), (self.width, self.width))
        layers = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in sizes]
        return nn.Sequential(*layers, nn.Linear(self.width, 1))

    def optimizer(self, groups, lr):
        return MAKERS[self.kind](groups, lr)
