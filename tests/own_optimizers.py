"""Tasks that bring an optimizer of their own, for the tests."""

import torch
from tiny import Overflow
from torch import nn

from dist_amp.files import present


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675: as somebody writes it who does not know this template."""

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
                    state["exp_avg"] = torch.zeros_like(p)
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                update = average.lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.lerp_(p.grad, 1 - beta2)


class Counting(Lion):
    """Its state counts steps as a Python number."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["step"] = state.get("step", 0) + 1


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
    "counting": Counting,
    "nesterov": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True),
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

    def __init__(
        self, kind: str = "lion", bad: tuple[int, ...] = (), width: int = 8, samples: int = 64
    ):
        super().__init__(bad, samples)
        self.kind = kind
        self.width = width

    def build_model(self):
        sizes = ((8, self.width), (self.width, self.width))
        layers = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in sizes]
        return nn.Sequential(*layers, nn.Linear(self.width, 1))

    def optimizer(self, groups, lr):
        return MAKERS[self.kind](groups, lr)
