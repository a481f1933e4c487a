"""torchrun's elastic agent in this process: its options, what has failed before each restart, and how the ranks ended.

`torch.distributed.run.run` makes its agent itself, so a subclass takes the agent's place in torch's module meanwhile.
The subclass reads private names. Where torch has other ones, a failure is restarted up to --max-restarts times, as by
torchrun, and the ranks' exit codes after a signal are unknown.
"""

import os
import signal
import time
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from dist_amp.errors import add_context
from dist_amp.runtime.process import LAUNCHER, without_stderr

SECONDS_TO_AGAIN = 1.0  # assumed: two SIGINT in less are one Ctrl-C, sent to the launcher twice

Failures = Mapping[int, ProcessFailure]  # by rank, of this machine: who had failed when the agent looked


def torchrun_options(parser: ArgumentParser) -> dict[str, Action]:
    """{"--nproc-per-node": its action}: every spelling of torchrun's options, without --help."""
    actions = [action for action in parser._actions if action.dest != "help"]
    return {name: action for action in actions for name in action.option_strings}


def run_agent(options: Namespace, restarts: Callable[[Failures, int], bool], hides_log: bool) -> None:
    """Run torchrun's agent in this process until all ranks have ended.

    restarts: whether to restart after a failure, by what has failed and how many restarts are left. hides_log: leave
    out what the agent writes to standard error before the ranks start. Errors: torchrun's own, with
    the context `exit_codes`: one of each rank of this machine that was started.
    """
    signals = Signals()

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> Any:
            quiet.close()
            with signals.held():
                return super()._start_workers(worker_group)

        def run(self, *role: str) -> Any:
            try:
                return super().run(*role)
            except Exception as error:
                add_context(error, exit_codes=_exit_codes(self))
                raise

        def _monitor_workers(self, worker_group: Any) -> Any:
            signals.deliver()  # torch's agent may have swallowed the exception
            result = super()._monitor_workers(worker_group)
            if result.failures and not restarts(result.failures, getattr(self, "_remaining_restarts", 0)):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, *after_signal: Any, **timeout: Any) -> None:
            # The agent names the signal by position when it got one. Another one while the ranks save would end the
            # agent alone. A terminal's Ctrl-C does not reach the ranks, which have sessions of their own.
            with _ignored(options.signals_to_handle if after_signal else "", KillOnSecondInterrupt(self)):
                super()._shutdown(*after_signal, **timeout)

    os.environ[LAUNCHER] = str(os.getpid())
    with patch.object(api, "LocalElasticAgent", Agent), signals.handled(), ExitStack() as quiet:
        if hides_log and hasattr(LocalElasticAgent, "_start_workers"):
            quiet.enter_context(without_stderr())  # where no rendezvous answers, torch's C++ prints pages of frames
        torchrun.run(options)


class Signals:
    """In place of torch's signal handler, whose exception may come at a bad time, or be swallowed.

    While ranks are being started the agent does not know them yet, and would leave them behind: it is raised then.
    """

    def __init__(self) -> None:
        self._arrived: signal.Signals | None = None
        self._held = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._arrived = signal.Signals(number)
        if not self._held:
            self.deliver()

    def deliver(self) -> None:
        """Errors: SignalException if a signal has arrived."""
        if self._arrived is not None:
            raise SignalException(f"process {os.getpid()} got {self._arrived.name}", sigval=self._arrived)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise at the end of the block what arrives in it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.deliver()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Let torch register this handler, from the first start of ranks on."""
        if not hasattr(processes, "_terminate_process_handler"):
            yield
            return
        with patch.object(processes, "_terminate_process_handler", self):
            yield


class KillOnSecondInterrupt:
    """The handler of SIGINT while the ranks save after a signal."""

    def __init__(self, agent: LocalElasticAgent):
        self._agent, self._since = agent, time.monotonic()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._since < SECONDS_TO_AGAIN:
            return
        for process in _processes(self._agent):
            with suppress(ProcessLookupError):
                process.kill()


@contextmanager
def _ignored(names: str, on_interrupt: KillOnSecondInterrupt) -> Iterator[None]:
    """Ignore the signals with these comma-separated names in the block, but for SIGINT, which has this handler."""
    numbers = [getattr(signal, name.strip(), None) for name in names.split(",")]
    handlers = {number: on_interrupt if number == signal.SIGINT else signal.SIG_IGN for number in numbers if number}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_codes(agent: LocalElasticAgent) -> list[int | None]:
    """The exit code of each rank of this machine, negative after a signal; [] if unknown."""
    return [process.returncode for process in _processes(agent)]


def _processes(agent: LocalElasticAgent) -> list[Any]:
    """The ranks of this machine, each a subprocess.Popen; [] if unknown."""
    handlers = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", {})
    return [handler.proc for handler in handlers.values()]
