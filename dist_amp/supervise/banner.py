"""What a run prints at its start and end: banner, TensorBoard's address, closing table."""

import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

import torch
import torch.distributed as dist

import dist_amp
from dist_amp.config.load import hidden
from dist_amp.config.task_class import GIVEN
from dist_amp.distributed.gpu_checks import driver_branch
from dist_amp.errors import ConfigError, masked
from dist_amp.files import run_dir, write_durably
from dist_amp.run import Run

# What results may depend on.
PACKAGES = ("numpy", "datasets", "tensorboard", "transformers", "peft", "torchao")

# In a diff: texts with names like DB_PASS and MY_KEY, and tokens of known forms under any name.
SECRETS_IN_CODE = re.compile(
    r"((?i:\w*(?:pass|key|token|secret|cred|auth)\w*['\"]?\s*[:=]\s*['\"])|"
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abp]-|AKIA|ASIA))[^'\"\s]+"
)
DIFF_LETTERS = 100_000  # kept of a diff; more is data rather than code
GIT_SECONDS = 5.0  # assumed: a status takes far less, but a network disk may hang

# Whole names: of others it is unknown whether they hold a secret.
VARIABLES = """
    CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_HOME
    CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE
    NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES HSA_OVERRIDE_GFX_VERSION ROCR_VISIBLE_DEVICES
    NCCL_ALGO NCCL_BUFFSIZE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS
    NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT
    NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS
    NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL
    NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_TOPO_FILE
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF TORCHINDUCTOR_CACHE_DIR
    TORCHINDUCTOR_MAX_AUTOTUNE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT
    TORCH_COMPILE_DISABLE TORCH_CPP_LOG_LEVEL TORCH_DISABLE_SHARE_RDZV_TCP_STORE
    TORCH_DISTRIBUTED_DEBUG TORCH_ELASTIC_SHUTDOWN_TIMEOUT TORCH_FR_BUFFER_SIZE TORCH_HOME
    TORCH_LOGS TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS
    TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
    TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_USE_CUDA_DSA TRITON_CACHE_DIR
    TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID
    TORCHELASTIC_USE_AGENT_STORE PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NODE_RANK
    PET_NPROC_PER_NODE PET_RDZV_BACKEND PET_RDZV_ENDPOINT
    GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK ROLE_NAME
    ROLE_RANK ROLE_WORLD_SIZE WORLD_SIZE DIST_AMP_LAUNCHER DIST_AMP_PYTHON
    GLOO_SOCKET_IFNAME KMP_AFFINITY KMP_BLOCKTIME LD_PRELOAD MALLOC_ARENA_MAX MALLOC_CONF
    MKL_NUM_THREADS OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND PYTHONHASHSEED
    HF_DATASETS_CACHE HF_DATASETS_DISABLE_PROGRESS_BARS HF_DATASETS_OFFLINE HF_ENDPOINT HF_HOME
    HF_HUB_CACHE HF_HUB_OFFLINE
    SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES
    SLURM_JOB_PARTITION SLURM_LOCALID SLURM_NNODES SLURM_NODEID SLURM_NTASKS SLURM_PROCID
    SLURM_RESTART_COUNT
""".split()

PORT = 6006  # TensorBoard's own default

# A colour per rank of a single run; with --logdir runs one per run, since TensorBoard's seven can't
# tell 2 x 8 apart.
COLOURS = r"regex:^(.+)/tensorboard/|(rank\d+)$"


def print_banner(run: Run) -> None:
    world = run.world
    plan = run.data.plan
    total = sum(p.numel() for p in run.parallel.module.parameters())
    trained = sum(p.numel() for p in run.parallel.parameters)
    first = "from step 0: it holds no checkpoint"
    if run.resumed_from is not None:
        first = resumed_text(run, run.resumed_from)
    world.say(f"run    {run_dir(run.folder)}, {first}")
    model = f"{total:,} parameters"
    if trained < total:
        model += f" ({trained:,} trained)"
    device = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    model += f", {run.parallel.strategy} on {world.world_size} x {device}, {run.precision.name}"
    if run.precision.cast_by != "nothing":
        model += f" cast by {run.precision.cast_by}"
    world.say(f"model  {model}")
    accumulation = plan.global_batch_size // (plan.micro_batch_size * plan.world_size)
    batch = f"{plan.micro_batch_size} x {plan.world_size} ranks x {accumulation} micro-batches"
    world.say(f"batch  {plan.global_batch_size} samples = {batch}")
    held_out = "none evaluated (eval.every=off)"
    if run.config.eval.every != "off":
        held_out = f"{run.validation.plan.length if run.validation else 0:,} held out"
    world.say(f"data   {plan.length:,} samples to train on, {held_out}")
    world.say(f"watch  dist_amp board {run.folder}")


def resumed_text(run: Run, source: Path) -> str:
    text = f"resumed from step {run.step}"
    if not source.resolve().is_relative_to(run.folder.resolve()):
        return f"{text} ({source})"
    asked = run.config.run.resume
    if asked not in ("auto", "never", str(source)):
        text += f"; it has continued since it began from run.resume={asked}"
    return text


