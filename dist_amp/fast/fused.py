"""torch's AdamW and SGD with their fused kernels called on lists that are made once.

The kernels and the optimizer state are torch's own, and hooks are called. torch's `step` gathers parameters, moments
and step counts anew each time, sorts them by device and dtype, counts each parameter's steps separately, and under
FSDP2 dispatches all of it through DTensor. Measured for AdamW on 4 and 52 tensors of 64 x 64 on one CPU core: 22 and
163 us per step, against 101 and 525 by torch's own with fused=True. Where a release of torch lacks the kernels,
`optimizer_class` gives torch's own optimizers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import ConfigError

_adamw_kernel: Any = getattr(torch, "_fused_adamw_", None)
_sgd_kernel: Any = getattr(torch, "_fused_sgd_", None)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; an ordinary tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step() divides by `optimizer.grad_scale` and skips where `optimizer.found_inf` is 1, as fused ones do.

    Not if a subclass replaces the step of a fused class, since it may ignore both; nor torch's own fused SGD, which
    leaves uninitialised memory in its momentum if the first step is skipped.
    """
    kind = type(optimizer)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if issubclass(kind, _Bundled):  # first: it is asked twice per step
        return kind.step is _Bundled.step
    if issubclass(kind, torch.optim.SGD):
        return False
    return "_step_supports_amp_scaling" in vars(kind) or kind.step.__module__.startswith("torch.optim.")


