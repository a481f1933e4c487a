"""Pretrained weights: a folder of safetensors files, as `save_pretrained` writes it, into shards.

transformers' own loader gives the names (prefixes of base models, renamed and merged weights) and
reads this rank's slices; then names, shapes and dtypes are compared, and the slices copied.
"""

import copy
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_amp.errors import DataError
from dist_amp.scaling.meta import some
from dist_amp.world import local

log = logging.getLogger(__name__)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What peft puts into the names of a model's own modules.
WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
Targets = Mapping[str, list[Tensor]]
Slices = Mapping[str, Any]


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path, fresh_head: bool = False) -> None:
    """Set the model's parameters and saved buffers to those of the files; every rank may call it.

    model: of transformers (peft may be around it) or of plain modules, sharded or whole, with
    memory. Adapters are initialised: they are in no such file. fresh_head: what lies outside the
    base model, and a pooler, may be missing from the files, and is then initialised; what the files
    have of another head is left out. What is initialised depends on torch's seed alone, so it is
    the same on every rank and at every world size. Errors: DataError for a folder without weights,
    files that are damaged, and each name, shape or dtype that differs.
    """
    folder = Path(folder)
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
    targets = targets_of(base)
    try:
        with ExitStack() as stack:
            slices: dict[str, Any] = {}
            for path in weight_files(folder):
                file = stack.enter_context(safe_open(path, "pt"))
                slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            check_shapes(folder, targets, slices)
            missing, unexpected = fill(base, targets, slices)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"the weights in {folder} can't be read ({error}); fetch them again"
        ) from error
    fresh = check_names(folder, base, targets, missing, unexpected, slices, fresh_head)
    initialise(model, base, fresh)
    for first, *others in targets.values():
        for other in others:  # peft's trained copy of a module
            local(other).copy_(local(first))


def weight_files(folder: Path) -> list[Path]:
    """Those of the index, or the single file. Errors: DataError if one is missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" ({other[0]} is a pickle: convert it with save_pretrained)" if other else ""
        raise DataError(
            f"{folder} has no weights: neither {SINGLE} nor {INDEX}{hint}; give a model's folder"
        )
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{folder / INDEX} is damaged ({error}); fetch it again") from error
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise DataError(
            f"{folder} lacks {some(absent)}, which {INDEX} lists; fetch the model again"
        )
    return [folder / name for name in names]


def targets_of(base: nn.Module) -> dict[str, list[Tensor]]:
    """{name in a file: the parameters and buffers that it fills}, without adapters."""
    adapters = tuple(prefix for prefix, _ in adapter_layers(base))
    targets: dict[str, list[Tensor]] = {}
    for name, value in base.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not name.startswith(adapters):
            targets.setdefault(WRAPPED.sub("", name), []).append(value)
    return targets


def adapter_layers(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix of its parameters' names, layer) for each part of each of peft's adapter layers."""
    for name, module in base.named_modules():
        if hasattr(module, "base_layer"):
            for part in getattr(module, "adapter_layer_names", ()):
                yield f"{name}.{part}", module


def check_shapes(folder: Path, targets: Targets, slices: Slices) -> None:
    """Errors: DataError for another shape, and for integers in place of floating-point numbers."""
    for name in sorted(slices.keys() & targets.keys()):
        target = targets[name][0]
        shape = slices[name].get_shape()
        if shape != list(target.shape):
            raise DataError(
                f"{name} is {shape} in {folder} and {list(target.shape)} in the model; use the "
                "config of these files: its vocabulary, sizes and number of labels"
            )
        dtype = slices[name].get_dtype()
        if target.is_floating_point() and not dtype.startswith(("F", "BF")):
            raise DataError(
                f"{name} is {dtype} in {folder} and {target.dtype} in the model; use unquantized "
                "weights"
            )


