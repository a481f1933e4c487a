"""Loads a checkpoint's model weights into an ordinary model, in one process."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from dist_amp.checkpoint.compatibility import check_tensors
from dist_amp.checkpoint.reader import Reader, read_into, rejection_as_data_error


def load_weights(model: nn.Module, checkpoint: Path) -> int:
    """Set the model's weights to the checkpoint's, in the model's own dtypes; return the checkpoint's step.

    Errors: DataError if the checkpoint is rejected, or has other parameter names or shapes.
    """
    weights = get_model_state_dict(model)
    with rejection_as_data_error(checkpoint):
        reader = Reader(checkpoint)
        metadata = reader.read_metadata()
        for name, value in weights.items():
            weights[name] = _in_stored_dtype(value, metadata.state_dict_metadata.get(f"model.{name}"))
        check_tensors(checkpoint, metadata, "model", weights)
        read_into({"model": weights}, reader, alone=True)
    set_model_state_dict(model, weights)
    return reader.manifest.step


def _in_stored_dtype(value: Any, stored: Any) -> Any:
    """The tensor to read an entry into: parallel.param_dtype=bf16 stores a float32 model's parameters in bf16."""
    if not (isinstance(stored, TensorStorageMetadata) and isinstance(value, Tensor)):
        return value
    dtype = stored.properties.dtype
    return value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value
