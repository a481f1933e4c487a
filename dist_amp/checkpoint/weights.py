"""Loads a checkpoint's model weights into an ordinary model, in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from dist_amp.checkpoint.compatibility import check_tensors
from dist_amp.checkpoint.frozen import check_frozen, frozen_names, saved_checksums
from dist_amp.checkpoint.reader import Reader, read_into, rejection_as_data_error


def load_weights(model: nn.Module, checkpoint: Path, average: bool = False) -> int:
    """Set the model's weights to the checkpoint's, in the model's own dtypes; return the checkpoint's step.

    average: the moving average (optim.ema) in place of each trained parameter.
    Frozen parameters that the checkpoint does not contain stay as the model has them. Errors: DataError if the
    checkpoint is rejected, has other parameter names or shapes, or was trained on other frozen parameters.
    """
    weights = get_model_state_dict(model)
    averages: dict[str, Any] = {}
    if average:
        averages = {name: p.detach().float().clone() for name, p in model.named_parameters() if p.requires_grad}
    with rejection_as_data_error(checkpoint):
        reader = Reader(checkpoint)
        metadata = reader.read_metadata()
        frozen = saved_checksums(model, metadata, checkpoint)
        for name in frozen_names(model) if frozen else ():
            del weights[name]
        for name, value in weights.items():
            weights[name] = _in_stored_dtype(value, metadata.state_dict_metadata.get(f"model.{name}"))
        check_tensors(checkpoint, metadata, "model", weights)
        if average:
            check_tensors(checkpoint, metadata, "ema", averages)
        read_into({"model": weights, "ema": averages, **frozen}, reader)
    if frozen:
        check_frozen(model, frozen["frozen"], checkpoint)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=not frozen))
    with torch.no_grad():
        for name, value in averages.items():
            model.get_parameter(name).copy_(value)
    return reader.manifest.step


def has_average(checkpoint: Path) -> bool:
    """Whether the checkpoint holds a moving average of the parameters. Errors: DataError if it is rejected."""
    with rejection_as_data_error(checkpoint):
        names = Reader(checkpoint).read_metadata().state_dict_metadata
    return any(name.startswith("ema.") for name in names)


def _in_stored_dtype(value: Any, stored: Any) -> Any:
    """The tensor to read an entry into: parallel.param_dtype=bf16 stores a float32 model's parameters in bf16."""
    if not (isinstance(stored, TensorStorageMetadata) and isinstance(value, Tensor)):
        return value
    dtype = stored.properties.dtype
    return value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value
