"""python -m dist_amp.launch [TORCHRUN'S OPTIONS] [--section.key VALUE ...]: train on one machine or
several.

    python -m dist_amp.launch --config configs/ddp_bf16.toml --run.dir runs/mine
        on all GPUs, or in two CPU processes
    python -m dist_amp.launch --nproc-per-node 4 --max-restarts 0 --train.steps 20
    python -m dist_amp.launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ...
        on each of two machines

It is torchrun -m dist_amp.train that checks the settings before it starts ranks, ends with their
one line of an error, and with their exit status: 0 done, 64 wrong setting, 65 data or checkpoint,
70 numerics, 75 stopped by a signal and saved (the same command continues), 1 anything else.

If a rank fails or dies, all restart from the last checkpoint, up to --max-restarts times (3); not
after a wrong setting, and not if the same error came twice with no step between. Without these
options torchrun would start one process and restart nothing. `-m MODULE ARGUMENTS` at the end
starts another module, such as benchmarks.checkpoint. In the environment: OMP_NUM_THREADS (CPU
threads per rank; cores divided by ranks), PYTORCH_ALLOC_CONF (torch's GPU allocator;
expandable_segments:True), TORCH_ELASTIC_SHUTDOWN_TIMEOUT (seconds for saving after a signal; 120).
LOGLEVEL=INFO shows torchrun's own log.
"""

import logging
import multiprocessing
import os
import signal
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import dropwhile
from pathlib import Path

from dist_amp.distributed.signals import BEFORE_RANKS, exit_on_signals, raise_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before torch's imports, which take seconds

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from dist_amp.commands.elastic import (
    Restarts,
    after_signal,
    run_agent,
    signal_name,
    torchrun_options,
    who_explains,
)
from dist_amp.commands.local_gpus import binding, gpus_to_use
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.help import show_if_asked
from dist_amp.config.load import load_config, target_of
from dist_amp.errors import ConfigError, Failure, context_of, first_line, in_one_line, nearest_name
from dist_amp.supervise.command_line import exit_status

TRAIN = "dist_amp.train"
OTHER_LAUNCHERS = "-n -np --gpus --ngpus --num-gpus --num_gpus --nproc".split()  # for the ranks
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    with raise_on_signals():
        return exit_status(run, argv, BEFORE_RANKS)


def run(argv: Sequence[str]) -> int:
    parser = torchrun.get_args_parser()
    torchruns, module, words = split(argv, parser)
    if {"-h", "--help"} & set(words) and not section_after_help(words):
        print((__doc__ or "").strip())
        print("\npython -m dist_amp.train --help lists the settings, torchrun --help its options.")
        return 0
    if module == TRAIN and show_if_asked(words, "python -m dist_amp.launch", __doc__ or ""):
        return 0
    hides_log = "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ
    if hides_log:
        hide_torchruns_log()
    options = read_options(torchruns, parser)
    status = check_settings(words, options) if module == TRAIN else check_module(module)
    if status:
        return status
    settings: list[str] = []
    if module.startswith("dist_amp."):  # after a bench's name
        settings = list(dropwhile(lambda word: not word.startswith("-"), words))
    complete(options, settings)
    options.module = True
    options.training_script = module
    options.training_script_args = list(words)
    return start(options, hides_log)


# --- the command line


def split(argv: Sequence[str], parser: ArgumentParser) -> tuple[list[str], str, list[str]]:
    """(torchrun's options, module, the module's arguments): by exact names, since settings may
    begin like an option.

    -m ends the options; before it they may stand among the settings. Errors: ConfigError for an
    option without a value, or whose name is almost one.
    """
    known = torchrun_options(parser)
    left = list(argv)
    torchruns: list[str] = []
    words: list[str] = []
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":  # as torchrun allows before what is not its own
            continue
        may_be_option = name.startswith("--") or not words
        option = known.get(name) if may_be_option else None
        if option is None:
            check_unknown(name, may_be_option, known)
            words.append(word)
            continue
        takes_value = option.nargs != 0 or option.dest == "module"
        if takes_value and not equals:
            if not left:
                raise ConfigError(f"{name} at the end has no value; see torchrun --help")
            value = left.pop(0)
        if option.dest == "module":
            return torchruns, value, [*words, *left]
        torchruns.append(word)
        if takes_value and not equals:
            torchruns.append(value)
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"{words[0]}: launch starts {TRAIN} by itself, so leave this out; -m MODULE starts "
            "another module, and --task.target FILE.py:CLASS trains your task"
        )
    return torchruns, TRAIN, words


