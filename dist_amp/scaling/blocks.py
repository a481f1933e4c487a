"""The blocks of a model, which are sharded, compiled and recomputed: the task's, or found."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from torch import nn

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import Strategy
from dist_amp.task import Task
from dist_amp.world import World

# Share of the parameters. A gather costs a collective, so layers that hold less are no units.
FEW = 0.05


def pick_blocks(strategy: Strategy, task: Task, module: nn.Module, world: World) -> list[nn.Module]:
    """The model's blocks; prints what they are. If sharded, they must not share parameters."""
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
            f"the repeated layers that were found hold {100 * share:.0f} % of the parameters, and "
            "the rest is one unit; name the model's layers by `def blocks(self, model)` in the task"
        )
    return blocks


def blocks_of(task: Task, module: nn.Module) -> list[nn.Module]:
    """The task's blocks, each once, or those that are found; DataError if one is not in it."""
    if not hasattr(task, "blocks"):
        return outermost(find_blocks(module))
    blocks = list(dict.fromkeys(task.blocks(module)))
    parts = set(module.modules())
    for block in blocks:
        if block not in parts:
            raise DataError(
                f"the task's blocks(model) returned a {type(block).__name__} that is not in the "
                "model; return modules of the model that it is given, as in `list(model.layers)`"
            )
    return outermost(blocks)


def outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that lie in no other one, such as a shared layer that a later block wraps."""
    inside = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in inside]


def units_of(task: Task, module: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that FSDP2 gathers at once, in the model's order: blocks, and the task's units.

    Tied weights are gathered with the root.
    """
    blocks = list(blocks)
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
                "modules outside of the blocks, such as an embedding and a head that are not tied, "
                "which each forward calls once"
            )
    return [part for part in module.modules() if part in {*blocks, *units}]


def is_embedding(unit: nn.Module) -> bool:
    """Whether its gradient does not depend on its weights, which backward then need not gather."""
    return type(unit).forward is nn.Embedding.forward


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers, in the model's order, none inside another; layers are members of lists.

    Layers of a class are repeated if together they hold 5 % of the parameters and two of them have
    the same shapes; or if a model lists the class in transformers' `_no_split_modules`. What is not
    repeated is looked into. Where nothing is, the outermost layers are the blocks.
    """
    few = FEW * parameters_in([module])
    listed = {
        name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    single = {part[0] for part in lists if len(part) == 1}  # the layer of a model of depth 1
    shared = shared_parameters(module, module.modules())
    blocks: set[nn.Module] = set()
    first = layers = _layers_in([module], shared)
    while layers:
        by_class: dict[type, list[nn.Module]] = defaultdict(list)
        for layer in layers:
            by_class[type(layer)].append(layer)
        repeated: set[nn.Module] = set()
        for cls, kind in by_class.items():
            # Sharding derives classes, so that the listed one is a base.
            if listed & {base.__name__ for base in cls.__mro__}:
                repeated |= set(kind)
            elif parameters_in(kind) >= few:
                shapes = {
                    tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in kind
                }
                repeated |= set(kind) if len(shapes) < len(kind) else single & set(kind)
        blocks |= repeated
        layers = _layers_in([layer for layer in layers if layer not in repeated], shared)
    return [part for part in module.modules() if part in (blocks or first)]


def _layers_in(modules: Iterable[nn.Module], shared: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost members of ModuleLists and Sequentials that can be a unit."""
    layers = []
    for module in modules:
        for child in module.children():
            # A list in a list has no forward to gather for, and a whole model of transformers is
            # meant to be split.
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
    """{part of the module: a parameter in it that is also used elsewhere}, where there is one."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    places = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    names = {id(p): name for name, p in module.named_parameters()}
    shared: dict[nn.Module, str] = {}
    for part in parts:
        inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
        for p, count in inside.items():
            if uses[p] > count * places[id(part)]:
                shared.setdefault(part, names[p])
    return shared


def parameters_in(modules: Iterable[nn.Module]) -> int:
    """The number of parameters in these modules, each counted once."""
    parameters = {p for part in modules for p in part.parameters()}
    return sum(p.numel() for p in parameters)
