"""Pretrained weights: a folder of safetensors files, as `save_pretrained` writes it, read straight into shards.

Each rank reads the slices of its own shards, in the files' dtype, into parameters of any floating dtype. Names follow
transformers: prefixes of base models, renamed and merged weights (experts), tied ones; an adapter's base layers too.
Everything is compared by name, shape and dtype before anything is read.
"""

import copy
import json
import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_amp.checkpoint.reader import silence_single_process_warning
from dist_amp.errors import DataError
from dist_amp.fast.fused import local
from dist_amp.runtime.meta import some

log = logging.getLogger(__name__)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What peft puts into the names of a model's own modules.
WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
# Tables that older releases of transformers saved, and that models now compute.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
Entries = Mapping[str, TensorStorageMetadata]


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path, fresh_head: bool = False) -> None:
    """Set the model's parameters and saved buffers to those of the files in `folder`; every rank may call it.

    model: of transformers (peft may be around it) or of plain modules, sharded or whole, with memory. Adapters are
    initialised: they are in no such file. fresh_head: what lies outside the base model, and a pooler, may be missing
    from the files, and is then initialised; what the files have of another head is left out. What is initialised
    depends on torch's seed alone, so it is the same on every rank and at every world size.
    Errors: DataError for a folder without weights, files that are damaged, and each name, shape or dtype that differs.
    """
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
    reader = _Reader(Path(folder))
    entries = reader.entries()
    targets = _targets(base)
    match = _match(base, targets, entries)
    missing = _missing(folder, base, targets, match, entries, fresh_head)
    _check_shapes(folder, targets, match, entries)
    reader.read({key: targets[name][0] for name, key in match.direct.items()})
    for made in match.made:
        sources = {key: _empty(entries[key], "cpu") for _, key in made.sources}
        reader.read(sources)
        for name, value in made.convert(sources).items():
            if name in targets:
                _place(value, targets[name][0])
    _initialise(model, base, missing)
    for first, *others in targets.values():
        for other in others:  # peft's trained copy of a module
            local(other).copy_(local(first))


class _Reader(HuggingFaceStorageReader):
    """Reads the weights that transformers would: those of the index, or of the single file."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self._folder = folder
        self._found: Metadata | None = None
        self.fs = _Listed([str(path) for path in weight_files(folder)])

    def read_metadata(self) -> Metadata:
        if self._found is None:  # each read would open all files again
            self._found = super().read_metadata()
        return self._found

    def entries(self) -> Entries:
        """{name in the files: shape and dtype}."""
        try:
            return dict(self.read_metadata().state_dict_metadata)  # type: ignore[arg-type]
        except (OSError, SafetensorError) as error:
            raise DataError(f"the weights in {self._folder} can't be read ({error}); fetch them again") from error

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors, each sharded or whole, from the entries of these names; each rank on its own."""
        silence_single_process_warning()
        if tensors:
            read_tensors({name: tensor.detach() for name, tensor in tensors.items()}, storage_reader=self, no_dist=True)


class _Listed(FileSystem):
    """A folder that shows these files only."""

    def __init__(self, files: list[str]):
        self.files = files

    def ls(self, path: Any) -> list[str]:
        return self.files


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a pretrained model. Errors: DataError if there are none, or one is missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" ({other[0]} is a pickle: convert it with save_pretrained)" if other else ""
        raise DataError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}{hint}; give a model's folder")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{folder / INDEX} is damaged ({error}); fetch it again") from error
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{folder} lacks {some(absent)}, which {INDEX} lists; fetch the model again")
    return [folder / name for name in names]


def _targets(base: nn.Module) -> dict[str, list[Tensor]]:
    """{name in a file: what it fills}: parameters and saved buffers, without adapters; tied names share a tensor."""
    adapters = tuple(prefix for prefix, _ in _adapters(base))
    found: dict[str, list[Tensor]] = {}
    for name, value in base.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not name.startswith(adapters):
            found.setdefault(WRAPPED.sub("", name), []).append(value)
    return found


