"""python -m dist_amp.doctor [--json]: is this machine ready to train? A line per check: ok, warn or
fail, and the fix.

Alone it checks versions, GPUs and driver, precisions, host name, memory, shared memory and folders.
Started on several ranks, as the training would be, also whether the ranks find each other and have
the same code, how fast they exchange data and multiply matrices, and which of them are slow:

    torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node=8 -m dist_amp.doctor

Each machine is checked; rank 0 prints. Takes some seconds. Exit status: 0, or 1 if a check fails; a
warning is none.

Docs: docs/launching.md
"""

import importlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

PACKAGES = ("torch", "datasets", "tensorboard", "pydantic", "tomli_w", "safetensors")
JOIN_SECONDS = 60.0  # how long a rank may take to start; assumed


def main(argv: Sequence[str] | None = None) -> int:
    try:  # here, since a package that is missing or broken is a finding
        for package in PACKAGES:
            importlib.import_module(package)
        from dist_amp.supervise.command_line import exit_status
    except (ImportError, OSError) as error:
        fix = "pip install -e . -c launch/constraints.txt"
        print(f"fail  packages  can't be imported ({error}); {fix}")
        return 1
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    from dist_amp.commands.doctor_checks import fail, machine_checks, merge, ranks_checks
    from dist_amp.errors import first_line
    from dist_amp.settings import RunConfig
    from dist_amp.supervise.command_line import Parser
    from dist_amp.world import start

    parser = Parser("python -m dist_amp.doctor", __doc__)
    text = "one JSON object on standard output in place of the lines"
    parser.add_argument("--json", action="store_true", help=text)
    devices = ("auto", "cpu", "cuda")
    text = "of the ranks; default auto"
    parser.add_argument("--device", default="auto", choices=devices, help=text)
    options = parser.parse_args(argv)
    size = os.environ.get("WORLD_SIZE", "1")
    ranks = int(size) if size.isdigit() else 1
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    checks = machine_checks() if is_first_here else []
    if size == "1":
        return show(checks, 1, options.json)
    shows = os.environ.get("RANK") == "0"
    try:
        with start(RunConfig(device=options.device, timeout_seconds=JOIN_SECONDS)) as world:
            machines = world.gather((platform.node(), checks))
            found = [(host, of_host) for host, of_host in machines if of_host]
            checks = [*merge(found), *ranks_checks(world)]
    except Exception as error:
        shows = is_first_here  # rank 0 may not be there
        checks.append(fail("ranks", f"they can't work together: {first_line(error)}"))
    return show(checks, ranks, options.json) if shows else 0


def show(checks: Sequence[Any], ranks: int, as_json: bool) -> int:
    """Print the checks and their numbers; return the exit status."""
    numbers = Counter(check.status for check in checks)
    counts = {status: numbers[status] for status in ("ok", "warn", "fail")}
    if as_json:
        report = {"ranks": ranks, **counts, "checks": [asdict(check) for check in checks]}
        print(json.dumps(report), flush=True)
    else:
        width = max(len(check.title) for check in checks)
        for check in checks:
            fix = f"; {check.fix}" if check.fix else ""
            print(f"{check.status:<4}  {check.title:<{width}}  {check.found}{fix}")
        ready = "fix what failed before you train" if numbers["fail"] else "ready to train"
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        print(f"\n{summary}: {ready}", flush=True)
    return 1 if numbers["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
