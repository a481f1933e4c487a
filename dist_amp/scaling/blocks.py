"""The blocks of a model: the units that are sharded, compiled and recomputed.

They are named by the task, or found: the repeated layers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import nn

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import Strategy
from dist_amp.task import Task
from dist_amp.world import World

# Of the parameters: unlisted layers that hold less are not worth a unit, whose gather costs a
# collective.
FEW = 0.05

Layers = dict[str, nn.Module]  # by their paths in the model


def pick_blocks(strategy: Strategy, task: Task, module: nn.Module, world: World) -> list[nn.Module]:
    """The model's blocks; says what they are.

    Errors: as `blocks_of`; ConfigError under fsdp and hsdp for a block with shared parameters.
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
    """What FSDP2 gathers at once, in the model's order: its blocks, and the task's units(model).

    Errors: DataError for units that are not in the model, lie in a block, or share a parameter with
    the rest: tied weights are gathered with the root.
    """
    blocks = list(blocks)
    units: list[nn.Module] = []
    if hasattr(task, "units"):
        units = list(task.units(module))
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
    """The task's blocks, each once, or those that are found; DataError if one is not in it."""
    if not hasattr(task, "blocks"):
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


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers that hold most of the parameters, in order, none inside another.

    A layer is a member of a ModuleList or Sequential. Layers of a class are repeated if together
    they hold 5 % of the parameters and two of them have the same shapes, unlike the stages of a
    convolutional network; or if a model lists the class in transformers' `_no_split_modules`. The
    outermost ones are taken: a decoder's layers, not the experts in them. Where nothing is
    repeated, the class that holds most is taken.
    """
    listed = {
        name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    few = FEW * parameters_in([module])
    layers = _layers(module)
    classes = [_outermost(layers_of_class) for layers_of_class in _by_class(layers).values()]
    largest = max(classes, key=lambda kind: parameters_in(kind.values()), default={})
    taken: Layers = {}
    while candidates := _outermost(_repeated(layers, listed, few)):
        # Many layers inside others do not make one beside them repeated.
        repeated = _repeated(candidates, listed, few)
        taken |= repeated
        done = {*candidates, *(ancestor for path in repeated for ancestor in _ancestors(path))}
        layers = {
            path: layer
            for path, layer in layers.items()
            if path not in done and not _ancestors(path) & repeated.keys()
        }
    # A ModuleList's only member is a layer of a model of depth 1; inside it may be experts.
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    alone = {part[0] for part in lists if len(part) == 1}
    single = {path for path, part in _layers(module).items() if part in alone}
    chosen = {
        next((above for above in single if above in _ancestors(path)), path)
        for path in taken or largest
    }
    return [part for path, part in module.named_modules() if path in chosen]


def _layers(module: nn.Module) -> Layers:
    """{path: member of a ModuleList or Sequential} of those that can be a unit, parents first."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    members = {child for part in lists for child in part.children() if parameters_in([child])}
    # A list in a list has no forward to gather for, and a whole model of transformers is meant to
    # be split.
    members = {part for part in members if type(part).forward is not nn.Module.forward}
    members = {part for part in members if not getattr(part, "_no_split_modules", None)}
    members -= shared_parameters(module, members).keys()
    return {path: part for path, part in module.named_modules() if part in members}


def _repeated(layers: Layers, listed: set[str], few: float) -> Layers:
    """Those whose class is listed, or holds `few` parameters or more in layers of equal shapes."""
    kinds = [
        kind
        for cls, kind in _by_class(layers).items()
        if listed & {base.__name__ for base in cls.__mro__}  # sharding derives classes of its own
        or (parameters_in(kind.values()) >= few and _has_equals(kind.values()))
    ]
    return {path: layer for kind in kinds for path, layer in kind.items()}


def _by_class(layers: Layers) -> dict[type, Layers]:
    kinds: dict[type, Layers] = defaultdict(dict)
    for path, layer in layers.items():
        kinds[type(layer)][path] = layer
    return kinds


def _outermost(layers: Layers) -> Layers:
    """Those that lie inside no other."""
    return {
        path: layer
        for path, layer in layers.items()
        if not (_ancestors(path) - {path}) & layers.keys()
    }


def _ancestors(path: str) -> set[str]:
    """The path itself and those of the modules that hold it."""
    names = path.split(".")
    return {".".join(names[:count]) for count in range(1, len(names) + 1)}


def _has_equals(layers: Iterable[nn.Module]) -> bool:
    shapes = []
    for layer in layers:
        named = layer.named_parameters()
        shapes.append(tuple((name, p.shape) for name, p in named))
    return len(set(shapes)) < len(shapes)


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
