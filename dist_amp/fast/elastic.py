"""torchrun's elastic agent in this process: its options, what has failed before each restart, and how the ranks ended.

`torch.distributed.run.run` makes its agent itself, so a subclass takes the agent's place in torch's module meanwhile.
The subclass reads private names. Where torch has other ones, a failure is restarted up to --max-restarts times, as by
torchrun, and the ranks' exit codes after a signal are unknown.
"""

import signal
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from dist_amp.errors import add_context
from dist_amp.runtime.process import without_stderr

Failures = Mapping[int, ProcessFailure]  # by rank, of this machine: who had failed when the agent looked


def torchrun_options(parser: ArgumentParser) -> dict[str, Action]:
    """{"--nproc-per-node": its action}: every spelling of torchrun's options, without --help."""
    actions = [action for action in parser._actions if action.dest != "help"]
    return {name: action for action in actions for name in action.option_strings}


def run_agent(options: Namespace, restarts: Callable[[Failures, int], bool], hides_log: bool) -> None:
    """Run torchrun's agent in this process until all ranks have ended.

    restarts: whether to restart after a failure, by what has failed and how many restarts are left. hides_log: leave
    out what the agent writes to standard error before the ranks start. Errors: torchrun's own. A SignalException has
    the context `exit_codes`, one of each rank of this machine.
    """

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> Any:
            quiet.close()
            return super()._start_workers(worker_group)

        def run(self, *role: str) -> Any:
            try:
                return super().run(*role)
            except SignalException as error:
                add_context(error, exit_codes=_exit_codes(self))
                raise

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.failures and not restarts(result.failures, getattr(self, "_remaining_restarts", 0)):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, *after_signal: Any, **timeout: Any) -> None:
            # The agent names the signal by position when it got one. Another one while the ranks save would end the
            # agent alone; a second Ctrl-C in a terminal reaches the ranks, which then stop at once.
            with _ignored(options.signals_to_handle if after_signal else ""):
                super()._shutdown(*after_signal, **timeout)

    with patch.object(api, "LocalElasticAgent", Agent), ExitStack() as quiet:
        if hides_log and hasattr(LocalElasticAgent, "_start_workers"):
            quiet.enter_context(without_stderr())  # where no rendezvous answers, torch's C++ prints pages of frames
        torchrun.run(options)


@contextmanager
def _ignored(names: str) -> Iterator[None]:
    """Ignore the signals with these comma-separated names in the block."""
    numbers = [getattr(signal, name.strip(), None) for name in names.split(",")]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers if number is not None}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_codes(agent: LocalElasticAgent) -> list[int | None]:
    """The exit code of each rank of this machine, negative after a signal; [] if unknown."""
    handlers = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", {})
    return [handler.proc.returncode for handler in handlers.values()]
