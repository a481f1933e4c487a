"""python -m dist_amp.launch [TORCHRUN'S OPTIONS] [--section.key VALUE ...]: train on one machine or
several.

    python -m dist_amp.launch --config ddp_bf16 --run.dir runs/mine
        on all GPUs, or in two CPU processes
    python -m dist_amp.launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ...
        on each of two machines; --nnodes 1:4: on one to four, which may come and go

It is torchrun -m dist_amp.train that checks the settings before it starts ranks, ends with their
one line of an error, and with their exit status: 0 done, 64 wrong setting, 65 data or checkpoint,
70 numerics, 75 stopped by a signal and saved (the same command continues), 1 anything else. If a
rank fails or dies, all restart from the last checkpoint, up to --max-restarts times (3).

`-m MODULE ARGUMENTS` at the end starts another module. In the environment: OMP_NUM_THREADS (CPU
threads per rank), PYTORCH_ALLOC_CONF (torch's GPU allocator; expandable_segments:True),
TORCH_ELASTIC_SHUTDOWN_TIMEOUT (seconds for saving after a signal; 120).
LOGLEVEL=INFO shows torchrun's own log.

Docs: docs/launching.md
"""

import logging
import math
import multiprocessing
import os
import signal
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from dist_amp.distributed.signals import BEFORE_RANKS, exit_on_signals

if __name__ == "__main__":
    exit_on_signals()  # before torch's imports, which take seconds
    if not {"-h", "--help"} & {*sys.argv}:
        text = "launch checks the settings, then starts the ranks: about 10 s until they have "
        print(f"{text}imported torch", file=sys.stderr, flush=True)
    # Where no rendezvous answers, torch's C++ prints pages of frames.
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

import torch
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.numa.binding import AffinityMode, NumaOptions

from dist_amp.commands.elastic import Restarts, after_signal, run_agent, who_explains
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.help import show_if_asked
from dist_amp.config.load import collect, load_config, target_in
from dist_amp.config.suggestions import check_unknown
from dist_amp.distributed.launchers import refuse_copies
from dist_amp.distributed.machine import check_gpus_are_used
from dist_amp.distributed.process import cpu_cores
from dist_amp.errors import ConfigError, Failure, first_line, in_one_line
from dist_amp.settings import Config
from dist_amp.supervise.command_line import exit_status

TRAIN = "dist_amp.train"
OTHER_LAUNCHERS = "-n -np --gpus --ngpus --num-gpus --num_gpus --nproc".split()  # for the ranks
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(run, argv, BEFORE_RANKS)


def run(argv: Sequence[str]) -> int:
    options, module, words = parse(argv)
    if words[-1:] in (["-h"], ["--help"]):
        print((__doc__ or "").strip())
        print("\npython -m dist_amp.train --help lists the settings, torchrun --help its options.")
        return 0
    if module == TRAIN and show_if_asked(words, "python -m dist_amp.launch", __doc__ or ""):
        return 0
    if not {"LOGLEVEL", "TORCH_LOGS"} & {*os.environ}:  # it comes below the line that explains
        logger = logging.getLogger("torch.distributed")
        logger.propagate = False
        logger.handlers = [logging.NullHandler()]
    check_options(options)
    gpus = gpus_to_use(words if module == TRAIN else [])
    ranks = ranks_per_node(options, gpus)
    what = f"-m {module}"
    check = partial(check_module, module)
    if module == TRAIN:
        what = f"task.target={target_in(collect(words))}"
        check = partial(check_settings, words, options, ranks)
    if status := in_fork(what, check):
        return status
    complete(options, ranks, gpus)
    options.module = True
    options.training_script = module
    options.training_script_args = words
    return start(options)


# --- the command line


