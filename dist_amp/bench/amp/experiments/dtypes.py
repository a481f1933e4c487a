"""What autocast does, operation by operation: x @ y.T comes out in half precision, x + y stays as it is.

x and y are (1024, 1), float32; then the modules of a task, and what each computes in: of your own with --task.target.
"""

from typing import Any

import torch

from dist_amp.bench.timing import why_not
from dist_amp.errors import Failure
from dist_amp.precision import DTYPES
from dist_amp.settings import Config
from dist_amp.verify.dtypes import SHORT, dtype_report
from dist_amp.world import World


def demonstrate(device: torch.device) -> list[dict[str, str]]:
    """A row for each precision: the dtypes of x @ y.T and x + y."""
    x, y = (torch.ones(1024, 1, device=device) for _ in range(2))
    rows = []
    for name, dtype in DTYPES.items():
        with torch.autocast(device.type, dtype=dtype, enabled=name != "fp32"):
            product, total = x @ y.T, x + y
        rows.append({"precision": name, "x @ y.T": SHORT[product.dtype], "x + y": SHORT[total.dtype]})
    return rows


def operations(config: Config, world: World) -> dict[str, Any]:
    """The task's modules, and what each computes in under the config's precision."""
    try:
        text = dtype_report(config, world).text
    except Failure:  # in the settings, the task or the data
        raise
    except Exception as error:  # an operation that can't be watched
        text = why_not(error)
    return {"target": config.task.target, "text": text}
