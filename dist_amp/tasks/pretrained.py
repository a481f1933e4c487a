"""Pretrained weights: a folder of safetensors files, as `save_pretrained` writes it, into shards.

Each rank reads the slices of its shards, in the files' dtype, into parameters of any floating
dtype. Names follow transformers: prefixes of base models, renamed and merged weights (experts),
tied ones; an adapter's base layers too. Everything is compared by name, shape and dtype before
anything is read.
"""

import copy
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
# Tables that older releases of transformers saved, and that models now compute.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


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
    entries = read_entries(folder)
    targets = targets_of(base)
    match = match_names(base, targets, entries)
    missing = check_names(folder, base, targets, match, entries, fresh_head)
    check_shapes(folder, targets, match, entries)
    for name, key in match.direct.items():
        entries[key].read_into(targets[name][0])
    for conversion in match.conversions:
        sources = {key: entries[key].read() for _, key in conversion.sources}
        for name, value in conversion.convert(sources).items():
            if name in targets:
                place(value, targets[name][0])
    initialise(model, base, missing)
    for first, *others in targets.values():
        for other in others:  # peft's trained copy of a module
            local(other).copy_(local(first))


@dataclass(frozen=True)
class Entry:
    """A tensor in the files."""

    path: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.key)  # type: ignore[no-any-return]

    def read_into(self, target: Tensor) -> None:
        """Fill the target, or this rank's shard of it, of which nothing else is read."""
        if not isinstance(target, DTensor):
            target.copy_(self.read())
            return
        with safe_open(self.path, "pt") as file:
            part = file.get_slice(self.key)[shard_of(target)]
            local(target).copy_(part)

    def on_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def shard_of(target: DTensor) -> tuple[slice, ...]:
    """The part of a tensor that this rank holds: torch shards a dimension as `chunk` does."""
    starts = [0] * target.ndim
    sizes = list(target.shape)
    for mesh_dim, placement in enumerate(target.placements):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            chunk = -(-sizes[dim] // target.device_mesh.size(mesh_dim))
            first = min(chunk * target.device_mesh.get_local_rank(mesh_dim), sizes[dim])
            starts[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def read_entries(folder: Path) -> dict[str, Entry]:
    """{name in the files: entry}. Errors: DataError for files that are missing or damaged."""
    entries = {}
    try:
        for path in weight_files(folder):
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (no mapping)
                    part = file.get_slice(key)
                    shape = torch.Size(part.get_shape())
                    # Nothing is read for the dtype, but of a scalar.
                    empty = part[:0] if shape else file.get_tensor(key)
                    entries[key] = Entry(path, key, shape, empty.dtype)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"the weights in {folder} can't be read ({error}); fetch them again"
        ) from error
    return entries


def weight_files(folder: Path) -> list[Path]:
    """Those of the index, or the single file. Errors: DataError if there are none, or one lacks."""
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


@dataclass(frozen=True)
class Conversion:
    """Tensors of the model that transformers makes from several of the files, or from a part."""

    name: str
    converter: Any
    twin: Any
    sources: list[tuple[str, str]]  # the converter's pattern, the name in the files

    def convert(self, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)  # it collects what it is given
        for pattern, key in self.sources:
            converter.add_tensor(self.name, key, pattern, sources[key])
        made = converter.convert(self.name, model=self.twin, config=self.twin.config)
        tensors = {}
        for name, value in made.items():
            tensors[name] = value[0] if isinstance(value, list) else value
        return tensors


@dataclass
class Match:
    """Which entries of the files fill what."""

    direct: dict[str, str] = field(default_factory=dict)  # name in the model -> in the files
    conversions: list[Conversion] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of all that the files have
    unexpected: list[str] = field(default_factory=list)
    may_be_missing: Sequence[str] = ()  # patterns of names
    may_be_left_over: Sequence[str] = ()


def match_names(
    base: nn.Module, targets: Mapping[str, list[Tensor]], entries: Mapping[str, Entry]
) -> Match:
    match = Match()
    twin = twin_of(base)
    if twin is None:
        match.direct = {key: key for key in entries}
    else:
        match_as_transformers(twin, targets, entries, match)
        match.may_be_missing = tuple(twin._keys_to_ignore_on_load_missing or ())
        match.may_be_left_over = (*(twin._keys_to_ignore_on_load_unexpected or ()), *COMPUTED)
    match.shapes = {name: entries[key].shape for name, key in match.direct.items()}
    for conversion in match.conversions:  # without memory: only names and shapes are wanted
        sources = {key: entries[key].on_meta() for _, key in conversion.sources}
        for name, value in conversion.convert(sources).items():
            match.shapes[name] = value.shape
    match.unexpected = [name for name in match.shapes if name not in targets]
    for name in match.unexpected:
        match.direct.pop(name, None)
    return match


def match_as_transformers(
    twin: Any, targets: Mapping[str, list[Tensor]], entries: Mapping[str, Entry], match: Match
) -> None:
    """Match as transformers' convert_and_load_state_dict_in_model does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(twin)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    conversions: dict[str, Conversion] = {}
    for key in sorted(entries, key=numbers_in_order):
        name, pattern = rename_source_key(
            key, renamings, converters, twin.base_model_prefix, dict(targets)
        )
        if name not in targets and key in targets:
            match.direct[key] = key
        elif pattern is None:
            match.direct[name] = key
        else:
            new = Conversion(name, by_pattern[pattern], twin, [])
            conversions.setdefault(name, new).sources.append((pattern, key))
    match.conversions = list(conversions.values())


def numbers_in_order(name: str) -> str:
    """A key that sorts expert 2 before expert 10: they are merged in this order."""
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)


def twin_of(base: Any) -> Any:
    """The model of transformers as its config makes it, on the meta device; None for other models.

    fully_shard gives modules another class, and transformers looks names up by class.
    """
    if not (hasattr(base, "base_model_prefix") and hasattr(base, "config")):
        return None
    kind: Any = type(base)
    if isinstance(base, FSDPModule):
        kind = kind.__mro__[2]
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(base.config))


def check_names(
    folder: Path,
    base: nn.Module,
    targets: Mapping[str, list[Tensor]],
    match: Match,
    keys: Iterable[str],
    fresh_head: bool,
) -> set[int]:
    """The tensors, by id, that are left to initialise: those of a fresh head.

    Errors: DataError for names that are missing or left over.
    """
    filled = {id(tensor) for name in match.shapes for tensor in targets.get(name, ())}
    # A tied tensor has several names, and is filled by any of them.
    missing = [name for name, (tensor, *_) in targets.items() if id(tensor) not in filled]
    missing = unmatched(missing, match.may_be_missing)
    unexpected = unmatched(match.unexpected, match.may_be_left_over)
    fresh: list[str] = []
    if fresh_head:
        prefix = f"{getattr(base, 'base_model_prefix', '')}."
        fresh, missing = split_head(missing, prefix, targets)
        other_head, unexpected = split_head(unexpected, prefix, keys)
        if fresh or other_head:
            log.info(
                f"weights of {folder}: new: {some(fresh) or 'none'}; left out: "
                f"{some(other_head) or 'none'}"
            )
    parts = []
    if missing:
        parts.append(f"missing from the files: {some(missing)}")
    if unexpected:
        parts.append(f"only in the files: {some(unexpected)}")
    if parts:
        raise DataError(
            f"the weights in {folder} are not those of {type(base).__name__.removeprefix('FSDP')}: "
            f"{'; '.join(parts)}; build the model that they were saved from, or use "
            "load_pretrained(..., fresh_head=True) for a new head"
        )
    return {id(tensor) for name in fresh for tensor in targets[name]}


def unmatched(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def split_head(
    names: Sequence[str], prefix: str, everything: Iterable[str]
) -> tuple[list[str], list[str]]:
    """(names of a head, the others): a pooler, and what lies outside the base model, if any."""
    has_head = any(name.startswith(prefix) for name in everything)
    head = [
        name
        for name in names
        if "pooler" in name.split(".") or (has_head and not name.startswith(prefix))
    ]
    return head, [name for name in names if name not in head]


def check_shapes(
    folder: Path,
    targets: Mapping[str, list[Tensor]],
    match: Match,
    entries: Mapping[str, Entry],
) -> None:
    """Errors: DataError for another shape, and for integers in place of floating-point numbers."""
    for name, shape in match.shapes.items():
        if name in targets and targets[name][0].shape != shape:
            raise DataError(
                f"{name} is {list(shape)} in {folder} and {list(targets[name][0].shape)} in the "
                "model; use the config of these files: its vocabulary, sizes and number of labels"
            )
    for name, key in match.direct.items():
        tensor = targets[name][0]
        dtype = entries[key].dtype
        if tensor.is_floating_point() != dtype.is_floating_point:
            raise DataError(
                f"{name} is {dtype} in {folder} and {tensor.dtype} in the model; use unquantized "
                "weights"
            )


def place(value: Tensor, target: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into the target or this rank's shard of it."""
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        value = distribute_tensor(
            value.to(mesh.device_type), mesh, target.placements, src_data_rank=None
        ).to_local()
    local(target).copy_(value)


def initialise(model: Any, base: Any, missing: Collection[int]) -> None:
    """Draw the adapters and the missing parameters in full, on every rank alike, and keep this
    rank's part.
    """
    layers = dict.fromkeys(layer for _, layer in adapter_layers(base))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        for layer in layers:
            if not hasattr(layer, "reset_lora_parameters"):
                continue
            parts = [
                module
                for part in layer.adapter_layer_names
                for module in getattr(layer, part).modules()
            ]
            with whole_parameters(parts) as parameters:
                for adapter in layer.active_adapters:
                    method = model.peft_config[adapter].init_lora_weights
                    layer.reset_lora_parameters(adapter, method)
            for parameter, whole in parameters:
                place(whole, parameter)
        for module in base.modules():
            if not any(id(parameter) in missing for parameter in module.parameters(recurse=False)):
                continue
            with whole_parameters([module]) as parameters:
                if hasattr(base, "_init_weights"):
                    base._init_weights(module)
                else:
                    module.reset_parameters()
            for parameter, whole in parameters:
                if id(parameter) in missing:
                    place(whole, parameter)


@contextmanager
def whole_parameters(modules: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, the modules' own parameters are whole tensors on the CPU: (parameter, whole) each."""
    owners = [
        (module, name, parameter, nn.Parameter(torch.full(parameter.shape, torch.nan)))
        for module in modules
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, _, whole in owners:
        setattr(module, name, whole)
    try:
        yield [(parameter, whole) for _, _, parameter, whole in owners]
    finally:
        for module, name, parameter, _ in owners:
            setattr(module, name, parameter)