def _adapters(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix of its parameters' names, layer) for each part of each of peft's adapter layers."""
    for name, module in base.named_modules():
        if hasattr(module, "base_layer"):
            yield from ((f"{name}.{part}", module) for part in getattr(module, "adapter_layer_names", ()))


@dataclass(frozen=True)
class _Made:
    """Tensors of the model that a converter of transformers makes from several of the files, or from a part of one."""

    name: str
    converter: Any
    twin: Any
    sources: list[tuple[str, str]]  # the converter's pattern, the name in the files

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)  # it collects what it is given
        for pattern, key in self.sources:
            converter.add_tensor(self.name, key, pattern, tensors[key])
        made = converter.convert(self.name, model=self.twin, config=self.twin.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class _Match:
    """Which entries of the files fill what. direct: {name in the model: name in the files}; shapes: of all filled."""

    direct: dict[str, str] = field(default_factory=dict)
    made: list[_Made] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    optional: Sequence[str] = ()  # patterns of names that may be missing
    ignored: Sequence[str] = ()  # patterns of names that may be left over


def _match(base: nn.Module, targets: dict[str, list[Tensor]], entries: Entries) -> _Match:
    match = _Match()
    twin = _twin(base)
    if twin is None:
        for key in entries:
            match.direct[key] = key
    else:
        _match_names(twin, targets, entries, match)
        match.optional = tuple(twin._keys_to_ignore_on_load_missing or ())
        match.ignored = (*(twin._keys_to_ignore_on_load_unexpected or ()), *COMPUTED)
    match.shapes = {name: entries[key].size for name, key in match.direct.items()}
    for made in match.made:  # without memory: only the names and shapes are wanted
        sources = {key: _empty(entries[key], "meta") for _, key in made.sources}
        match.shapes |= {name: value.shape for name, value in made.convert(sources).items()}
    match.unexpected = [name for name in match.shapes if name not in targets]
    for name in match.unexpected:
        match.direct.pop(name, None)
    return match


def _match_names(twin: Any, targets: dict[str, list[Tensor]], entries: Entries, match: _Match) -> None:
    """Match as transformers' convert_and_load_state_dict_in_model does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(twin)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    made: dict[str, _Made] = {}
    for key in sorted(entries, key=_numbers_in_order):
        name, pattern = rename_source_key(key, renamings, converters, twin.base_model_prefix, targets)
        if name not in targets and key in targets:
            name, pattern = key, None
        if pattern is None:
            match.direct[name] = key
        else:
            made.setdefault(name, _Made(name, by_pattern[pattern], twin, [])).sources.append((pattern, key))
    match.made = list(made.values())


def _numbers_in_order(name: str) -> str:
    """A key that sorts expert 2 before expert 10: they are merged in this order."""
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)


def _twin(base: Any) -> Any:
    """The model of transformers as its config makes it, on the meta device; None for other models.

    fully_shard gives modules another class, and transformers looks names up by class.
    """
    if not (hasattr(base, "base_model_prefix") and hasattr(base, "config")):
        return None
    kind = type(base).__mro__[2] if isinstance(base, FSDPModule) else type(base)
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(base.config))  # type: ignore[attr-defined]


