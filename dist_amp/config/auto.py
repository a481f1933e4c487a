"""What "auto" resolves to: the strategy for a model on these ranks, who casts, and the blocks to shard it by."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.batch_statistics import batch_statistics
from dist_amp.settings import Config, ParallelConfig, PrecisionConfig, Strategy
from dist_amp.task import Task
from dist_amp.world import World

BYTES_PER_PARAMETER = 16  # of a trained one: float32 parameter, gradient and AdamW's two moments
FEW = 0.05  # of the parameters: unlisted layers that hold less are not worth a unit, whose gather costs a collective

Layers = dict[str, nn.Module]  # by their paths in the model


def pick_strategy(config: ParallelConfig, module: nn.Module, world: World) -> Strategy:
    """The strategy for this model in this world; says what "auto" picked, and why."""
    if world.world_size == 1:
        if config.strategy not in ("auto", "single"):
            world.warn(f"parallel.strategy={config.strategy} needs more than one process; running as single")
        return "single"
    if config.strategy == "single":
        raise ConfigError(
            f"parallel.strategy=single is for one process, but there are {world.world_size}; "
            "use auto, ddp, fsdp or hsdp"
        )
    if config.strategy != "auto":
        return config.strategy
    have = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else 0
    return auto_strategy(module, world, have)


def auto_need(module: nn.Module) -> int:
    """Bytes of weights, gradients and moments, by which "auto" decides: AdamW's in float32."""
    return sum(p.numel() * (BYTES_PER_PARAMETER if p.requires_grad else p.element_size()) for p in module.parameters())


def auto_strategy(module: nn.Module, world: World, have: int) -> Strategy:
    """What "auto" picks for several ranks, and says why. have: the device's memory in bytes; 0: the host's suffices."""
    need = auto_need(module)
    strategy: Strategy = "fsdp" if have and need > have / 2 else "ddp"
    room = f"half of the device's {have / 2**30:.1f} GiB" if have else "the host's memory"
    verb = "do not fit in" if strategy == "fsdp" else "fit in"
    state = f"weights, gradients and moments ({need / 2**30:.2f} GiB)"
    world.say(f"parallel.strategy=auto: {strategy}, because {state} {verb} {room}")
    return strategy


def pick_cast(config: PrecisionConfig, strategy: Strategy, module: nn.Module, world: World) -> PrecisionConfig:
    """The config with `cast_by=auto` resolved to autocast where the policy can't be used; says why.

    FSDP2's policy casts a block's weights and inputs, and batch norm fails on them beside statistics in float32.
    """
    sharded = config.use_amp and strategy in ("fsdp", "hsdp")
    if not (sharded and config.cast_by == "auto" and (statistics := batch_statistics(module))):
        return config
    norm = next(iter(statistics)).rpartition(".")[0]
    world.say(f"precision.cast_by=auto: autocast, because the policy would not cast the batch statistics of {norm}")
    return replace(config, cast_by="autocast")


def pick_blocks(config: Config, strategy: Strategy, task: Task, module: nn.Module, world: World) -> list[nn.Module]:
    """The model's blocks; says what they are if a setting makes use of them.

    Errors: as `blocks_of`; ConfigError under fsdp and hsdp for a block that shares a parameter with the rest.
    """
    blocks, sharded = blocks_of(task, module), strategy in ("fsdp", "hsdp")
    if sharded and (shared := shared_parameters(module, blocks)):
        raise ConfigError(
            f"the task's blocks(model): the parameter {next(iter(shared.values()))} is also used outside of its block, "
            f"and {strategy} can't shard it twice; leave out that block, or return one that holds all its uses"
        )
    if sharded or config.compile.blocks or config.parallel.activation_checkpointing != "none":
        kinds = Counter(type(block).__name__ for block in blocks)
        share = parameters_in(blocks) / max(1, parameters_in([module]))
        names = ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"
        world.say(f"blocks: {names}, {100 * share:.0f} % of parameters")
        if share < 0.5 and not hasattr(task, "blocks"):
            inside = {p for block in blocks for p in block.parameters()}
            outside = [(p.numel(), path) for path, p in module.named_parameters() if p not in inside]
            world.warn(
                f"the blocks that were found hold {100 * share:.0f} % of the parameters, and not {max(outside)[1]}, "
                "the largest; name the model's layers by `def blocks(self, model)` in the task"
            )
    return blocks


