"""python -m dist_amp.doctor: is this machine ready to train? A line per check: ok, warn or fail,
and the fix.

Alone it checks versions, GPUs and driver, precision, host name, shared memory and folders.
Started on several ranks, as the training would be, also whether the ranks find each other, how fast
they exchange data and multiply matrices, and which of them are slow:

    torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node=8 -m dist_amp.doctor

Rank 0 prints what it finds on its machine, and what is wrong on the others. Takes some seconds.
Exit status: 0, or 1 if a check fails; a warning is none.

Docs: docs/launching.md
"""

import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

JOIN_SECONDS = 60.0  # how long a rank may take to start; assumed


def main(argv: Sequence[str] | None = None) -> int:
    try:  # here, since a package that is missing or broken is a finding
        from dist_amp.commands import doctor_checks  # noqa: F401
        from dist_amp.supervise.command_line import exit_status
    except (ImportError, OSError) as error:
        fix = "pip install -e . -c launch/constraints.txt"
        print(f"fail  packages  can't be imported ({error}); {fix}")
        return 1
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    from dist_amp.commands.doctor_checks import fail, machine_checks, ranks_checks
    from dist_amp.errors import first_line
    from dist_amp.settings import RunConfig
    from dist_amp.supervise.command_line import Parser
    from dist_amp.world import start

    parser = Parser("python -m dist_amp.doctor", __doc__)
    devices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", default="auto", choices=devices, help="of the ranks")
    options = parser.parse_args(argv)
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    checks = machine_checks() if is_first_here else []
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return show(checks)
    shows = os.environ.get("RANK") == "0"
    try:
        with start(RunConfig(device=options.device, timeout_seconds=JOIN_SECONDS)) as world:
            for host, others in world.gather((platform.node(), checks))[1:]:
                bad = [check for check in others if check.status != "ok"]
                checks += [check._replace(name=f"{check.name} ({host})") for check in bad]
            checks += ranks_checks(world)
    except Exception as error:
        shows = is_first_here  # rank 0 may not be there
        checks.append(fail("ranks", f"they can't work together: {first_line(error)}"))
    return show(checks) if shows else 0


def show(checks: Sequence[Any]) -> int:
    """Print the checks and their numbers; return the exit status."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:<4}  {check.name:<{width}}  {check.text}")
    numbers = Counter(check.status for check in checks)
    ready = "fix what failed before you train" if numbers["fail"] else "ready to train"
    summary = ", ".join(f"{numbers[status]} {status}" for status in ("ok", "warn", "fail"))
    print(f"\n{summary}: {ready}", flush=True)
    return 1 if numbers["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
