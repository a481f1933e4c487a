"""`dist_amp diff --deep`: two runs take their steps again in this process, and are compared inside.

First the parameters and samples of a step; then, in the order in which they are computed, what each
module returned, the losses, the gradients that each module got, and those of the parameters. Where
they part, the operations of torch's dispatcher, such as aten.gelu, are compared too.

Docs: docs/debugging.md
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.checkpoint.format import config_at
from dist_amp.commands.replay import run_at
from dist_amp.config.text import read_flat
from dist_amp.diagnostics.consistency import hash_samples
from dist_amp.diagnostics.trace import clean_name, hash_tensor
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import DataError
from dist_amp.loading.nested import tensors
from dist_amp.step import Run, train_step

SAMPLED = 2**12  # elements of each tensor that are kept to say how far it is off
# In the order of comparison, and how a line begins that names the module.
KINDS = {
    "forward": "the forward of",
    "loss": "the loss of",
    "backward": "the gradient that arrives at the output of",
    "gradient": "the gradient of the parameters of",
}


class Value(NamedTuple):
    """What a module returned or got, or a gradient."""

    module: str
    hashes: list[int]
    samples: list[Tensor]


def value_of(module: str, content: Any) -> Value:
    leaves = [leaf.detach() for leaf in tensors(content) if leaf.layout == torch.strided]
    samples = [leaf.flatten()[:: 1 + leaf.numel() // SAMPLED].clone() for leaf in leaves]
    return Value(module, [int(hash_tensor(leaf)) for leaf in leaves], samples)


class Recorder(TorchDispatchMode):
    """Keeps what a step computes.

    values: by kind, in order. operations: by module, "" outside of all, each a name and hashes.
    """

    def __init__(self, run: Run):
        super().__init__()
        self.values: dict[str, list[Value]] = defaultdict(list)
        self.operations: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
        self._running = [""]
        # By id, and kept so that no id is used twice: the outermost module that returned it.
        self._returned: dict[int, tuple[Tensor, str]] = {}
        self._module = run.parallel.module
        self._optimizer = run.optimizer

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self._module.named_modules():
                name = clean_name(name)
                enter = partial(self._enter, name)
                leave = partial(self._leave, name)
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
            hooks.enter_context(self._optimizer.register_step_pre_hook(self._keep_gradients))
            hooks.enter_context(self)
            yield

    def _enter(
        self,
        name: str,
        module: nn.Module,
        args: Any,
    ) -> None:
        self._running.append(name)

    def _leave(
        self,
        name: str,
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        self._running.pop()
        self.values["forward"].append(value_of(name, output))
        for leaf in tensors(output):
            if leaf.requires_grad and id(leaf) not in self._returned:
                leaf.register_hook(partial(self._receive, id(leaf)))
            self._returned[id(leaf)] = leaf, name

    def _receive(
        self,
        key: int,
        gradient: Tensor,
    ) -> None:
        self.values["backward"].append(value_of(self._returned[key][1], gradient))

    def _keep_gradients(self, *_: Any) -> None:
        for name, parameter in self._module.named_parameters():
            module = clean_name(name).rpartition(".")[0]
            self.values["gradient"].append(value_of(module, parameter.grad))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = str(function.overloadpacket)
        if not function.is_view and "empty" not in name:  # which has what the memory held before
            self.operations[self._running[-1]].append((name, value_of("", out).hashes))
        return out


class Replayed:
    """One of the runs, with random generators of its own."""

    def __init__(self, folder: Path, step: int):
        """The run before its step `step`, or at an earlier checkpoint."""
        # Of two versions of one module each is imported from its own file.
        module = str(read_flat(config_at(folder, step)).get("task.target")).partition(":")[0]
        if module.endswith(".py"):
            make_room_for(Path(module))
        self._replay = run_at(folder, step)
        self.edited = self._replay.edited
        self.run = self._replay.run
        self._random = random_state(self.run.world.device)

    def parameters(self) -> dict[str, int]:
        named = self.run.parallel.module.named_parameters()
        return {clean_name(name): int(hash_tensor(parameter)) for name, parameter in named}

    def batches(self) -> list[Any]:
        set_random_state(self._random, self.run.world.device)
        micro_batches = next(self.run.data)
        self._random = random_state(self.run.world.device)
        return micro_batches

    def take_step(self, micro_batches: Sequence[Any]) -> Recorder:
        set_random_state(self._random, self.run.world.device)
        recorder = Recorder(self.run)
        with recorder.attached():
            report = train_step(self.run, micro_batches)
        self._replay.callbacks.after_step(report, micro_batches)
        recorder.values["loss"] = [value_of("", report.losses)]
        self._random = random_state(self.run.world.device)
        return recorder


def make_room_for(path: Path) -> None:
    """Forget a module of this name from another file, and what was imported from its folder."""
    file = getattr(sys.modules.get(path.stem), "__file__", None)
    if file and Path(file).resolve() != path.resolve():
        folder = Path(file).resolve().parent
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != folder]
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "").resolve().parent == folder:
                del sys.modules[name]


def where_they_part(
    folders: Sequence[Path],
    equal_until: int,
    until: int,
) -> str:
    """Take the steps of both runs again, from where they are known to be equal to `until`.

    Returns where they part, in words. Errors: DataError for a run that changed its settings there.
    """
    for folder in folders:
        if config_at(folder, equal_until + 1) != config_at(folder, until):
            raise DataError(
                f"--deep replays the steps {equal_until + 1} to {until} with one config, and the "
                f"settings of {folder} changed there; compare without it"
            )
    runs = [Replayed(folder, equal_until + 1) for folder in folders]
    try:
        if edited := "; ".join(replayed.edited for replayed in runs if replayed.edited):
            return f"not replayed: {edited}; put that file back as it was, or look there"
        first = max(replayed.run.step for replayed in runs) + 1
        for replayed in runs:
            while replayed.run.step + 1 < first:
                replayed.take_step(replayed.batches())
        return f"both replayed: {first_of_steps(runs, first, until)}"
    finally:
        for replayed in runs:
            replayed.run.close()


def first_of_steps(
    runs: Sequence[Replayed],
    first: int,
    until: int,
) -> str:
    a, _ = runs
    for step in range(first, until + 2):
        before = [run.parameters() for run in runs]
        for name in before[0]:
            if before[0][name] != before[1].get(name):
                where = f"the update of step {step - 1}"
                if step == first:
                    where = f"the start of step {step}"
                return f"{where}: the first other parameters are in {name.rpartition('.')[0]}"
        if step > until:
            break
        batches = [run.batches() for run in runs]
        hashes = [hash_samples(each, a.run.world.device) for each in batches]
        if hashes[0] != hashes[1]:
            return f"step {step}: other samples"
        steps = [run.take_step(each) for run, each in zip(runs, batches, strict=True)]
        if part := first_part(*steps):
            return f"step {step}: {part}"
    return (
        f"the replays are equal up to step {until}: what differed is not in the steps as one "
        "process takes them, but in what one of several ranks read, a callback, the layout, the "
        "environment or the hardware"
    )


def first_part(
    a: Recorder,
    b: Recorder,
) -> str:
    """Where one step's values part, in words; "" if they are equal."""
    for kind in KINDS:
        for pair in zip_longest(a.values[kind], b.values[kind]):
            if pair[0] and pair[1] and pair[0][:2] == pair[1][:2]:
                continue
            module = (pair[0] or pair[1]).module
            place = module if kind == "forward" else ""
            text = f"{KINDS[kind]} {module or 'the model'}"
            if kind == "backward" and not module:
                text = "the gradient of the model's output, by the loss or what divides it"
            if name := first_operation(a.operations[place], b.operations[place]):
                text += f", {name}"
            apart, largest = distance(*pair)
            if apart:
                text += f"; differs by {apart:.2g}, elements up to {largest:.2g}"
            return text
    return ""


def first_operation(a: Sequence[tuple[str, Any]], b: Sequence[tuple[str, Any]]) -> str:
    """The name of the first that differs; "" if none does."""
    nothing: tuple[str, list[int]] = ("nothing", [])
    for of_a, of_b in zip_longest(a, b, fillvalue=nothing):
        if of_a[0] != of_b[0]:
            return f"{of_a[0]} in A, {of_b[0]} in B"
        if of_a != of_b:
            return of_a[0]
    return ""


def distance(a: Value | None, b: Value | None) -> tuple[float, float]:
    """(the largest difference of two elements, the largest element), of the samples of both."""
    apart = largest = 0.0
    if a is not None and b is not None:
        for x, y in zip(a.samples, b.samples, strict=False):
            if x.shape == y.shape and x.numel():
                apart = max(apart, float((x.double() - y.double()).abs().max()))
                largest = max(largest, float(x.double().abs().max()))
    return apart, largest
