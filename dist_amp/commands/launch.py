"""python -m dist_amp.launch [TORCHRUN'S OPTIONS] [SETTINGS]: train on one machine or several.

    python -m dist_amp.launch --config ddp_bf16 --run.dir runs/mine
        on all GPUs, or in two CPU processes
    python -m dist_amp.launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ...
        on each of two machines; --nnodes 1:4: on one to four, which may join and leave

It runs torchrun -m dist_amp.train, but checks the settings before ranks start, prints an error in
one line at the end, and returns the ranks' exit status: 0 done, 64 wrong setting, 65 data or
checkpoint, 70 numerics, 75 stopped by a signal and saved (the same command continues if it sets
run.dir), 1 anything else. If a rank fails or dies, all restart from the last checkpoint, up to
--max-restarts times (3, or 100 with --nnodes MIN:MAX).

`-m MODULE ARGUMENTS` at the end starts another module. torchrun --help lists torchrun's options,
such as --numa-binding node; --log-dir DIR keeps torchrun's log as DIR/torchrun.log. Environment:
OMP_NUM_THREADS (CPU threads per rank), PYTORCH_ALLOC_CONF (torch's GPU allocator;
expandable_segments:True), TORCH_ELASTIC_SHUTDOWN_TIMEOUT (seconds for saving after a signal; 120).

Docs: docs/launching.md
"""

import math
import os
import sys
import tempfile
import uuid
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO

from dist_amp.distributed.signals import BEFORE_RANKS, end_on_ctrl_c

if __name__ == "__main__":
    end_on_ctrl_c()  # before torch's imports, which take seconds
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides gloo's warnings on host names

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from dist_amp.commands.elastic import run_agent
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.help import show_if_asked
from dist_amp.config.load import load_config
from dist_amp.distributed.launchers import refuse_copies
from dist_amp.distributed.machine import check_gpus_are_used
from dist_amp.distributed.process import LAUNCHER, cpu_cores
from dist_amp.distributed.rendezvous import loopback_listener
from dist_amp.errors import ConfigError, Failure, first_line, in_one_line
from dist_amp.settings import Config
from dist_amp.supervise.command_line import command

TRAIN = "dist_amp.train"


@command(BEFORE_RANKS)
def main(argv: Sequence[str]) -> int:
    options, module, words = parse(argv)
    config = None
    if module == TRAIN:
        if show_if_asked(words, "python -m dist_amp.launch", __doc__ or ""):
            return 0
        with redirect_stdout(StringIO()):  # the ranks print again what the task's module prints
            config = load_config(words)
    gpus = 0
    if config is None or config.run.device != "cpu":
        gpus = torch.cuda.device_count()
        if not gpus:
            check_gpus_are_used()
    try:
        min_nodes, max_nodes = torchrun.parse_min_max_nnodes(options.nnodes)
        if not (options.nproc_per_node or gpus) and max_nodes > 1:
            fix = "fix that, or give --nproc-per-node for ranks on the CPU"
            raise Failure(f"torch sees no GPU on this machine; {fix}")
        options.nproc_per_node = options.nproc_per_node or str(gpus or 2)
        ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--nnodes={options.nnodes} --nproc-per-node={options.nproc_per_node}: "
            f"{first_line(error)}; see torchrun --help"
        ) from None
    if max_nodes == 1:
        refuse_copies()
    if options.max_restarts is None:  # each node that leaves uses one up, too
        options.max_restarts = 100 if min_nodes < max_nodes else 3
    if config is not None:
        check_settings(config, range(min_nodes, max_nodes + 1), ranks)
    set_environment(options, ranks)
    options.module = True
    options.training_script = module
    options.training_script_args = words
    return start(options, ranks, min_nodes, max_nodes)