def closing_table(summary: Mapping[str, Any], folder: Path) -> str:
    shows_tokens = any(rank["tokens_per_second"] for rank in summary["ranks"])
    header = f"{'rank':>4}  {'host':<20} {'peak memory':>12} {'local s/step':>13} {'items/s':>10}"
    if shows_tokens:
        header += f" {'tokens/s':>12}"
    if "mfu" in summary:
        header += f"{'mfu':>11}"
    rows = [header]
    for rank in summary["ranks"]:
        row = f"{rank['rank']:>4}  {rank['host']:<20} "
        row += f"{rank['peak_memory_bytes'] / 2**20:>8,.0f} MiB {rank['local_seconds']:>13.3g}"
        row += f" {rank['items_per_second']:>10,.1f}"
        if shows_tokens:
            row += f" {rank['tokens_per_second']:>12,.0f}"
        if "mfu" in summary:
            row += f" {100 * rank['mfu']:>8.3g} %"
        rows.append(row)
    result = f"{summary['steps']} steps"
    # Missing if a resumed run only had to evaluate, and its metrics.jsonl is lost.
    if "final_loss" in summary:
        result += f" ({summary['applied_steps']} applied, {summary['skipped_steps']} skipped)"
    if math.isfinite(loss := float(summary.get("final_loss", math.nan))):
        result += f", loss {loss:.4f}"
    for name, value in summary["evaluation"].items():
        result += f", held-out {name} {value:.4f}"
    if "start_seconds" in summary:
        seconds = summary["start_seconds"]
        longest = sorted(seconds, key=lambda phase: -seconds[phase])
        parts = ", ".join(f"{phase} {seconds[phase]:.1f}" for phase in longest[:4])
        parts = parts.replace("_", " ")
        rows.append(f"start {sum(seconds.values()):.1f} s to the first step: {parts}, ...")
    # Of a shorter run it only says how long a start takes.
    if "goodput" in summary and summary["wall_seconds"] > 60:
        applied = timedelta(seconds=round(summary["spent_seconds"]["applied_steps"]))
        wall = timedelta(seconds=round(summary["wall_seconds"]))
        share = f"{100 * summary['goodput']:.0f} %"
        rest = {k: v for k, v in summary["spent_seconds"].items() if k != "applied_steps"}
        most = "mostly " + max(rest, key=lambda kind: rest[kind]).replace("_", " ")
        most = most.replace("elsewhere", "starting, ending and pauses")
        rows.append(f"goodput {share}: {applied} of {wall} in applied steps; the rest: {most}")
    return "\n".join([*rows, f"done: {result}", f"all of it is in {run_dir(folder)}"])


def print_next_command(run: Run) -> None:
    """What exports the trained model, if the config names its task."""
    is_named = not run.config.task.target.startswith(GIVEN)
    if is_named and importlib.util.find_spec("dist_amp.export"):
        model = run.parallel.module
        for_transformers = hasattr(run.task, "export") or hasattr(model, "save_pretrained")
        form = " --format hf" if for_transformers else ""
        run.world.say(f"next: dist_amp export {run_dir(run.folder)} --out model{form}")


def report_environment(run: Run) -> None:
    """Write RUN/environment.json and TensorBoard's text on rank 0; every rank calls it."""
    hosts = run.world.gather_texts(json.dumps(this_rank(run.world.device)))
    if not run.world.is_main:
        return
    text = json.dumps(environment(run, hosts), indent=2)
    path = run.folder / "environment.json"
    try:
        write_durably(path, text + "\n")
    except OSError as error:
        run.world.warn(
            f"{path} can't be written ({error.strerror}); TensorBoard's text `start/environment` "
            "has the same"
        )
    run.metrics.write_text("start/environment", text, run.step)


def environment(run: Run, ranks: list[str]) -> dict[str, Any]:
    """What rank 0 sees, and what each host's ranks see: JSON of `this_rank`."""
    hosts: dict[str, list[str]] = {}
    for rank, host in enumerate(ranks):
        hosts.setdefault(host, []).append(str(rank))
    source = source_of(run.task)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "first_step": run.step + 1,
        "command": command_line(sys.orig_argv),
        "versions": versions(),
        "hosts": [json.loads(host) | {"ranks": ", ".join(on)} for host, on in hosts.items()],
        "git": git_state(code_folder(source)),
        "task": source,
        "variables": variables(os.environ),
    }


