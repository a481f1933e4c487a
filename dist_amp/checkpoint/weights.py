"""Loads a checkpoint's model weights into an ordinary model, in one process."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from dist_amp.checkpoint.compatibility import check_tensors
from dist_amp.checkpoint.format import Reader, State, read_into, rejection_as_data_error
from dist_amp.scaling.frozen import check_frozen, expect_checksums

AVERAGE = "ema"  # the section of optimizers/ema.py: a moving average of each trained parameter


def load_weights(
    model: nn.Module, checkpoint: Path, prefers_average: bool = False
) -> tuple[int, str]:
    """Load the checkpoint's weights into the model, in the model's dtypes. Returns (step, section).

    section: where the trained parameters come from: "model", or with `prefers_average` "ema", if
    the checkpoint has their moving average. Frozen parameters of which the checkpoint has only a
    checksum keep their values. Raises DataError.
    """
    state: State = {"model": get_model_state_dict(model)}
    averages: State = {}
    source = "model"
    with rejection_as_data_error(checkpoint):
        reader = Reader(checkpoint)
        metadata = reader.read_metadata()
        saved = {name.partition(".")[0] for name in metadata.state_dict_metadata}
        if prefers_average and AVERAGE in saved:
            source = AVERAGE
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            averages = {name: p.detach().float().clone() for name, p in trained.items()}
            state[source] = averages
        expect_checksums(state, model, metadata, checkpoint)
        for name, value in state["model"].items():
            stored = metadata.state_dict_metadata.get(f"model.{name}")
            if isinstance(stored, TensorStorageMetadata) and isinstance(value, Tensor):
                dtype = stored.properties.dtype  # parallel.param_dtype=bf16 stores in bf16
                if value.is_floating_point() and dtype.is_floating_point:
                    state["model"][name] = value.to(dtype)
        for section in state.keys() - {"frozen"}:
            check_tensors(checkpoint, metadata, section, state[section])
        read_into(state, reader)
    if "frozen" in state:
        check_frozen(model, state["frozen"], checkpoint)
    options = StateDictOptions(strict="frozen" not in state)
    set_model_state_dict(model, state["model"], options=options)
    with torch.no_grad():
        for name, value in averages.items():
            model.get_parameter(name).copy_(value)
    return reader.manifest.step, source