def check_unknown(name: str, may_be_option: bool, known: Iterable[str]) -> None:
    """Errors: ConfigError for what is almost an option of torchrun, or another launcher's."""
    near = ""
    if may_be_option and name in OTHER_LAUNCHERS:
        near = "--nproc-per-node"
    elif name.startswith("--") and "." not in name:
        near = nearest_name(name, known, 0.8)
    if near:
        raise ConfigError(f"unknown option {name}; did you mean {near}?")


def section_after_help(words: Sequence[str]) -> bool:
    """Whether --help is followed by a section's name."""
    at = next(number for number, word in enumerate(words) if word in ("-h", "--help"))
    return at + 1 < len(words) and not words[at + 1].startswith("-")


def read_options(torchruns: Sequence[str], parser: ArgumentParser) -> Namespace:
    """torchrun's options, with this command's defaults where neither they nor torchrun's PET_...
    variables have one.

    Errors: ConfigError for a value that torchrun would refuse.
    """
    defaults = {
        "nproc_per_node": "",  # decided in `complete`
        "max_restarts": 3,
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # USR1 would end it alone
    }
    for name, value in defaults.items():
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: value})
    parser.exit_on_error = False
    try:
        options = parser.parse_args([*torchruns, TRAIN])
        machines = torchrun.parse_min_max_nnodes(options.nnodes)
        torchrun.config_from_args(Namespace(**vars(options) | {"nproc_per_node": "1"}))
    except ArgumentError as error:
        name = (error.argument_name or "").partition("/")[0]
        raise ConfigError(f"{name}: {error.message}; see torchrun --help") from None
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"torchrun refuses {' '.join(torchruns)}: {first_line(error)}") from None
    except OSError as error:  # of --log-dir, which torchrun makes
        raise ConfigError(
            f"--log-dir={options.log_dir} can't be written ({error.strerror}); choose another"
        ) from None
    if options.node_rank >= machines[1]:
        raise ConfigError(
            f"--node-rank={options.node_rank} must be below --nnodes={options.nnodes}; the first "
            "is 0"
        )
    has_address = options.local_addr or options.rdzv_endpoint or options.master_port
    if machines[1] == 1 and not has_address:
        # torchrun hangs without a message if the host's name does not resolve.
        options.local_addr = "127.0.0.1"
    return options


# --- before the ranks


def check_settings(words: Sequence[str], options: Namespace) -> int:
    """Check the settings once, not in each rank and restart; returns the exit status, after the
    error's one line.
    """
    fewest, most = torchrun.parse_min_max_nnodes(options.nnodes)
    ranks = 0  # not known
    if fewest == most and options.nproc_per_node.isdigit():
        ranks = most * int(options.nproc_per_node)

    def check() -> int:
        with redirect_stdout(StringIO()):  # what the task's module prints, the ranks print again
            config = load_config(words)
            if ranks:
                accumulation_steps(config.train, ranks)
        return 0

    return in_fork(check, f"task.target={target_of(words)}")


def check_module(module: str) -> int:
    """The same for -m MODULE: that there is one."""
    if "/" in module or module.endswith(".py"):
        name = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"-m {module}: -m takes a module's name, not its path; write -m {name}")

    def check() -> int:
        sys.path.insert(0, "")  # as `python -m` has it
        try:
            found = find_spec(module)
            if found is not None and found.submodule_search_locations is not None:  # a package
                found = find_spec(f"{module}.__main__")
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise ConfigError(
                f"-m {module}: there is no such module to start in {Path.cwd()}, and none is "
                "installed"
            )
        return 0

    return in_fork(check, f"-m {module}")


