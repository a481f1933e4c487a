"""python -m dist_amp.bench NAME ...: measure what something costs. A NAME's own --help says more.

amp          what mixed precision buys: time, memory and loss curves of every precision; of your own task as well
gpu          tokens/s, MFU and memory of one GPU, against a loop written by hand, Accelerate and Lightning Fabric
overhead     a step of train_step against a loop written by hand, Accelerate and Lightning Fabric
collectives  what a step of each strategy sends for a config's model, on any number of ranks
checkpoint   how long a checkpoint holds training up (under torchrun: python -m dist_amp.bench.checkpoint)
tripwires    the share of the time that the tripwires take (under torchrun: python -m dist_amp.bench.tripwires)
"""

import sys
from collections.abc import Callable, Sequence

from dist_amp.bench.amp.__main__ import main as amp
from dist_amp.bench.checkpoint import main as checkpoint
from dist_amp.bench.collectives import main as collectives
from dist_amp.bench.gpu import main as gpu
from dist_amp.bench.overhead import main as overhead
from dist_amp.bench.tripwires import main as tripwires
from dist_amp.commands.command_line import exit_status
from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError

BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "amp": amp,
    "gpu": gpu,
    "overhead": overhead,
    "collectives": collectives,
    "checkpoint": checkpoint,
    "tripwires": tripwires,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(call, argv)


def call(words: Sequence[str]) -> int:
    """Hand the rest of the words to the bench that the first one names; returns its exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip())  # type: ignore[union-attr]
        return 0
    name, *rest = words
    if name not in BENCHES:
        near = nearest_name(name, list(BENCHES))
        hint = f"did you mean {near}?" if near else f"there are {', '.join(BENCHES)}"
        raise ConfigError(f"there is no bench {name!r}; {hint}")
    return BENCHES[name](rest)


if __name__ == "__main__":
    sys.exit(main())