def parse(argv: Sequence[str]) -> tuple[Namespace, str, list[str]]:
    """(torchrun's options, module, its arguments); options may stand among the settings, up to -m.

    They are known by exact names, since settings may begin like one. Errors: ConfigError.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for action in torchrun.get_args_parser()._actions:
        if action.option_strings and action.dest not in ("help", "module"):
            parser._add_action(action)
    defaults = {
        "nproc_per_node": "",  # decided in `complete`
        "max_restarts": 3,
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # USR1 would end it alone
    }
    for name, value in defaults.items():
        if f"PET_{name.upper()}" not in os.environ:  # torchrun's variables
            parser.set_defaults(**{name: value})
    names = [word.partition("=")[0] for word in argv]
    end = next((at for at, name in enumerate(names) if name in ("-m", "--module")), len(argv))
    try:
        options, words = parser.parse_known_args(argv[:end])
    except ArgumentError as error:
        name = (error.argument_name or "").partition("/")[0]
        raise ConfigError(f"{name}: {error.message}; see torchrun --help") from None
    words = [word for word in words if word != "--"]  # torchrun allows it before the module
    for name in names[:end]:
        if name in OTHER_LAUNCHERS:
            raise ConfigError(f"unknown option {name}; did you mean --nproc-per-node?")
    check_unknown(words, parser._option_string_actions)
    if end == len(argv):
        return options, TRAIN, words
    _, _, module = argv[end].partition("=")
    after = list(argv[end + 1 :])
    if not module:
        if not after:
            raise ConfigError(f"{argv[end]}: expected one argument; see torchrun --help")
        module = after.pop(0)
    return options, module, words + after


def check_options(options: Namespace) -> None:
    """Errors: ConfigError for a value that torchrun would refuse."""
    given = vars(options) | {"nproc_per_node": "1", "training_script": TRAIN}
    try:
        torchrun.config_from_args(Namespace(**given, module=True, training_script_args=[]))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"torchrun refuses its options: {first_line(error)}") from None
    except OSError as error:  # of --log-dir, which torchrun makes
        raise ConfigError(
            f"--log-dir={options.log_dir} can't be written ({error.strerror}); choose another"
        ) from None
    most = torchrun.parse_min_max_nnodes(options.nnodes)[1]
    if options.node_rank >= most:
        rule = f"must be below --nnodes={options.nnodes}; the first is 0"
        raise ConfigError(f"--node-rank={options.node_rank} {rule}")
    has_port = options.master_port not in (None, 29500)  # the default, 29500 in torch 2.11
    if most > 1:
        return
    refuse_copies()
    if not (options.rdzv_endpoint or has_port):
        # Any free port, which torch 2.11 does not choose by itself.
        options.standalone = options.standalone or options.rdzv_backend == "static"
        # torchrun hangs without a message if the host's name does not resolve.
        options.local_addr = options.local_addr or "127.0.0.1"


# --- before the ranks


def check_settings(words: Sequence[str], options: Namespace, ranks: int) -> None:
    """Check the settings once, not in each of a node's `ranks` and restart. Errors: ConfigError."""
    fewest, most = torchrun.parse_min_max_nnodes(options.nnodes)
    with redirect_stdout(StringIO()):  # what the task's module prints, the ranks print again
        config = load_config(words)
    if fewest == most:
        accumulation_steps(config.train, most * ranks)
    else:
        check_sizes(config, range(fewest, most + 1), ranks)


def check_sizes(config: Config, nodes: range, ranks: int) -> None:
    """Check that all numbers of nodes, of `ranks` each, can take one run. Errors: ConfigError."""
    given = f"--nnodes={nodes[0]}:{nodes[-1]}"
    if config.run.dir == "auto" or config.run.resume == "never":
        raise ConfigError(
            f"{given} restarts the run as nodes come and go: give run.dir, the same on each node, "
            "and leave run.resume=auto"
        )
    train = config.train
    size = train.global_batch_size
    everywhere = train.micro_batch_size * ranks * math.lcm(*nodes)
    if size == "auto" and config.run.allow_config_change:
        return
    if size == "auto" or train.accumulation_steps != "auto":
        raise ConfigError(
            f"{given} needs train.global_batch_size and train.accumulation_steps=auto, or the "
            f"batch would change with the number of nodes; use global_batch_size={everywhere}"
        )
    near = max(1, round(size / everywhere)) * everywhere
    for count in nodes:
        world_size = count * ranks
        if config.parallel.bit_exact and world_size.bit_count() != 1:
            setting, instead = "parallel.bit_exact=true", "parallel.bit_exact=false"
            why = f"{world_size} ranks are no power of two"
        elif size % (train.micro_batch_size * world_size):
            setting, instead = f"train.global_batch_size={size}", f"train.global_batch_size={near}"
            why = f"{size} is no multiple of micro_batch_size {train.micro_batch_size} x "
            why += f"{world_size} ranks"
        else:
            continue
        fits = f"doesn't fit --nnodes={count}"
        if count > nodes[0]:
            fits = f"fits --nnodes={nodes[0]}:{count - 1}, not {count}"
            instead = f"that or {instead}"
        raise ConfigError(f"{setting} {fits} ({why}); use {instead}")


def check_module(module: str) -> None:
    """Errors: ConfigError if there is no such module to start."""
    sys.path.insert(0, "")  # as `python -m` has it
    with suppress(ImportError, ValueError):
        if find_spec(module) is not None:
            return
    raise ConfigError(
        f"-m {module}: there is no such module to start in {Path.cwd()}, and none is installed; "
        "give its name, not its path"
    )