def in_fork(check: Callable[[], int], what: str) -> int:
    """The status of a check that imports a user's code, which must not stay in the launcher, nor a
    GPU that it touches.

    Errors: ConfigError if the code ends the process. what: the setting that names the code.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def in_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sender.send(exit_status(lambda _: check(), ()))

    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    sender.close()
    try:
        status: int = receiver.recv()
    except EOFError:  # it ended without an answer
        child.join()
        code = child.exitcode or 0
        how = f"by {signal_name(-code)}" if code < 0 else f"with status {code}"
        raise ConfigError(f"{what}: importing it ended the process {how}") from None
    finally:
        child.kill()
        child.join()
    return status if status in (0, ConfigError.exit_code) else 1


def complete(options: Namespace, words: Sequence[str]) -> None:
    """Decide the number of ranks and how they are bound to CPUs, and set the environment that they
    inherit.
    """
    gpus = gpus_to_use(words)
    if not options.nproc_per_node:
        if not gpus and torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1:
            raise Failure(
                "torch sees no GPU on this machine; fix that, or give --nproc-per-node for ranks "
                "on the CPU"
            )
        options.nproc_per_node = str(gpus or 2)
    try:
        ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError:  # "gpu" without one, too
        ranks = 0
    if ranks < 1:
        raise ConfigError(
            f"--nproc-per-node={options.nproc_per_node} must be a number above 0, auto, cpu, or "
            "gpu where there is one"
        )
    if options.numa_binding is None:
        options.numa_binding = binding(ranks, gpus)
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    environ = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        # Otherwise restarted ranks read the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",  # torch 2.11: always 30
    }
    if not any(map(os.environ.get, ALLOCATOR)):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # GPU memory fragments less
    for name, value in environ.items():
        if not os.environ.get(name):
            os.environ[name] = value


def hide_torchruns_log() -> None:
    """Leave out torchrun's own log, and the ranks' C++ warnings: they come below the line that says
    what failed.
    """
    logger = logging.getLogger("torch.distributed")
    logger.propagate = False
    logger.handlers = [logging.NullHandler()]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


# --- the ranks, and how they ended


def start(options: Namespace, hides_log: bool) -> int:
    """Run the ranks to their end; returns their exit status. Errors: Failure where torchrun itself
    fails.
    """
    restarts = Restarts(options.max_restarts)
    if torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1:
        print(
            f"{options.nnodes} machines: this one waits for the others at {rendezvous(options)}",
            flush=True,
        )
    try:
        run_agent(options, restarts, hides_log)
    except ChildFailedError as error:
        ended = who_explains(error.failures)
        return last_line(restarts.line(ended), ended.status)
    except SignalException as error:
        status, line = after_signal(error.sigval.name, context_of(error).get("exit_codes", []))
        return last_line(line, status)
    except ValueError as error:  # as an unknown --rdzv-backend
        if context_of(error).get("exit_codes"):
            raise Failure(
                why_torchrun_failed(error, rendezvous(options), options.nnodes)
            ) from error
        raise ConfigError(
            f"torchrun refuses its options: {first_line(error).split('. ')[0]}"
        ) from error
    except Exception as error:
        raise Failure(why_torchrun_failed(error, rendezvous(options), options.nnodes)) from error
    return 0


def rendezvous(options: Namespace) -> str:
    return options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or 29500}"


def last_line(text: str, status: int) -> int:
    """Print the line, if there is one; returns the status."""
    if text:
        print(f"error: {text}", file=sys.stderr, flush=True)
    return status


def why_torchrun_failed(error: Exception, at: str, machines: str) -> str:
    """What the rendezvous, or the launcher itself, failed with, in one line."""
    inner = error.__cause__ or error.__context__ or error
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"not all of --nnodes={machines} machines joined the rendezvous at {at} in time; start "
            "the others"
        )
    if isinstance(error, RendezvousClosedError):
        return (
            f"the rendezvous at {at} is closed: another machine has ended the run; its last line "
            "says why"
        )
    if "EADDRINUSE" in f"{error} {inner}":
        return (
            f"the port of {at} is in use on this machine; choose another by --master-port or "
            "--rdzv-endpoint"
        )
    if isinstance(error, RendezvousError | DistError):
        why = first_line(inner).split(". ")[0].rstrip(".")
        return (
            f"no rendezvous at {at} ({why}); start machine 0, correct the address, or open the port"
        )
    return f"torchrun failed: {in_one_line(error)}"


if __name__ == "__main__":
    sys.exit(main())
