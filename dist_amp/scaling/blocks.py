"""The blocks of a model: the units that are sharded, compiled and recomputed."""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from dist_amp.errors import ConfigError, DataError
from dist_amp.scaling.parameters import parameters_in, shared_parameters
from dist_amp.settings import Strategy
from dist_amp.task import Task
from dist_amp.world import World


def pick_blocks(strategy: Strategy, task: Task, module: nn.Module, world: World) -> list[nn.Module]:
    """The model's blocks; says what they are.

    Errors: as `blocks_of`; ConfigError under fsdp and hsdp for a block that shares a parameter with
    the rest.
    """
    blocks = blocks_of(task, module)
    shared = shared_parameters(module, blocks)
    if shared and strategy in ("fsdp", "hsdp"):
        raise ConfigError(
            f"the task's blocks(model): the parameter {next(iter(shared.values()))} is also used "
            f"outside of its block, and {strategy} can't shard it twice; leave out that block, or "
            "return one that holds all its uses"
        )
    kinds = Counter(type(block).__name__ for block in blocks)
    names = ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"
    share = parameters_in(blocks) / max(1, parameters_in([module]))
    world.say(f"blocks: {names}, {100 * share:.0f} % of parameters")
    if share < 0.5 and not hasattr(task, "blocks"):
        inside = {p for block in blocks for p in block.parameters()}
        outside = [(p.numel(), path) for path, p in module.named_parameters() if p not in inside]
        world.warn(
            f"the blocks that were found hold {100 * share:.0f} % of the parameters, and not "
            f"{max(outside)[1]}, the largest; name the model's layers by `def blocks(self, "
            "model)` in the task"
        )
    return blocks


def units_of(task: Task, module: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """What FSDP2 gathers and reduces at once, in the order of the model: its blocks, and the task's
    units(model).

    Errors: DataError for units that are not in the model, lie in a block, or share a parameter with
    the rest: tied weights are gathered with the root.
    """
    units: list[nn.Module] = []
    if hasattr(task, "units"):
        units = list(task.units(module))
    blocks = list(blocks)
    inside_blocks = {part for block in blocks for part in block.modules()}
    shared = shared_parameters(module, units)
    for unit in units:
        problem = ""
        if unit not in set(module.modules()):
            problem = "is not in the model"
        elif unit in inside_blocks:
            problem = "lies in a block"
        elif unit in shared:
            problem = f"shares the parameter {shared[unit]} with other modules"
        if problem:
            raise DataError(
                f"the task's units(model) returned a {type(unit).__name__} that {problem}; return "
                "modules outside of the blocks, such as an embedding and a head that are not tied, "
                "which each forward calls once"
            )
    return [part for part in module.modules() if part in {*blocks, *units}]


def blocks_of(task: Task, module: nn.Module) -> list[nn.Module]:
    """The units that are sharded, compiled and recomputed, each once: the task's own, or those that
    are found.

    Errors: DataError if the task names what is not in the model.
    """
    if not hasattr(task, "blocks"):
        from dist_amp.scaling.find_blocks import find_blocks

        return find_blocks(module)
    blocks = list(dict.fromkeys(task.blocks(module)))
    parts = set(module.modules())
    for block in blocks:
        if block not in parts:
            raise DataError(
                f"the task's blocks(model) returned a {type(block).__name__} that is not in the "
                "model; return modules of the model that it is given, as in `list(model.layers)`"
            )
    return blocks