def in_fork(what: str, check: Callable[[], None]) -> int:
    """The exit status of a check that imports a user's code: neither it nor a GPU may stay here.

    what: the setting that names the code. Errors: ConfigError if the code ends the process.
    """
    context = multiprocessing.get_context("fork")
    status = context.Value("i", -1)

    def in_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        status.value = exit_status(lambda _: check(), ())
        os._exit(0)  # whatever threads the code has started

    child = context.Process(target=in_child)
    child.start()
    try:
        child.join()
    finally:
        child.kill()
    if status.value < 0:
        code = child.exitcode
        raise ConfigError(f"{what}: importing it ended the process with exit code {code}")
    return status.value


def ranks_per_node(options: Namespace, gpus: int) -> int:
    """Decide the number of ranks of this machine. Errors: ConfigError; Failure without a GPU."""
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
    return ranks


def complete(options: Namespace, ranks: int, gpus: int) -> None:
    """Decide the ranks' binding to CPUs, and the environment that they inherit."""
    if options.numa_binding is None:
        options.numa_binding = binding(ranks, gpus)
    environ = {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // ranks)),
        # Otherwise restarted ranks read the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",  # torch 2.11: always 30
    }
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL") == "FATAL":
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    if not any(map(os.environ.get, ALLOCATOR)):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # GPU memory fragments less
    for name, value in environ.items():
        if not os.environ.get(name):
            os.environ[name] = value


def gpus_to_use(words: Sequence[str]) -> int:
    """How many GPUs ranks with these settings use. Errors: ConfigError for GPUs torch can't use."""
    device = str(collect(words).get("run.device", "auto"))
    if device == "cpu":
        return 0
    gpus = torch.cuda.device_count()
    if not gpus and device == "auto":
        check_gpus_are_used()
    return gpus


def binding(ranks: int, gpus: int, nodes: Path = Path("/sys/devices/system/node")) -> str | None:
    """torchrun's --numa-binding; None on a machine of one node, or if it can't be done: say why.

    Slurm or a container may deny numactl and CPUs: it is tried here, where torchrun would fail.
    """
    if not gpus or len(list(nodes.glob("node[0-9]*"))) < 2:
        return None
    logging.getLogger("torch.numa.binding").disabled = True  # its traceback
    near = NumaOptions(AffinityMode.NODE)
    try:
        for gpu in range(ranks):
            tried = SubprocessHandler("true", (), {}, None, None, gpu, near)
            if tried.proc.wait():
                raise RuntimeError("numactl fails")
    except Exception as error:
        why = first_line(error)
        print(f"numa   ranks are not bound to the CPUs near their GPUs: {why}", file=sys.stderr)
        return None
    return near.affinity_mode.value


# --- the ranks, and how they ended


def start(options: Namespace) -> int:
    """Run the ranks to their end; returns their status. Errors: torchrun's, as Failure."""
    fewest, most = torchrun.parse_min_max_nnodes(options.nnodes)
    restarts = Restarts(options.max_restarts, elastic=fewest < most)
    at = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or 29500}"
    if most > 1:
        what = "joins" if restarts.elastic else "waits for"
        print(f"{options.nnodes} machines: this one {what} the others at {at}", flush=True)
    status = 0
    line = ""
    try:
        run_agent(options, restarts)
    except ChildFailedError as error:
        ended = who_explains(error.failures)
        status = ended.status
        line = restarts.line(ended)
    except SignalException as error:
        status, line = after_signal(error.sigval.name, getattr(error, "exit_codes", []))
    except Exception as error:
        started_ranks = getattr(error, "exit_codes", [])
        if isinstance(error, ValueError) and not started_ranks:  # as an unknown --rdzv-backend
            text = first_line(error).split(". ")[0]
            raise ConfigError(f"torchrun refuses its options: {text}") from error
        raise Failure(why_torchrun_failed(error, at, options.nnodes)) from error
    if line:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return status


def why_torchrun_failed(error: Exception, at: str, machines: str) -> str:
    """What the rendezvous, or the launcher itself, failed with, in one line."""
    inner = error.__cause__ or error.__context__ or error
    if isinstance(error, RendezvousTimeoutError):
        return f"not all of --nnodes={machines} machines joined the rendezvous at {at} in time"
    if isinstance(error, RendezvousClosedError):
        return f"the rendezvous at {at} is closed: another machine's last line says why"
    if "EADDRINUSE" in f"{error} {inner}":
        return f"the port of {at} is in use on this machine; choose another by --rdzv-endpoint"
    if isinstance(error, RendezvousError | DistError):
        why = first_line(inner).split(". ")[0].rstrip(".")
        return f"no rendezvous at {at} ({why}); start machine 0, or open the port"
    return f"torchrun failed: {in_one_line(error)}"


if __name__ == "__main__":
    sys.exit(main())
