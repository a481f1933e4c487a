"""python -m dist_amp.bench NAME ...: measure what something costs. NAME --help says more.

amp          what mixed precision buys: time, memory and loss curves in every precision; of your own task as well
gpu          tokens/s, MFU and memory on one GPU, compared with a hand-written loop, Accelerate and Lightning Fabric
overhead     time per step of train_step, compared with a hand-written loop, Accelerate and Lightning Fabric
collectives  what a step of each strategy sends for a config's model, on any number of ranks
checkpoint   how long a checkpoint blocks training (under torchrun: python -m dist_amp.bench.checkpoint)
activations  bytes kept and FLOPs of a step for each parallel.activation_checkpointing
log_step     what a log step costs the host of each rank, on up to 4,096 imagined ranks
order        what the order of the samples costs: computed for a large dataset, compared with a table
padding      what data.group_by_length saves of the padding, and what looking up its order costs
shuffle      how near the Parquet view's order comes to a full shuffle, and how soon a late step is found
packing      how full packed rows are, and how long the plan of them takes
tripwires    the share of time that the consistency checks take (under torchrun: python -m dist_amp.bench.tripwires)
pretrained   time and memory per rank to load pretrained weights into FSDP2 shards, compared with from_pretrained
data         how fast each kind of source is read, compared with DataLoader and datasets; what the demo waits for data
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module

from dist_amp.commands.command_line import exit_status
from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError

BENCHES = re.findall(r"^(\w+)  ", __doc__ or "", re.MULTILINE)
MODULES = {"amp": "dist_amp.bench.amp.__main__", "collectives": "dist_amp.verify.collectives"}  # others: their names


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run_bench, argv)


def run_bench(words: Sequence[str]) -> int:
    """Run the bench that the first word names with the other words; returns its exit status."""
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    name, *rest = words
    if name not in BENCHES:
        near = nearest_name(name, BENCHES)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(BENCHES)}"
        raise ConfigError(f"there is no bench {name!r}; {hint}")
    module = import_module(MODULES.get(name, f"dist_amp.bench.{name}"))
    return int(module.main(rest))


if __name__ == "__main__":
    sys.exit(main())
