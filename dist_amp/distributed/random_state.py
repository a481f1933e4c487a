"""Random numbers: the one place that seeds, saves and restores every generator."""

import math
import random
from typing import Any

import numpy
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, the GPU's included."""
    seed_host(seed)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """All but the GPU's: before CUDA is initialised, torch.manual_seed formats the stack, for 0.1
    ms (measured).
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002 (a task may draw from the global generator)
    torch.default_generator.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators of Python, NumPy, torch and the device, as tensors."""
    _, numbers, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002
    _, keys, position, has_gauss, cached = numpy_state
    state = {
        "python": torch.tensor(numbers),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    position, has_gauss, cached = state["numpy_gauss"].tolist()
    keys = state["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