def units_of(task: Task, module: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """What FSDP2 gathers and reduces at once, in the order of the model: its blocks, and the task's units(model).

    Errors: DataError for units that are not in the model, lie in a block, or share a parameter with the rest: tied
    weights are gathered with the root.
    """
    own, blocks = list(task.units(module)) if hasattr(task, "units") else [], list(blocks)
    inside = {part for block in blocks for part in block.modules()}
    names, shared = {part: name for name, part in module.named_modules()}, shared_parameters(module, own)
    for unit in own:
        if unit not in names or unit in inside or unit in shared:
            what = (
                "is not in the model"
                if unit not in names
                else "lies in a block"
                if unit in inside
                else (f"shares the parameter {shared[unit]} with other modules")
            )
            raise DataError(
                f"the task's units(model) returned a {type(unit).__name__} that {what}; return modules outside of the "
                "blocks, such as an embedding and a head that are not tied, which each forward calls once"
            )
    return [part for part in module.modules() if part in {*blocks, *own}]


def blocks_of(task: Task, module: nn.Module) -> list[nn.Module]:
    """The units that are sharded, compiled and recomputed, each once: the task's own, or those that are found.

    Errors: DataError if the task names what is not in the model.
    """
    if not hasattr(task, "blocks"):
        return find_blocks(module)
    blocks, parts = list(dict.fromkeys(task.blocks(module))), set(module.modules())
    for block in blocks:
        if block not in parts:
            raise DataError(
                f"the task's blocks(model) returned a {type(block).__name__} that is not in the model; return modules "
                "of the model that it is given, as in `list(model.layers)`"
            )
    return blocks


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers that hold most of the parameters, in the order of the model; none lies inside another.

    A layer is a member of a ModuleList or Sequential. Layers of a class are repeated if together they hold 5 % of the
    parameters and two of them have the same shapes, unlike the stages of a convolutional network; or if a model lists
    the class in transformers' `_no_split_modules`. The outermost ones are taken: a decoder's layers, not the experts in
    them. Where nothing is repeated, the class that holds most is taken.
    """
    listed = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    few, layers = FEW * parameters_in([module]), _layers(module)
    classes = [_outermost(layers_of_class) for layers_of_class in _by_class(layers).values()]
    largest = max(classes, key=lambda kind: parameters_in(kind.values()), default={})
    taken: Layers = {}
    while candidates := _outermost(_repeated(layers, listed, few)):
        found = _repeated(candidates, listed, few)  # many inside others do not make a layer beside them repeated
        taken |= found
        done = candidates.keys() | {ancestor for path in found for ancestor in _ancestors(path)}
        layers = {p: layer for p, layer in layers.items() if p not in done and not _ancestors(p) & found.keys()}
    # The single member of a ModuleList is a layer of a model of depth 1, and what is repeated in it may be experts.
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == 1]
    single = {path for path, part in _layers(module).items() if any(part is alone[0] for alone in lists)}
    chosen = {next((above for above in single if above in _ancestors(path)), path) for path in taken or largest}
    return [part for path, part in module.named_modules() if path in chosen]


def _layers(module: nn.Module) -> Layers:
    """{path: member of a ModuleList or Sequential}, parents first: those that can be a unit of their own."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    members = {child for part in lists for child in part.children() if parameters_in([child])}
    # A list in a list has no forward to gather for, and a whole model of transformers is meant to be split.
    members = {part for part in members if type(part).forward is not nn.Module.forward}
    members = {part for part in members if not getattr(part, "_no_split_modules", None)}
    members -= shared_parameters(module, members).keys()
    return {path: part for path, part in module.named_modules() if part in members}


def _repeated(layers: Layers, listed: set[str], few: float) -> Layers:
    """Those whose class is listed, or holds at least `few` parameters and has two layers of the same shapes."""
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
    return {path: layer for path, layer in layers.items() if not (_ancestors(path) - {path}) & layers.keys()}


def _ancestors(path: str) -> set[str]:
    """The path itself and those of the modules that hold it."""
    names = path.split(".")
    return {".".join(names[:count]) for count in range(1, len(names) + 1)}


def _has_equals(layers: Iterable[nn.Module]) -> bool:
    shapes = [tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers]
    return len(set(shapes)) < len(shapes)


def shared_parameters(module: nn.Module, parts: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """{part of the module: a parameter in it that is used outside of it too}, for those parts that have one."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    places = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    names = {id(p): name for name, p in module.named_parameters()}
    shared = {}
    for part in parts:
        inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
        if outside := [names[p] for p, count in inside.items() if uses[p] > count * places[id(part)]]:
            shared[part] = outside[0]
    return shared


def parameters_in(modules: Iterable[nn.Module]) -> int:
    """The number of parameters in these modules, each counted once."""
    return sum({id(p): p.numel() for part in modules for p in part.parameters()}.values())
