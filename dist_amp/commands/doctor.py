"""python -m dist_amp.doctor [--json]: is this machine ready to train? A line per check: ok, warn or fail, and the fix.

Alone it checks versions, GPUs and driver, precisions, host name, ports, shared memory, open files, memory and folders.
Started on several ranks, as the training would be, also whether the ranks find one another and have the same code, how
fast they exchange data and multiply matrices, and which of them are slow:

    torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node=8 -m dist_amp.doctor

Each machine is checked; rank 0 prints. Takes some seconds. Exit status: 0, or 1 if a check fails; a warning is none.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.commands.doctor_machine import Check, guarded, machine_checks
from dist_amp.commands.doctor_ranks import gathered, ranks_checks
from dist_amp.errors import Failure, first_line
from dist_amp.settings import RunConfig
from dist_amp.world import start

JOIN_SECONDS = 60.0  # how long a rank may take to start; assumed


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output in place of the lines")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the ranks; default auto")
    options = parser.parse_args(argv)
    config = RunConfig(device=options.device, timeout_seconds=JOIN_SECONDS)
    ranks = int(text) if (text := os.environ.get("WORLD_SIZE", "1")).isdigit() else 1
    checks = machine_checks(ranks) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    if ranks == 1:
        return show(checks, 1, options.json)
    shows = os.environ.get("RANK") == "0"
    try:
        with start(config) as world:
            checks = [*gathered(checks, world), *guarded("ranks", lambda: ranks_checks(world))]
    except Exception as error:
        shows = os.environ.get("LOCAL_RANK", "0") == "0"  # the others may not be there
        why = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {first_line(error)}"
        checks.append(Check("ranks", "fail", f"they can't work together: {why}"))
    return show(checks, ranks, options.json) if shows else 0


def show(checks: Sequence[Check], ranks: int, as_json: bool) -> int:
    """Print the checks and their numbers; return the exit status."""
    numbers = Counter(check.status for check in checks)
    if as_json:
        counts = {status: numbers[status] for status in ("ok", "warn", "fail")}
        print(json.dumps({"ranks": ranks, **counts, "checks": [asdict(check) for check in checks]}), flush=True)
    else:
        width = max(len(check.title) for check in checks)
        for check in checks:
            print(f"{check.status:<4}  {check.title:<{width}}  {check.found}{f'; {check.fix}' if check.fix else ''}")
        ready = "fix what failed before you train" if numbers["fail"] else "ready to train"
        print(f"\n{numbers['ok']} ok, {numbers['warn']} warn, {numbers['fail']} fail: {ready}", flush=True)
    return 1 if numbers["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