def parse(argv: Sequence[str]) -> tuple[Namespace, str, list[str]]:
    """Returns (torchrun's options, module, its arguments). Options and settings may be mixed.

    Options need their full names, since a setting may start like one. Raises ConfigError.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for action in torchrun.get_args_parser()._actions:
        if action.option_strings and action.dest not in ("help", "module"):
            parser._add_action(action)
    # `main` decides on the first two; `run_agent`, not torchrun, handles the signals that stop a
    # run. An option that the environment sets, as PET_NAME, keeps its value.
    defaults = {"nproc_per_node": "", "max_restarts": None, "signals_to_handle": "SIGUSR2"}
    for name, value in defaults.items():
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: value})
    end = next((at for at, word in enumerate(argv) if word in ("-m", "--module")), len(argv))
    try:
        options, words = parser.parse_known_args(argv[:end])
    except ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}; see torchrun --help") from None
    module, *arguments = argv[end + 1 :] or [TRAIN]
    return options, module, [*words, *arguments]


def check_settings(config: Config, nodes: range, ranks: int) -> None:
    """Raises ConfigError unless the run can have each number of nodes, with `ranks` on each."""
    for count in nodes:
        accumulation_steps(config.train, count * ranks)
    if len(nodes) == 1:
        return
    sizes = f"--nnodes={nodes[0]}:{nodes[-1]}"
    if config.run.dir == "auto" or config.run.resume == "never":
        raise ConfigError(
            f"{sizes} restarts the run as nodes join and leave: set the same run.dir on each node, "
            "and leave run.resume=auto"
        )
    if config.train.global_batch_size == "auto" and not config.run.allow_config_change:
        size = config.train.micro_batch_size * ranks * math.lcm(*nodes)
        raise ConfigError(
            f"{sizes} needs a train.global_batch_size that every number of nodes can share, such "
            f"as {size}, not auto"
        )


def set_environment(options: Namespace, ranks: int) -> None:
    """Set the variables that the ranks inherit, except those that the user has set."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // ranks)),
        # Otherwise restarted ranks read the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",  # torch 2.11: always 30
    }
    if not any(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF") for kind in ("", "CUDA_", "HIP_")):
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # GPU memory fragments less
    os.environ.update({name: text for name, text in defaults.items() if not os.environ.get(name)})
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ["DIST_AMP_NNODES"] = options.nnodes  # ranks check that enough machines joined


def start(options: Namespace, ranks: int, min_nodes: int, max_nodes: int) -> int:
    """Run the ranks until they end; return their status. Raises torchrun's errors, as Failure."""
    at = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or 29500}"
    store = None
    if max_nodes > 1:
        verb = "joins" if min_nodes < max_nodes else "waits for"
        print(f"{options.nnodes} machines: this one {verb} the others at {at}", flush=True)
        # After a network failure the store may answer late, since TCP retries lost packets at
        # growing intervals. torchrun's default of 60 s has ended launchers whose network was back.
        options.rdzv_conf = f"read_timeout=150,{options.rdzv_conf}".rstrip(",")
    elif not options.rdzv_endpoint and options.master_port in (None, 29500):  # torch 2.11's default
        store = host_store(options)
    with tempfile.TemporaryDirectory(prefix="dist_amp_launch_") as folder:
        options.log_dir = options.log_dir or folder
        try:
            status, line = run_agent(options, ranks, elastic=min_nodes < max_nodes)
        except (AssertionError, ValueError) as error:  # such as an unknown --rdzv-backend
            raise ConfigError(f"torchrun rejects its options: {first_line(error)}") from error
        except RendezvousTimeoutError as error:
            late = f"too few of --nnodes={options.nnodes} machines joined the rendezvous at {at}"
            raise Failure(f"{late} in time") from error
        except Exception as error:
            reason = in_one_line(error.__cause__ or error)
            raise Failure(f"torchrun failed with its rendezvous at {at}: {reason}") from error
    del store  # the ranks needed it until here
    if line:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return status


def host_store(options: Namespace) -> dist.Store:  # type: ignore[name-defined]
    """The rendezvous store of a one-machine run, on the loopback interface.

    torchrun unpickles what it reads there, so other machines must not reach the store. An address
    also avoids the host's name: where that does not resolve, torchrun hangs.
    """
    port, listener = loopback_listener("127.0.0.1", 0)
    options.standalone = False
    options.rdzv_backend = "c10d"
    options.rdzv_endpoint = f"127.0.0.1:{port}"
    options.rdzv_conf = f"{options.rdzv_conf},is_host=0".lstrip(",")
    options.rdzv_id = str(uuid.uuid4())
    options.local_addr = options.local_addr or "127.0.0.1"
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener
    )


if __name__ == "__main__":
    sys.exit(main())
