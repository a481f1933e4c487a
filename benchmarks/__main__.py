"""python -m benchmarks NAME ...: run a benchmark. NAME --help explains it.

amp          what mixed precision gains: time, memory and loss in every precision, for any task
gpu          tokens/s, MFU and memory on one GPU: a hand-written loop, Accelerate, Lightning Fabric
overhead     time per step of train_step compared with the same loops
collectives  bytes that each rank sends in a step (torchrun ... -m benchmarks.collectives)
checkpoint   how long a checkpoint blocks training (torchrun ... -m benchmarks.checkpoint)
storage      how long a save blocks a run on object storage (torchrun ... -m benchmarks.storage)
activations  bytes kept and FLOPs of a step for each parallel.activation_checkpointing
log_step     CPU time of a log step on each rank, for up to 4,096 simulated ranks
padding      how much padding data.group_by_length saves, and the time to look up its order
shuffle      how close the Parquet view's order comes to a full shuffle; time to a late step
packing      how full packed rows are, and how long planning them takes
tripwires    share of time that the consistency checks take (torchrun ... -m benchmarks.tripwires)
bit_exact    time, bytes and memory of parallel.bit_exact (torchrun ... -m benchmarks.bit_exact)
pretrained   time and memory to load pretrained weights into FSDP2 shards, and by from_pretrained
restart      duration of a restart under dist_amp launch, by phase
data         how fast a config's data are read, compared with torch's DataLoader
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module

from dist_amp.errors import ConfigError, nearest_name
from dist_amp.supervise.command_line import exit_status

BENCHES = re.findall(r"^(\w+)  ", __doc__ or "", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(run_bench, argv)


def run_bench(words: Sequence[str]) -> int:
    """Run the benchmark words[0] with the other arguments; returns its exit status."""
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    name, *rest = words
    if name not in BENCHES:
        near = nearest_name(name, BENCHES)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(BENCHES)}"
        raise ConfigError(f"there is no benchmark {name!r}; {hint}")
    module = import_module(f"benchmarks.{name}")
    return int(module.main(rest))


if __name__ == "__main__":
    sys.exit(main())
