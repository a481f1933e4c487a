"""What a task, or its optimizer, keeps outside the model: saved where it says how, or warned of.

By state_dict() and load_state_dict(state), each rank's. Other attributes are lost on a resume.
"""

import copy
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.errors import CheckpointRejected, ConfigError, DataError, in_one_line
from dist_amp.step import Run
from dist_amp.task import call_task, kept_by
from dist_amp.world import World, local

METHODS = ("state_dict", "load_state_dict")

FIXES = {
    "the task": "give the task state_dict() and load_state_dict(state), or name it in the task's "
    "`unsaved` if each step sets it anew",
    "the optimizer": "keep it in optimizer.state",
}

SAMPLED_ELEMENTS = 2**16  # of a tensor, spread over it, that are compared


# ---- a task that says what to save ----


def packed_state(task: Any) -> Tensor:
    """task.state_dict() as [bytes] uint8. Errors: DataError for what a load would not accept."""
    file = io.BytesIO()
    torch.save(call_task(DataError, "state_dict()", task.state_dict), file)
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    unpacked(content)
    return content


def unpacked(content: Tensor) -> Any:
    """The state that `packed_state` packed; nothing in it is executed."""
    try:
        return torch.load(io.BytesIO(content.numpy().tobytes()), "cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"the task's state_dict() can't be read back: {in_one_line(error)}; let it hold "
            "tensors, numbers, texts, and lists and dicts of these"
        ) from error