def takes_device_lr(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the learning rate of a group may be a tensor on the device, which the kernel reads there."""
    return takes_grad_scale(optimizer) and isinstance(optimizer, _Bundled | torch.optim.Adam | torch.optim.AdamW)


def on_cpu_in_half(parameters: Iterable[Tensor]) -> bool:
    """Whether a parameter is one that torch's fused SGD silently leaves as it is (pytorch#191763)."""
    return any(p.device.type == "cpu" and p.dtype in (torch.float16, torch.bfloat16) for p in parameters)


def optimizer_class(name: str, fused: bool, groups: Sequence[dict[str, Any]] = ()) -> Any:
    """The class for "adamw" or "sgd" of these groups' parameters."""
    own = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    ours: dict[str, Any] = {"adamw": FusedAdamW if _adamw_kernel else None, "sgd": FusedSGD if _sgd_kernel else None}
    works = fused and not (name == "sgd" and on_cpu_in_half(p for group in groups for p in group["params"]))
    return ours[name] if works and ours[name] is not None else own[name]


@dataclass(frozen=True)
class Bundle:
    """What one kernel call updates: parameters of one group, device and dtype, with their state by its names."""

    group: dict[str, Any]
    parameters: list[Tensor]
    state: dict[str, list[Tensor]]
    sharded: bool

    def with_gradients(self) -> "Bundle":
        """The part of it that has gradients in this step."""
        there = [index for index, p in enumerate(self.parameters) if p.grad is not None]
        state = {name: [values[index] for index in there] for name, values in self.state.items()}
        return Bundle(self.group, [self.parameters[index] for index in there], state, self.sharded)

    def locals(self) -> tuple[list[Tensor], list[Any]]:
        """(parameters, gradients): this rank's shards. FSDP2 may replace a shard's tensor, so they are not kept."""
        gradients = [p.grad for p in self.parameters]
        if not self.sharded:
            return self.parameters, gradients
        return [local(p) for p in self.parameters], [local(g) for g in gradients]  # type: ignore[arg-type]


class _Bundled(torch.optim.Optimizer):
    """`grad_scale` and `found_inf` as torch's fused optimizers take them: scalars on the device, or None.

    grad_scale: what the gradients are divided by. found_inf: 1 where nothing is to change, else 0.
    Every parameter gets its state at once, at zero: so it can be saved if the first step is skipped, and torch's fused
    SGD would leave uninitialised memory in it then. From zero, the first step is the same as torch's own.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True  # by which torch's GradScaler knows such optimizers too

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._initial_state(parameter, group)
        self.bind()

    def _initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        raise NotImplementedError

    def bind(self) -> None:
        """Make the lists; called again by itself when a state is loaded."""
        for group in self.param_groups:
            if option := next((name for name in ("amsgrad", "dampening") if group.get(name)), ""):
                raise ConfigError(f"{option}={group[option]} is not supported by the fused path; use optim.fused=false")
        if not hasattr(self, "_bundles"):
            self.register_load_state_dict_post_hook(lambda _: self.bind())
        kinds: dict[tuple[Any, ...], tuple[dict[str, Any], list[Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                kinds.setdefault((number, p.device, p.dtype, type(p)), (group, []))[1].append(p)
        self._bundles = [
            Bundle(
                group,
                parameters,
                {name: [local(self.state[p][name]) for p in parameters] for name in self.state[parameters[0]]},
                hasattr(parameters[0], "to_local"),
            )
            for group, parameters in kinds.values()
        ]
        self._all = [p for bundle in self._bundles for p in bundle.parameters]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        bundles = self._bundles
        if any(p.grad is None for p in self._all):
            self._count_separately()
            bundles = [part for bundle in bundles if (part := bundle.with_gradients()).parameters]
        self._update(bundles)
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})

    # torch would wrap it to call hooks and to open a profiler's range, which costs more than all the rest of it.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none)
        for p in self._all if set_to_none else ():
            p.grad = None

    def _count_separately(self) -> None:
        """Called before a step in which some parameters have no gradient."""

    def _update(self, bundles: list[Bundle]) -> None:
        raise NotImplementedError


class FusedSGD(_Bundled, torch.optim.SGD):
    """torch's own takes no learning rate on the device for sharded parameters."""

    def _initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def _update(self, bundles: list[Bundle]) -> None:
        for bundle in bundles:
            parameters, gradients = bundle.locals()
            _sgd_kernel(
                parameters,
                gradients,
                bundle.state.get("momentum_buffer", []),
                lr=bundle.group["lr"],
                momentum=bundle.group["momentum"],
                weight_decay=bundle.group["weight_decay"],
                dampening=0.0,
                nesterov=bundle.group["nesterov"],
                maximize=bundle.group["maximize"],
                is_first_step=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


class FusedAdamW(_Bundled, torch.optim.AdamW):
    """One count of steps serves all parameters, as long as they have all taken equally many."""

    def _initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        count = torch.zeros((), device=local(parameter).device)
        return {"step": count, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def bind(self) -> None:
        counted = [state for state in self.state.values() if "step" in state and not state["step"].is_meta]
        if counted and len(set(torch.stack([state["step"] for state in counted]).tolist())) == 1:
            for state in counted:
                state["step"] = counted[0]["step"]
        super().bind()
        self._collect_counts()

    def _collect_counts(self) -> None:
        self._counts = _distinct_counts(self._bundles)

    def _count_separately(self) -> None:
        counted = [bundle for bundle in self._bundles if "step" in bundle.state]
        if len(self._counts) == 1 < sum(len(bundle.parameters) for bundle in counted):
            for bundle in counted:
                for index, p in enumerate(bundle.parameters):
                    bundle.state["step"][index] = self.state[p]["step"] = self._counts[0].clone()
            self._collect_counts()

    def _update(self, bundles: list[Bundle]) -> None:
        for count in self._counts if bundles is self._bundles else _distinct_counts(bundles):
            count.add_(1)
            if self.found_inf is not None:
                count.sub_(self.found_inf)
        for bundle in bundles:
            self._update_bundle(bundle)

    def _update_bundle(self, bundle: Bundle) -> None:
        parameters, gradients = bundle.locals()
        beta1, beta2 = bundle.group["betas"]
        _adamw_kernel(
            parameters,
            gradients,
            bundle.state["exp_avg"],
            bundle.state["exp_avg_sq"],
            [],
            bundle.state["step"],
            lr=bundle.group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=bundle.group["weight_decay"],
            eps=bundle.group["eps"],
            amsgrad=False,
            maximize=bundle.group["maximize"],
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )


def _distinct_counts(bundles: Iterable[Bundle]) -> list[Tensor]:
    """The step counts of these bundles, one that serves several parameters once."""
    return list({id(count): count for bundle in bundles for count in bundle.state.get("step", [])}.values())