def this_rank(device: torch.device) -> dict[str, str]:
    """What may differ between ranks; those of a host have the same."""
    name = f"CPU, {os.cpu_count()} cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "host": platform.node(),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of dist_amp, Python, torch, its CUDA and some packages; collect_env takes seconds."""
    python = platform.python_version()
    rows = {"dist_amp": dist_amp.__version__, "python": python, "torch": torch.__version__}
    if torch.version.cuda or torch.version.hip:
        rows["cuda"] = str(torch.version.cuda)
        rows["hip"] = str(torch.version.hip)
        rows["driver"] = str(driver_branch())
        if dist.is_nccl_available() and torch.cuda.is_available():
            rows["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            rows["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            rows[package] = importlib.metadata.version(package)
    return rows


def command_line(words: Sequence[str]) -> str:
    """As for a shell, without the values of secret settings."""
    shown = []
    key = ""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            key = name.replace("-", "_").strip("_").rpartition(".")[2]
            shown.append(name + equals + hidden(value, key))
        else:
            shown.append(hidden(word, key))
    return shlex.join(shown)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of torch, NCCL, Slurm or a run that are listed above, without passwords."""
    return {name: masked(environ[name]) for name in sorted(VARIABLES) if name in environ}


def source_of(task: object) -> dict[str, str]:
    """The file of the task's class, and its hash; empty for one that a notebook defines."""
    with suppress(TypeError, OSError):
        path = Path(inspect.getfile(type(task))).resolve()
        return {"file": str(path), "hash": importlib.util.source_hash(path.read_bytes()).hex()}
    return {}


def edited_since(folder: Path, task: object) -> str:
    """That the task's source file is not what it was when a run was started, in words; or ""."""
    now = source_of(task)
    with suppress(Exception):  # there is none, or it is damaged
        before = json.loads((folder / "environment.json").read_bytes())["task"]
        if now["hash"] != before["hash"]:
            return f"{now['file']} was edited since {folder} was started"
    return ""


def code_folder(source: Mapping[str, str]) -> Path:
    """The folder of the task's source; the current one for a notebook's or an installed task."""
    ours = Path(dist_amp.__file__).resolve().parent
    folder = Path(source.get("file", ours / "task")).parent
    return Path.cwd() if folder.is_relative_to(ours) or "site-packages" in folder.parts else folder


def git_state(folder: Path) -> dict[str, Any]:
    """{commit, branch, changed files, new Python files, diff}; empty without git or a commit."""
    quiet = {"stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, "errors": "replace"}
    git = partial(subprocess.check_output, cwd=folder, timeout=GIT_SECONDS, **quiet)
    # Without locks, so that a commit at this moment succeeds.
    status = ["git", "--no-optional-locks", "status", "--porcelain", "--branch"]
    try:
        commit = git(["git", "rev-parse", "HEAD"]).strip()
        branch, *lines = git(status).splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    diff = ""
    with suppress(OSError, subprocess.SubprocessError):  # a large one takes long
        text = git([*status[:2], "diff", "--no-color", "--no-ext-diff", "HEAD"])
        diff = SECRETS_IN_CODE.sub(r"\1***", masked(text))
    files = [line[3:] for line in lines if line[:2] != "??" or line.endswith(".py")]
    return {
        "folder": str(folder),
        "commit": commit,
        "branch": branch[3:].partition("...")[0],
        "dirty": bool(files),
        "changed_files": files[:50],
        "diff": diff[:DIFF_LETTERS],
        "diff_is_cut": len(diff) > DIFF_LETTERS,
    }


def main_tags(has_tokens: bool) -> list[str]:
    what = "tokens" if has_tokens else "items"
    return [
        "train/loss",
        "eval/loss",
        f"throughput/{what}_per_second",
        "memory/peak_GiB",
        "time/local_seconds",
        "amp/skipped_in_interval",
    ]


def pinned_url(has_tokens: bool, port: int | str = PORT) -> str:
    """TensorBoard's address with the main charts pinned above all others."""
    cards = [{"plugin": "scalars", "tag": tag} for tag in main_tags(has_tokens)]
    query = {
        "pinnedCards": json.dumps(cards, separators=(",", ":")),
        "runColorGroup": COLOURS,
        "smoothing": "0",  # the default of 0.6 hides the steps of the scale and single skips
    }
    return f"http://localhost:{port}/?{urlencode(query, safe=':,/', quote_via=quote)}#timeseries"


def board(words: Sequence[str]) -> NoReturn:
    """Become TensorBoard of a run or a folder of runs, after printing the address of its main
    charts. words: the folder, then TensorBoard's options. Errors: ConfigError.
    """
    if words[:1] in (["-h"], ["--help"]):
        print("usage: dist_amp board RUN|FOLDER [OPTIONS]; tensorboard --help lists the options")
        sys.exit()
    from dist_amp.storage.reading import on_disk

    folder = on_disk("".join(words[:1]))
    logs = folder / "tensorboard"
    logged = [*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]
    has_tokens = any("throughput/tokens_per_second" in path.read_text() for path in logged)
    if not logs.is_dir():
        logs = folder
        if not words or not any(folder.glob("*/tensorboard")):
            raise ConfigError(
                f"dist_amp board {' '.join(words)}: there is no run; give the folder of a run, or "
                "of several"
            )
    options = list(words[1:])
    if "--port" not in options:
        options += ["--port", str(PORT)]
    print(pinned_url(has_tokens, options[options.index("--port") + 1]), flush=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), *options]
    os.execv(sys.executable, command)