def expected_state(metadata: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """{name: room for the state} that this rank takes, modulo the saved world size; or {}."""
    saved = [name for name in metadata if name.startswith("task.")]
    if not saved:
        return {}
    name = str(rank % len(saved))
    entry = metadata.get(f"task.{name}")
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointRejected(f".metadata has no task.{name} that is a tensor")
    return {name: torch.empty(entry.size, dtype=torch.uint8)}


def load_state(task: Any, states: Mapping[str, Tensor], saved_ranks: int, world: World) -> None:
    """Give the task what `expected_state` names, once it is read."""
    if not states:
        world.warn("the checkpoint has no state of the task; it starts with its first values")
        return
    if saved_ranks != world.world_size:
        world.warn(
            f"the checkpoint has a state of the task for each of {saved_ranks} ranks: rank r of "
            f"{world.world_size} takes that of rank r mod {saved_ranks}"
        )
    (content,) = states.values()
    call_task(DataError, "load_state_dict(state)", task.load_state_dict, unpacked(content))


# ---- what changes unsaved ----


class Unsaved:
    """Warns of what a task without state_dict, and an optimizer, keep where no checkpoint looks."""

    def __init__(self, run: Run):
        """Errors: ConfigError for one of state_dict and load_state_dict alone, or odd unsaved."""
        self._run = run
        methods = [name for name in METHODS if hasattr(run.task, name)]
        if len(methods) == 1:
            raise ConfigError(
                f"the task has {methods[0]}, but not both of state_dict() and "
                "load_state_dict(state), which save and restore what it keeps; add the other"
            )
        self._unsaved = getattr(run.task, "unsaved", ())
        if not isinstance(self._unsaved, tuple | list | set):
            raise ConfigError(f"the task's unsaved={self._unsaved!r}: give a tuple of names")
        self._owners: dict[str, Any] = {"the optimizer": run.optimizer}
        if not methods:
            self._owners["the task"] = run.task
        self._digests = self._current()
        self._named: set[tuple[str, str]] = set()

    def warn_of_changes(self) -> None:
        """Name the attributes that have changed, once each."""
        now = self._current()
        for owner, before in self._digests.items():
            changed = [name for name in now[owner] if now[owner][name] != before.get(name)]
            changed = [name for name in changed if name not in self._unsaved]
            changed = [name for name in changed if (owner, name) not in self._named]
            self._named |= {(owner, name) for name in changed}
            if changed:
                self._run.world.warn(
                    f"{owner} keeps {', '.join(changed)}, which changed and is in no checkpoint: a "
                    f"resumed run would begin with the first value; {FIXES[owner]}, unless it is "
                    "made anew from what is saved"
                )
        self._digests = {owner: before | now[owner] for owner, before in self._digests.items()}

    def _current(self) -> dict[str, dict[str, list[str]]]:
        module = self._run.parallel.module
        return {
            name: {
                attribute: [digest(leaf) for leaf in leaves]
                for attribute, leaves in kept_by(owner, module).items()
            }
            for name, owner in self._owners.items()
        }


def digest(leaf: Any) -> str:
    """Tells whether a leaf has changed; of a large tensor some elements count."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return repr(leaf)
    flat = local(leaf.detach()).reshape(-1)
    sampled = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].cpu().contiguous()
    content = hashlib.sha256(sampled.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tuple(leaf.shape)} {content}"


# ---- what a check must not change ----

OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def without_effects(run: Run) -> Iterator[Any]:
    """A copy of the task to call; inside, what modules keep besides tensors are copies too.

    Use it inside `no_side_effects`. A call that writes to a parameter, on any rank, fails.
    Errors: those of copy.deepcopy.
    """
    module = run.parallel.module
    dataset = run.data.fetch.dataset
    # These are not copied, nor what the dataset holds: it may be large, and is only read.
    shared = [run.model, *module.modules(), *module.parameters(), *module.buffers()]
    if dataset is not run.task:
        shared += [dataset, *getattr(dataset, "__dict__", {}).values()]
    memo = {id(one): one for one in shared if one is not run.task}
    parts = [vars(part) for part in module.modules()]
    before = [dict(part) for part in parts]
    kept = [
        {k: v for k, v in part.items() if k not in OF_EVERY_MODULE and not k.startswith("__")}
        for part in before
    ]
    task, fetch, copies = copy.deepcopy((run.task, run.data.fetch, kept), memo)
    run.data.fetch, fetch = fetch, run.data.fetch
    try:
        for part, copied in zip(parts, copies, strict=True):
            part.update(copied)
        with NoWrites(module.parameters()):
            yield task
    finally:
        run.data.fetch = fetch
        for part, values in zip(parts, before, strict=True):
            for name in part.keys() - values.keys():
                del part[name]
            part.update(values)


class NoWrites(TorchDispatchMode):
    """Refuses operations that write to one of the tensors."""

    supports_higher_order_operators = True

    def __init__(self, kept: Iterable[Tensor]):
        super().__init__()
        self._storages = {self._starts(one.detach()) for one in kept}

    def _starts(self, tensor: Tensor) -> int:
        return local(tensor).untyped_storage().data_ptr()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema = getattr(function, "_schema", None)
        for argument, value in zip(getattr(schema, "arguments", ()), args, strict=False):
            written = tree_leaves(value) if argument.is_write else []
            for one in written:
                if isinstance(one, Tensor) and self._starts(one) in self._storages:
                    raise RuntimeError(f"{function} would change a parameter")
        return function(*args, **(kwargs or {}))


# ---- what must be equal at the start ----


def check_kept(run: Run) -> None:
    """Warn of what is never trained. Errors: DataError for a tensor that differs between ranks."""
    kept = kept_by(run.task, run.parallel.module)
    digests = {}
    for name, leaves in kept.items():
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        digests[name] = [digest(tensor) for tensor in tensors]
        trained = sum(isinstance(leaf, nn.Parameter) and leaf.requires_grad for leaf in tensors)
        if trained:
            run.world.warn(untrained_text(name, trained))
    first, *others = run.world.gather(digests)
    for rank, other in enumerate(others, start=1):
        for name, value in other.items():
            if value != first.get(name):
                raise DataError(
                    f"the task's attribute {name} is not the same on ranks 0 and {rank}; draw it "
                    "with a fixed seed, or from the generators of torch, NumPy and Python, which "
                    "have the same seed on every rank in its constructor and build_model"
                )


def untrained_text(name: str, count: int) -> str:
    return (
        f"the task's attribute {name} holds {count} trained parameters that are not in the model, "
        "so nothing trains them: put them into the module that build_model returns, or set "
        "requires_grad=False"
    )
