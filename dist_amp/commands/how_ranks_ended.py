"""What a launcher makes of its ranks' ends: whether to restart them, its exit status, and a line if they had no words.

A rank that fails by itself leaves its report in torchrun's error file (supervise/failure.py): what it printed, and the
number of steps that it had taken.
"""

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dist_amp.errors import SAVED_AND_STOPPED, ConfigError, DataError, Failure, NumericsError

KNOWN = {0, SAVED_AND_STOPPED, *(kind.exit_code for kind in (Failure, ConfigError, DataError, NumericsError))}


class Ended(NamedTuple):
    """The rank that explains a failure. text: what it reported, "" for nothing; step: how many steps it had taken.

    line: the text in one line, if it is of this project.
    """

    rank: int
    pid: int
    exit_code: int
    text: str = ""
    step: int = 0
    line: str = ""

    @property
    def cause(self) -> str:
        """One line without the rank's own traceback."""
        if self.text:
            return self.line or self.text.strip().splitlines()[0].removeprefix("error: ")
        if self.exit_code < 0:
            name = signal_name(-self.exit_code)
            hint = " (by the kernel, if the machine ran out of memory)" if name == "SIGKILL" else ""
            return f"rank {self.rank} (process {self.pid}) was killed by {name}{hint}"
        return f"rank {self.rank} (process {self.pid}) ended with status {self.exit_code} and reported nothing"

    @property
    def status(self) -> int:
        return self.exit_code if self.exit_code in KNOWN else 1

    def is_again(self, other: "Ended | None") -> bool:
        """Whether this is the other one's failure, and training got no further in between."""
        if other is None or not self.text or not other.text:
            return False
        return plain(self.text) == plain(other.text) and self.step <= other.step


def plain(text: str) -> str:
    """A report without what differs from one attempt to the next: which rank was first, and addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"^rank \d+: ", "", text))


def who_explains(failures: Mapping[int, ProcessFailure]) -> Ended:
    """The rank that left a report; else the one that failed first."""
    ends = []
    for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp):
        message: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {}
        extra: dict[str, Any] = message.get("extraInfo", {})
        text, step, line = str(message.get("message", "")), int(extra.get("step", 0)), str(extra.get("line", ""))
        ends.append(Ended(rank, failure.pid, failure.exitcode, text, step, line))
    return next((end for end in ends if end.text), ends[0])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass
class Restarts:
    """Decides on restarts: none after a wrong setting, wrong data at the start, a stop, or the same error twice.

    most: --max-restarts.
    """

    most: int
    last: Ended | None = None
    why_not: str = field(default="", init=False)

    def __call__(self, failures: Mapping[int, ProcessFailure], left: int) -> bool:
        ended, before = who_explains(failures), self.last
        self.last = ended
        at_the_start = before is None and ended.step == 0 and ended.exit_code == DataError.exit_code
        if at_the_start or ended.exit_code in (ConfigError.exit_code, SAVED_AND_STOPPED):
            return False
        if left and ended.is_again(before):
            self.why_not = f"not restarted: the same error came twice with no step between (after step {ended.step})"
            return False
        if left:
            why = "" if ended.text else f": {ended.cause}"  # its report is on the screen
            print(f"restart {self.most - left + 1} of {self.most}{why}", file=sys.stderr, flush=True)
        return True

    def line(self, ended: Ended) -> str:
        """What to say of the last failure; "" where the rank's own report is on the screen and says all."""
        if self.why_not:
            return f"{ended.cause}; {self.why_not}"
        return "" if ended.text or ended.exit_code == SAVED_AND_STOPPED else ended.cause


def after_signal(name: str, exit_codes: Sequence[int | None]) -> tuple[int, str]:
    """(exit status, line or ""): how the ranks of this machine ended after a signal to the launcher."""
    killed = {signal_name(-code) for code in exit_codes if code is not None and code < 0}
    if killed or not exit_codes or None in exit_codes:
        how = f"ranks ended by {', '.join(sorted(killed))}" if killed else "their ends are unknown"
        return 1, f"stopped by {name} before all ranks had saved and left ({how}); the last checkpoint is intact"
    statuses = [code for code in exit_codes if code]
    if SAVED_AND_STOPPED in statuses or not statuses:
        return max(set(statuses), key=statuses.count, default=0), ""
    return next((code for code in statuses if code in KNOWN), 1), ""
