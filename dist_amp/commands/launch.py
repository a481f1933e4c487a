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

`-m MODULE ARGUMENTS` at the end starts another module. --log-dir DIR keeps torchrun's own log, as
DIR/torchrun.log. In the environment: OMP_NUM_THREADS (CPU threads per rank), PYTORCH_ALLOC_CONF
(torch's GPU allocator; expandable_segments:True), TORCH_ELASTIC_SHUTDOWN_TIMEOUT (seconds for
saving after a signal; 120).

Docs: docs/launching.md
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
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
import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from dist_amp.commands.elastic import run_agent
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.help import show_if_asked
from dist_amp.config.load import collect, load_config, target_in
from dist_amp.config.suggestions import check_unknown
from dist_amp.distributed.launchers import refuse_copies
from dist_amp.distributed.machine import check_gpus_are_used
from dist_amp.distributed.process import LAUNCHER, cpu_cores
from dist_amp.distributed.rendezvous import loopback_listener
from dist_amp.errors import ConfigError, Failure, first_line, in_one_line
from dist_amp.settings import Config
from dist_amp.supervise.command_line import exit_status

TRAIN = "dist_amp.train"
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
    set_environment(ranks)
    os.environ["DIST_AMP_NNODES"] = options.nnodes  # for the ranks' check
    options.numa_binding = options.numa_binding or binding(gpus)
    options.module = True
    options.training_script = module
    options.training_script_args = words
    return start(options, ranks)


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
        "nproc_per_node": "",  # decided later, as the next one
        "max_restarts": None,
        "signals_to_handle": "SIGUSR2",  # `run_agent` handles those that stop a run
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
    check_unknown(words, parser._option_string_actions)
    if end == len(argv):
        return options, TRAIN, words
    _, equals, module = argv[end].partition("=")
    after = [*([module] if equals else []), *argv[end + 1 :]]
    if not after:
        raise ConfigError(f"{argv[end]}: expected one argument; see torchrun --help")
    return options, after[0], words + after[1:]


def check_options(options: Namespace) -> None:
    """Errors: ConfigError for a value that torchrun would refuse."""
    complete = {"nproc_per_node": "1", "max_restarts": options.max_restarts or 0, "module": True}
    complete |= {"training_script": TRAIN, "training_script_args": []}
    try:
        torchrun.config_from_args(Namespace(**{**vars(options), **complete}))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"torchrun refuses its options: {first_line(error)}") from None
    except OSError as error:  # of --log-dir, which torchrun makes
        raise ConfigError(
            f"--log-dir={options.log_dir} can't be written ({error.strerror}); choose another"
        ) from None
    fewest, most = torchrun.parse_min_max_nnodes(options.nnodes)
    if options.node_rank >= most:
        rule = f"must be below --nnodes={options.nnodes}; the first is 0"
        raise ConfigError(f"--node-rank={options.node_rank} {rule}")
    if most == 1:
        refuse_copies()
    if options.max_restarts is None:  # a node that leaves uses one up, too
        options.max_restarts = 100 if fewest < most else 3


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
    unit = train.micro_batch_size * ranks * math.lcm(*nodes)
    if size == "auto" and config.run.allow_config_change:
        return
    if size == "auto" or train.accumulation_steps != "auto":
        raise ConfigError(
            f"{given} needs train.global_batch_size and train.accumulation_steps=auto, or the "
            f"batch would change with the number of nodes; use global_batch_size={unit}"
        )
    if size % unit:
        raise ConfigError(
            f"train.global_batch_size={size} must be a multiple of micro_batch_size "
            f"{train.micro_batch_size} x {ranks} ranks x each of {given}, so of {unit}; use "
            f"{max(1, round(size / unit)) * unit}, or fewer nodes"
        )
    for world_size in (count * ranks for count in nodes):
        if config.parallel.bit_exact and world_size.bit_count() != 1:
            raise ConfigError(
                f"parallel.bit_exact=true needs a power of two of ranks, and {given} may have "
                f"{world_size}; use fewer nodes, or parallel.bit_exact=false"
            )


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
    checked = 100  # added to the status, since the code may end the process with any other
    child = os.fork()
    if child == 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os._exit(checked + exit_status(lambda _: check(), ()))  # whatever threads it has started
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        raise
    if code < checked:
        raise ConfigError(f"{what}: importing it ended the process with exit code {code}")
    return code - checked


