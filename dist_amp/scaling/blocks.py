"""A model's blocks: the layers that are sharded, compiled and checkpointed one by one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from torch import nn

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import Strategy
from dist_amp.task import Task
from dist_amp.world import World

# Repeated layers with a smaller share of the parameters are no blocks: not worth a collective.
MIN_SHARE = 0.05


def pick_blocks(strategy: Strategy, task: Task, module: nn.Module, world: World) -> list[nn.Module]:
    """Find and print the blocks. Raises ConfigError if a block to be sharded shares parameters."""
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
        world.warn(
            f"the repeated layers found in the model hold only {100 * share:.0f} % of its "
            "parameters; return the model's layers from `def blocks(self, model)` in the task"
        )
    return blocks


def blocks_of(task: Task, module: nn.Module) -> list[nn.Module]:
    """The outermost of the task's `blocks`, which must be in the model; by default, found ones."""
    if not hasattr(task, "blocks"):
        return outermost(find_blocks(module))
    blocks = list(dict.fromkeys(task.blocks(module)))
    parts = set(module.modules())
    for block in blocks:
        if block not in parts:
            raise DataError(
                f"the task's blocks(model) returned a {type(block).__name__} that is not in the "
                "model; return modules of the model passed to it, such as `list(model.layers)`"
            )
    return outermost(blocks)


def outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that are not inside another block, such as a layer that another block wraps."""
    inside = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in inside]


def units_of(task: Task, module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that FSDP2 gathers one by one, in the model's order: blocks and the task's units.

    Tied weights are gathered with the root. Raises DataError for a unit that FSDP2 can't use.
    """
    units: list[nn.Module] = list(task.units(module)) if hasattr(task, "units") else []
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
                "modules outside the blocks that each forward calls once, such as an embedding and "
                "a head that are not tied"
            )
    return [part for part in module.modules() if part in {*blocks, *units}]


def is_embedding(unit: nn.Module) -> bool:
    """Whether the unit is an embedding, whose backward does not need its weights gathered."""
    return type(unit).forward is nn.Embedding.forward


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers, in the model's order, none inside another.

    A layer is a member of a ModuleList or Sequential. Layers of one class are repeated if together
    they hold 5 % of the parameters and two of them have the same shapes, or if a transformers model
    lists the class in `_no_split_modules`. The search goes on inside layers that are not repeated.
    If no layer is repeated, the outermost layers are the blocks.
    """
    min_parameters = MIN_SHARE * parameters_in([module])
    no_split = {
        name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    single = {part[0] for part in lists if len(part) == 1}  # a model of depth 1 repeats no layer
    shared = shared_parameters(module, module.modules())
    blocks: set[nn.Module] = set()
    outer = layers = _layers_in([module], shared)
    while layers:
        by_class: dict[type, list[nn.Module]] = defaultdict(list)
        for layer in layers:
            by_class[type(layer)].append(layer)
        repeated: set[nn.Module] = set()
        for cls, group in by_class.items():
            # Sharding replaces a module's class by a subclass, so look at the base classes too.
            if no_split & {base.__name__ for base in cls.__mro__}:
                repeated |= set(group)
            elif parameters_in(group) >= min_parameters:
                shapes = {
                    tuple((name, p.shape) for name, p in each.named_parameters()) for each in group
                }
                repeated |= set(group) if len(shapes) < len(group) else single & set(group)
        blocks |= repeated
        layers = _layers_in([layer for layer in layers if layer not in repeated], shared)
    return [part for part in module.modules() if part in (blocks or outer)]


def _layers_in(modules: Iterable[nn.Module], shared: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost members of ModuleLists and Sequentials that can be gathered as a unit."""
    layers = []
    for module in modules:
        for child in module.children():
            # FSDP2 gathers a unit before its forward, which a ModuleList in a list lacks. A whole
            # transformers model, which has _no_split_modules, is meant to be split.
            can_be_unit = (
                parameters_in([child]) > 0
                and child not in shared
                and type(child).forward is not nn.Module.forward
                and not getattr(child, "_no_split_modules", None)
            )
            if can_be_unit and isinstance(module, nn.ModuleList | nn.Sequential):
                layers.append(child)
            else:
                layers += _layers_in([child], shared)
    return list(dict.fromkeys(layers))


def shared_parameters(module: nn.Module, parts: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """{part: name of a parameter in it that is also used outside it}, for parts that have one."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    # Registering a part several times does not make its parameters shared with other modules.
    copies = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    names = {id(p): name for name, p in module.named_parameters()}
    shared: dict[nn.Module, str] = {}
    for part in parts:
        inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
        for p, count in inside.items():
            if uses[p] > count * copies[id(part)]:
                shared.setdefault(part, names[p])
    return shared


def parameters_in(modules: Iterable[nn.Module]) -> int:
    parameters = {p for part in modules for p in part.parameters()}
    return sum(p.numel() for p in parameters)
