"""Load pretrained weights from safetensors files, as `save_pretrained` writes them, into shards.

transformers' own loader maps the names (prefixes of base models, renamed and merged weights) and
reads this rank's slices; they are then copied into the model. Names and shapes must match.
"""

import copy
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_amp.errors import DataError, some_of
from dist_amp.scaling.meta import SHOWN
from dist_amp.sources.files import stay_local_without_network
from dist_amp.world import local

log = logging.getLogger(__name__)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The parts of a name that peft inserts for the modules that it wraps.
WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
Targets = Mapping[str, list[Tensor]]
Slices = Mapping[str, Any]


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path, fresh_head: bool = False) -> None:
    """Set the model's parameters and persistent buffers to the values in the files.

    model: a transformers model, perhaps wrapped by peft, or plain modules; sharded or not, with
    memory. LoRA adapters are initialised: these files have none. fresh_head: initialise a head (all
    outside the base model, and a pooler) that the files lack, and ignore a different head in them.
    Initial values depend only on torch's seed. Raises DataError.
    """
    folder = Path(folder)
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
    # {name in a file: the parameters and buffers that it fills}; adapters are left out
    targets: dict[str, list[Tensor]] = {}
    for name, value in base.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and ".lora_" not in name:
            targets.setdefault(WRAPPED.sub("", name), []).append(value)
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
    fresh: list[str] = []
    if fresh_head:
        fresh, missing = split_head(base, missing, targets)
        left_out, unexpected = split_head(base, unexpected, slices)
        new = some_of(fresh, SHOWN)
        log.info(f"weights of {folder}: initialised: {new}; ignored: {some_of(left_out, SHOWN)}")
    if missing or unexpected:
        raise DataError(
            f"the weights in {folder} are not those of {type(base).__name__.removeprefix('FSDP')}: "
            f"missing from the files: {some_of(missing, SHOWN) or 'none'}; only in the files: "
            f"{some_of(unexpected, SHOWN) or 'none'}; build the model that they were saved from, "
            "or use load_pretrained(..., fresh_head=True) for a new head"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        initialise_adapters(model)
        initialise_head(base, fresh, targets)
    for first, *copies in targets.values():
        for trained_copy in copies:  # peft's copy of a wrapped module
            local(trained_copy).copy_(local(first))


def weight_files(folder: Path) -> list[Path]:
    """The single file, or those of the index. Raises DataError if there is neither."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" ({other[0]} is a pickle; convert it with save_pretrained)" if other else ""
        raise DataError(
            f"{folder} has no weights: neither {SINGLE} nor {INDEX}{hint}; give a model's folder"
        )
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return [folder / name for name in sorted(names)]


def check_shapes(folder: Path, targets: Targets, slices: Slices) -> None:
    """Raises DataError if a shape differs, or the file has integers for floating-point weights."""
    for name in sorted(slices.keys() & targets.keys()):
        target = targets[name][0]
        shape = slices[name].get_shape()
        dtype = slices[name].get_dtype()
        is_quantized = target.is_floating_point() and not dtype.startswith(("F", "BF"))
        fits = shape == list(target.shape) or (not shape and target.shape == (1,))
        if not fits or is_quantized:
            raise DataError(
                f"{name} is {dtype} {shape} in {folder} and {target.dtype} {list(target.shape)} in "
                "the model; use the config of these files, and weights that are not quantized"
            )


def as_published(model: nn.Module) -> None:
    """Change transformers models inside `model` so that `from_pretrained` can read what is saved.

    Parameters that were made [1], because FSDP2 can't shard scalars, become scalars again. A model
    that was built from a config gets the generation_config of that config's folder.
    """
    from transformers import GenerationConfig, PreTrainedModel

    inside: set[nn.Module] = set()
    for part in model.modules():
        if part in inside or not isinstance(part, PreTrainedModel):
            continue
        inside |= set(part.modules())
        shapes = {name: p.shape for name, p in empty_twin(part).named_parameters()}
        for name, parameter in part.named_parameters():
            if parameter.shape == (1,) and shapes.get(name) == ():
                parameter.data = parameter.data.reshape(())
        config: Any = part.config
        if part.can_generate() and config.name_or_path:
            derived = GenerationConfig.from_model_config(config)
            if part.generation_config.to_diff_dict() == derived.to_diff_dict():
                stay_local_without_network()
                with suppress(OSError):  # not every model has such a file
                    part.generation_config = GenerationConfig.from_pretrained(config.name_or_path)


def empty_twin(base: Any) -> Any:
    """The same transformers model on the meta device, without adapters and sharding."""
    kind = type(base)
    if isinstance(base, FSDPModule):  # the class before fully_shard, whose name the loader needs
        kind = kind.__mro__[2]
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(base.config))


def fill(base: Any, targets: Targets, slices: Slices) -> tuple[list[str], list[str]]:
    """Copy the slices into the targets. Returns (names that the files lack, unexpected names)."""
    if not hasattr(base, "base_model_prefix"):  # plain modules
        for name in targets.keys() & slices.keys():
            copy_into(slices[name][...], targets[name][0])
        missing = [name for name in targets if name not in slices]
        return missing, [name for name in slices if name not in targets]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    twin = empty_twin(base)
    mapping: Any = get_model_conversion_mapping(twin)
    config = LoadStateDictConfig(weight_mapping=mapping)
    present = {name: tensors[0].detach() for name, tensors in targets.items()}
    for name, parameter in twin.named_parameters():
        if parameter.ndim == 0 and name in present:  # FSDP2 can't shard scalars: [1] in the model
            present[name] = torch.empty(())
    layers: dict[str, dict[str, Any]] = {}
    for key, part in slices.items():
        layer = "".join(re.findall(r"^.*?\d\.", key))  # the name up to its first number
        layers.setdefault(layer, {})[key] = part
    filled: set[int] = set()  # by id: a tied tensor has several names, and is filled by any of them
    missing_keys = set(targets)
    unexpected: set[str] = set()
    # One layer at a time, to save memory: the loader reads into new tensors, with the dtype and the
    # sharding of those that it replaces in the twin.
    for parts in layers.values():
        twin.load_state_dict(present, strict=False, assign=True)
        info, _ = convert_and_load_state_dict_in_model(twin, parts, config)
        if problems := [*map(str, info.mismatched_keys), *info.conversion_errors.values()]:
            cause = problems[0].strip().splitlines()[-1]
            raise DataError(f"the weights do not fit the model: {cause}; use the files' own config")
        state = twin.state_dict()
        for name in targets.keys() & state.keys() - info.missing_keys:
            copy_into(state[name], targets[name][0])
            filled.add(id(targets[name][0]))
        twin._adjust_missing_and_unexpected_keys(info)
        missing_keys -= state.keys() - info.missing_keys
        unexpected |= info.unexpected_keys
    missing = [
        name for name in targets if name in missing_keys and id(targets[name][0]) not in filled
    ]
    return missing, sorted(unexpected)


def split_head(
    base: Any, names: Sequence[str], everything: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Returns (names of a head, other names). A head: a pooler, and all outside the base model."""
    prefix = f"{base.base_model_prefix}."
    has_base = any(name.startswith(prefix) for name in everything)
    head = []
    for name in names:
        if "pooler" in name.split(".") or (has_base and not name.startswith(prefix)):
            head.append(name)
    return head, [name for name in names if name not in head]


def copy_into(value: Tensor, target: Tensor) -> None:
    """Copy a tensor, whole or sharded like the target, into this rank's part of the target."""
    if value.ndim == 0:
        value = value.reshape(target.shape)
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        mesh = target.device_mesh
        value = value.to(mesh.device_type)
        value = distribute_tensor(value, mesh, target.placements, src_data_rank=None)
    local(target).copy_(local(value))


def initialise_adapters(model: Any) -> None:
    """Initialise LoRA adapters by peft's default. Raises DataError for another method."""
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "init_lora_weights", True) is not True:
            raise DataError(
                f"init_lora_weights={config.init_lora_weights} can't be drawn into shards; use the "
                "default, True"
            )
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            copy_into(whole, parameter)
        if ".lora_B." in name:
            copy_into(torch.zeros(parameter.shape), parameter)


def initialise_head(base: Any, names: Sequence[str], targets: Targets) -> None:
    """Initialise the parameters `names`: draw each one whole, and copy this rank's part."""
    if not names:
        return
    twin = empty_twin(base).float()
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        part = twin.get_submodule(path).to_empty(device="cpu", recurse=False)
        for value in part.parameters(recurse=False):
            value.fill_(math.nan)  # load_parameters reports what the model does not initialise
        twin._init_weights(part)
        for name, value in part.named_parameters(path, recurse=False):
            if name in names:
                copy_into(value, targets[name][0])
