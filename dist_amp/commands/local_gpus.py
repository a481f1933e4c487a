"""What a launcher asks before torchrun: the number of this machine's GPUs, and how its ranks are bound to CPUs.

    python -m dist_amp.commands.local_gpus ARGS      prints "8 --numa-binding=node", or "0" with run.device=cpu in ARGS

ARGS are those of dist_amp.train. GPUs that torch can't use are refused here, once, and not by each rank in each
restart.
"""

import os
import sys
from collections.abc import Sequence

import torch

from dist_amp.commands.command_line import exit_status
from dist_amp.config.sources import Setting, collect
from dist_amp.runtime.machine import check_gpus_are_used
from dist_amp.runtime.numa import has_nodes, why_unbound


def ask(words: Sequence[str]) -> None:
    """Print the number of GPUs that ranks will use, and torchrun's option where binding works."""
    if "--help" in words:
        print((__doc__ or "").strip())
        return
    gpus = gpus_to_use([word for word in words if word != "-h"])
    mode = binding(int(os.environ.get("NPROC_PER_NODE") or gpus), gpus)
    print(gpus, f"--numa-binding={mode}" if mode else "")


def gpus_to_use(words: Sequence[str]) -> int:
    """How many GPUs ranks with these settings will use. Errors: ConfigError for GPUs that torch can't use."""
    device = collect(words).get("run.device", Setting(("auto",), "by default")).words[:1]
    gpus = 0 if device == ("cpu",) else torch.cuda.device_count()
    if not gpus and device == ("auto",):
        check_gpus_are_used()
    return gpus


def binding(ranks: int, gpus: int) -> str | None:
    """The value of torchrun's --numa-binding; None where ranks are not bound, which is said if there are GPUs."""
    if not gpus or not has_nodes():
        return None
    if reason := why_unbound(ranks, gpus):
        print(f"numa   ranks are not bound to the CPUs near their GPUs: {reason}", file=sys.stderr)
        return None
    return "node"


if __name__ == "__main__":
    sys.exit(exit_status(ask, None))
