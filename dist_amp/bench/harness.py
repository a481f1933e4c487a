"""What the benches share: a run of the command line, built and handed over."""

import sys
from collections.abc import Callable, Sequence

from dist_amp.config import Failure
from dist_amp.run import Run, build_run, load_config
from dist_amp.runtime import report_failure, start


def on_a_run(bench: Callable[[Run], None], argv: Sequence[str] | None) -> int:
    """Build the run of a command line, afresh and without evaluations, for `bench`; return the exit status."""
    try:
        words = sys.argv[1:] if argv is None else argv
        config = load_config(["--run.resume", "never", "--eval.every", "off", *words])
        with start(config.run) as world:
            run = build_run(config, world)
            bench(run)
            run.data.close()
        return 0
    except Failure as error:
        return report_failure(error, None)[0]