def _missing(
    folder: str | Path,
    base: nn.Module,
    targets: Mapping[str, list[Tensor]],
    match: _Match,
    keys: Iterable[str],
    fresh_head: bool,
) -> set[int]:
    """The tensors, by id, that are left to initialise: those of a fresh head. Errors: DataError for names left over."""
    filled = {id(tensor) for name in match.shapes for tensor in targets.get(name, ())}
    # A tied tensor has several names, and is filled by any of them.
    missing = [name for name, (tensor, *_) in targets.items() if id(tensor) not in filled]
    missing = [name for name in missing if not any(re.search(pattern, name) for pattern in match.optional)]
    unexpected = [name for name in match.unexpected if not any(re.search(pattern, name) for pattern in match.ignored)]
    fresh: list[str] = []
    left_out: list[str] = []
    if fresh_head:
        prefix = f"{getattr(base, 'base_model_prefix', '')}."
        fresh, missing = _split_head(missing, prefix, targets)
        left_out, unexpected = _split_head(unexpected, prefix, keys)
    if missing or unexpected:
        parts = [f"missing from the files: {some(missing)}"] if missing else []
        parts += [f"only in the files: {some(unexpected)}"] if unexpected else []
        raise DataError(
            f"the weights in {folder} are not those of {type(base).__name__.removeprefix('FSDP')}: {'; '.join(parts)}; "
            "build the model that they were saved from, or use load_pretrained(..., fresh_head=True) for a new head"
        )
    if fresh or left_out:
        log.info("weights of %s: new: %s; left out: %s", folder, some(fresh) or "none", some(left_out) or "none")
    return {id(tensor) for name in fresh for tensor in targets[name]}


def _split_head(names: Sequence[str], prefix: str, everything: Iterable[str]) -> tuple[list[str], list[str]]:
    """(names of a head: outside the base model, if `everything` has its prefix, and a pooler's; the others)."""
    has_head = any(name.startswith(prefix) for name in everything)
    head = [name for name in names if "pooler" in name.split(".") or (has_head and not name.startswith(prefix))]
    return head, [name for name in names if name not in head]


def _check_shapes(folder: str | Path, targets: Mapping[str, list[Tensor]], match: _Match, entries: Entries) -> None:
    """Errors: DataError for the first tensor of another shape, and for integers in place of floating-point numbers."""
    for name, shape in match.shapes.items():
        tensor = targets[name][0] if name in targets else None
        if tensor is not None and tensor.shape != shape:
            raise DataError(
                f"{name} is {list(shape)} in {folder} and {list(tensor.shape)} in the model; use the config of these "
                "files: its vocabulary, sizes and number of labels"
            )
    for name, key in match.direct.items():
        tensor, dtype = targets[name][0], entries[key].properties.dtype
        if tensor.is_floating_point() != dtype.is_floating_point:
            raise DataError(f"{name} is {dtype} in {folder} and {tensor.dtype} in the model; use unquantized weights")


def _empty(entry: TensorStorageMetadata, device: str) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _place(value: Tensor, target: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into the target or this rank's shard of it."""
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        value = distribute_tensor(value.to(mesh.device_type), mesh, target.placements, src_data_rank=None).to_local()
    local(target).copy_(value)


def _initialise(model: Any, base: Any, missing: set[int]) -> None:
    """Draw the adapters and the missing parameters in full, on every rank alike, and keep this rank's part."""
    layers = dict.fromkeys(layer for _, layer in _adapters(base))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        for layer in layers:
            if not hasattr(layer, "reset_lora_parameters"):
                continue
            parts = [module for part in layer.adapter_layer_names for module in getattr(layer, part).modules()]
            with _in_full(parts):
                for adapter in layer.active_adapters:
                    layer.reset_lora_parameters(adapter, model.peft_config[adapter].init_lora_weights)
        for module in base.modules():
            if any(id(parameter) in missing for parameter in module.parameters(recurse=False)):
                with _in_full([module], missing):
                    base._init_weights(module) if hasattr(base, "_init_weights") else module.reset_parameters()


@contextmanager
def _in_full(modules: Sequence[nn.Module], kept: Container[int] | None = None) -> Iterator[None]:
    """The modules' own parameters as whole tensors on the CPU; copied back afterwards, or only those `kept`, by id."""
    own = [
        (module, name, parameter, nn.Parameter(torch.full(parameter.shape, torch.nan)))
        for module in modules
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, _, whole in own:
        setattr(module, name, whole)
    try:
        yield
    finally:
        for module, name, parameter, _ in own:
            setattr(module, name, parameter)
    for _, _, parameter, whole in own:
        if kept is None or id(parameter) in kept:
            _place(whole, parameter)
