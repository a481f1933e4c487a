"""The checks of `doctor`, of this machine or of all of them, as lines or as JSON."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from dist_amp.commands.command_line import Parser
from dist_amp.commands.doctor_machine import Check, guarded, machine_checks
from dist_amp.commands.doctor_ranks import gathered, ranks_checks
from dist_amp.errors import Failure, first_line
from dist_amp.settings import RunConfig
from dist_amp.world import start

JOIN_SECONDS = 60.0  # how long a rank may take to start; assumed


def run(argv: Sequence[str], description: str) -> int:
    """Make all checks and show them; description: of the command."""
    parser = Parser("python -m dist_amp.doctor", description)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output in place of the lines")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the ranks; default auto")
    options = parser.parse_args(argv)
    config = RunConfig(device=options.device, timeout_seconds=JOIN_SECONDS)
    size = os.environ.get("WORLD_SIZE", "1")
    ranks = int(size) if size.isdigit() else 1
    checks = machine_checks(ranks) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    if size == "1":
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