def fill(base: Any, targets: Targets, slices: Slices) -> tuple[list[str], list[str]]:
    """Copy what the files have into the targets: (names that are missing, names left over)."""
    if not (hasattr(base, "base_model_prefix") and hasattr(base, "config")):
        for name in targets.keys() & slices.keys():
            place(slices[name][...], targets[name][0])
        missing = [name for name in targets if name not in slices]
        return missing, [name for name in slices if name not in targets]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = type(base)
    if isinstance(base, FSDPModule):  # which has another class, and names depend on the class
        kind = kind.__mro__[2]
    with torch.device("meta"):
        twin: Any = kind._from_config(copy.deepcopy(base.config))
    mapping: Any = get_model_conversion_mapping(twin)
    config = LoadStateDictConfig(weight_mapping=mapping)
    present = {name: of[0].detach() for name, of in targets.items()}
    layers: dict[str, dict[str, Any]] = {}
    for key, part in slices.items():
        layer = "".join(re.findall(r"^.*?\d\.", key))
        layers.setdefault(layer, {})[key] = part
    filled: set[int] = set()  # by id: a tied tensor has several names, and is filled by any of them
    missing_keys = set(targets)
    unexpected: set[str] = set()
    # One at a time: the loader reads into new tensors, of the dtype and sharding that it finds.
    for parts in layers.values():
        twin.load_state_dict(present, strict=False, assign=True)
        found, _ = convert_and_load_state_dict_in_model(twin, parts, config)
        if problems := [*map(str, found.mismatched_keys), *found.conversion_errors.values()]:
            why = problems[0].strip().splitlines()[-1]
            raise DataError(f"the weights do not fit the model: {why}; use the files' own config")
        state = twin.state_dict()
        for name in targets.keys() & state.keys() - found.missing_keys:
            place(state[name], targets[name][0])
            filled.add(id(targets[name][0]))
        twin._adjust_missing_and_unexpected_keys(found)
        missing_keys -= state.keys() - found.missing_keys
        unexpected |= found.unexpected_keys
    missing = [
        name for name in targets if name in missing_keys and id(targets[name][0]) not in filled
    ]
    return missing, sorted(unexpected)


def check_names(
    folder: Path,
    base: nn.Module,
    targets: Targets,
    missing: Sequence[str],
    unexpected: Sequence[str],
    keys: Iterable[str],
    fresh_head: bool,
) -> set[int]:
    """The tensors, by id, that are left to initialise: those of a fresh head.

    Errors: DataError for names that are missing or left over.
    """
    fresh: list[str] = []
    if fresh_head:
        prefix = f"{getattr(base, 'base_model_prefix', '')}."
        fresh, missing = split_head(missing, prefix, targets)
        left_out, unexpected = split_head(unexpected, prefix, keys)
        log.info(f"weights of {folder}: new: {some(fresh)}; left out: {some(left_out)}")
    found = {"missing from the files": missing, "only in the files": unexpected}
    parts = [f"{what}: {some(list(names))}" for what, names in found.items() if names]
    if parts:
        raise DataError(
            f"the weights in {folder} are not those of {type(base).__name__.removeprefix('FSDP')}: "
            f"{'; '.join(parts)}; build the model that they were saved from, or use "
            "load_pretrained(..., fresh_head=True) for a new head"
        )
    return {id(tensor) for name in fresh for tensor in targets[name]}


def split_head(
    names: Sequence[str],
    prefix: str,
    everything: Iterable[str],
) -> tuple[list[str], list[str]]:
    """(names of a head, the others): a pooler, and what lies outside the base model, if any."""
    head = {name for name in names if "pooler" in name.split(".")}
    if any(name.startswith(prefix) for name in everything):
        head |= {name for name in names if not name.startswith(prefix)}
    return [name for name in names if name in head], [name for name in names if name not in head]


def place(value: Tensor, target: Tensor) -> None:
    """Copy a tensor, whole or sharded as the target, into the target or this rank's shard of it."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        mesh = target.device_mesh
        value = value.to(mesh.device_type)
        value = distribute_tensor(value, mesh, target.placements, src_data_rank=None)
    local(target).copy_(local(value))


def initialise(model: Any, base: Any, missing: Collection[int]) -> None:
    """Draw adapters and missing parameters, on every rank alike, and keep this rank's part."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        for layer in dict.fromkeys(layer for _, layer in adapter_layers(base)):
            if hasattr(layer, "reset_lora_parameters"):
                parts = [getattr(layer, part) for part in layer.adapter_layer_names]
                with drawn_whole(inner for part in parts for inner in part.modules()):
                    for adapter in layer.active_adapters:
                        method = model.peft_config[adapter].init_lora_weights
                        layer.reset_lora_parameters(adapter, method)
        for module in base.modules():
            if any(id(parameter) in missing for parameter in module.parameters(recurse=False)):
                with drawn_whole([module], missing):
                    if hasattr(base, "_init_weights"):
                        base._init_weights(module)
                    else:
                        module.reset_parameters()


@contextmanager
def drawn_whole(
    modules: Iterable[nn.Module],
    only: Collection[int] | None = None,
) -> Iterator[None]:
    """Inside, the modules' own parameters are whole tensors on the CPU; at the end they are placed.

    only: the ids of the parameters that are changed; None: all.
    """
    owners = [
        (module, name, parameter, nn.Parameter(torch.full(parameter.shape, torch.nan)))
        for module in modules
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, _, whole in owners:
        setattr(module, name, whole)
    try:
        yield
    finally:
        for module, name, parameter, _ in owners:
            setattr(module, name, parameter)
    for _, _, parameter, whole in owners:
        if only is None or id(parameter) in only:
            place(whole, parameter)