def ranks_per_node(options: Namespace, gpus: int) -> int:
    """Decide the number of ranks of this machine. Errors: ConfigError; Failure without a GPU."""
    given = options.nproc_per_node
    if not (given or gpus) and torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1:
        raise Failure(
            "torch sees no GPU on this machine; fix that, or give --nproc-per-node for ranks on "
            "the CPU"
        )
    options.nproc_per_node = given or str(gpus or 2)
    ranks = 0
    with suppress(ValueError):  # "gpu" without one, too
        ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    if ranks < 1:
        rule = "must be a number above 0, auto, cpu, or gpu where there is one"
        raise ConfigError(f"--nproc-per-node={given} {rule}")
    return ranks


def set_environment(ranks: int) -> None:
    """Set what the ranks inherit, unless the user has."""
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL") == "FATAL":
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    environ = {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // ranks)),
        # Otherwise restarted ranks read the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",  # torch 2.11: always 30
    }
    if not any(map(os.environ.get, ALLOCATOR)):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # GPU memory fragments less
    os.environ.update({name: environ[name] for name in environ if not os.environ.get(name)})
    os.environ[LAUNCHER] = str(os.getpid())


def gpus_to_use(words: Sequence[str]) -> int:
    """How many GPUs ranks with these settings use. Errors: ConfigError for GPUs torch can't use."""
    device = str(collect(words).get("run.device", "auto"))
    if device == "cpu":
        return 0
    gpus = torch.cuda.device_count()
    if not gpus and device == "auto":
        check_gpus_are_used()
    return gpus


def binding(gpus: int, folder: Path = Path("/sys/devices/system/node")) -> str | None:
    """torchrun's --numa-binding; None on a machine of one node, or if it can't be done: say why.

    Slurm or a container may deny numactl or CPUs: it is tried here, where torchrun would fail.
    """
    nodes = [path.name.removeprefix("node") for path in folder.glob("node[0-9]*")]
    if not gpus or len(nodes) < 2:
        return None
    commands = [["numactl", f"--cpunodebind={node}", "true"] for node in nodes]
    if shutil.which("numactl") and not any(map(subprocess.call, commands)):
        return "node"
    why = "numactl is missing, or may not use all CPUs"
    print(f"numa   ranks are not bound to the CPUs near their GPUs: {why}", file=sys.stderr)
    return None


# --- the ranks


def start(options: Namespace, ranks: int) -> int:
    """Run the ranks to their end; returns their status. Errors: torchrun's, as Failure."""
    fewest, most = torchrun.parse_min_max_nnodes(options.nnodes)
    at = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or 29500}"
    store = None
    if most > 1:
        what = "joins" if fewest < most else "waits for"
        print(f"{options.nnodes} machines: this one {what} the others at {at}", flush=True)
    elif not options.rdzv_endpoint and options.master_port in (None, 29500):  # torch 2.11's default
        store = host_store(options)
    kept = options.log_dir is not None
    options.log_dir = options.log_dir or tempfile.mkdtemp(prefix="dist_amp_launch_")
    try:
        status, line = run_agent(options, ranks, elastic=fewest < most)
    except ValueError as error:  # as an unknown --rdzv-backend
        text = first_line(error).split(". ")[0]
        raise ConfigError(f"torchrun refuses its options: {text}") from error
    except Exception as error:
        raise Failure(why_torchrun_failed(error, at, options.nnodes)) from error
    finally:
        if not kept:
            shutil.rmtree(options.log_dir, ignore_errors=True)
        del store
    if line:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return status


def host_store(options: Namespace) -> dist.Store:  # type: ignore[name-defined]
    """The rendezvous of one machine, which others can't reach: torchrun loads pickles from it.

    Its address needs no name of the host, without which torchrun hangs.
    """
    port, listener = loopback_listener("127.0.0.1", 0)
    options.standalone = False
    options.rdzv_backend = "c10d"
    options.rdzv_endpoint = f"127.0.0.1:{port}"
    options.rdzv_conf = ",".join(filter(None, (options.rdzv_conf, "is_host=0")))
    options.rdzv_id = str(uuid.uuid4())
    options.local_addr = options.local_addr or "127.0.0.1"
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener
    )


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
