"""Finds the blocks of a model whose task names none: its repeated layers."""

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from dist_amp.scaling.parameters import parameters_in, shared_parameters

# Of the parameters: unlisted layers that hold less are not worth a unit, whose gather costs a
# collective.
FEW = 0.05

Layers = dict[str, nn.Module]  # by their paths in the model


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers that hold most of the parameters, in the order of the model; none lies
    inside another.

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
    # The single member of a ModuleList is a layer of a model of depth 1, and what is repeated in it
    # may be experts.
    lists = [
        part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == 1
    ]
    single = {
        path for path, part in _layers(module).items() if any(part is alone[0] for alone in lists)
    }
    chosen = {
        next((above for above in single if above in _ancestors(path)), path)
        for path in taken or largest
    }
    return [part for path, part in module.named_modules() if path in chosen]


def _layers(module: nn.Module) -> Layers:
    """{path: member of a ModuleList or Sequential}, parents first: those that can be a unit of
    their own.
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    members = {child for part in lists for child in part.children() if parameters_in([child])}
    # A list in a list has no forward to gather for, and a whole model of transformers is meant to
    # be split.
    members = {part for part in members if type(part).forward is not nn.Module.forward}
    members = {part for part in members if not getattr(part, "_no_split_modules", None)}
    members -= shared_parameters(module, members).keys()
    return {path: part for path, part in module.named_modules() if part in members}


def _repeated(layers: Layers, listed: set[str], few: float) -> Layers:
    """Those whose class is listed, or holds at least `few` parameters and has two layers of the
    same shapes.
    """
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
    shapes = [tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers]
    return len(set(shapes)) < len(shapes)
