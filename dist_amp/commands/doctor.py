"""python -m dist_amp.doctor [--json]: is this machine ready to train? A line per check: ok, warn or fail, and the fix.

Alone it checks versions, GPUs and driver, precisions, host name, ports, shared memory, open files, memory and folders.
Started on several ranks, as the training would be, also whether the ranks find one another and have the same code, how
fast they exchange data and multiply matrices, and which of them are slow:

    torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node=8 -m dist_amp.doctor

Each machine is checked; rank 0 prints. Takes some seconds. Exit status: 0, or 1 if a check fails; a warning is none.
"""

import sys
from collections.abc import Sequence
from functools import partial


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    try:  # here, since a package that is missing or broken is a finding
        from dist_amp.commands.command_line import exit_status
        from dist_amp.commands.doctor_report import run
    except (ImportError, OSError) as error:
        print(f"fail  packages  can't be imported ({error}); pip install -e . -c launch/constraints.txt")
        return 1
    return exit_status(partial(run, description=__doc__ or ""), argv)


if __name__ == "__main__":
    sys.exit(main())
