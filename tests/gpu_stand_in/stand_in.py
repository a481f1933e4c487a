"""Steps of a config on GPUs that are not there: fake_gpu.c in place of CUDA, under a real torch.

The allocator's peaks are exact for kernels of an H100 without cuDNN: convolutions and batch norms
take torch's own. Ranks other than the first are imagined.
"""

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dist_amp.clock import PhaseClock
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError
from dist_amp.run import build_run
from dist_amp.scaling import hooks
from dist_amp.settings import RunConfig
from dist_amp.step import train_step
from dist_amp.world import World, locate

SOURCE = Path(__file__).with_name("fake_gpu.c")
IN_CLONE = Path(__file__).parents[2] / ".venv-cuda/bin/python"
HOW_TO = "in a clone, DIST_AMP_FAKE_GPU=1 bash tests/engines.sh installs all of it"
WHERE = "from importlib.util import find_spec as find; print(find('torch').origin)"
ANSWER = "import sys; from gpu_stand_in.stand_in import answer; answer(sys.argv[1])"
STEPS = 6


@dataclass(frozen=True)
class StandIn:
    """What it takes."""

    python: str  # an interpreter whose torch is a CUDA build
    headers: Path  # of CUDA
    compiler: str

    def build(self, folder: Path) -> Path:
        """Compile the library into a folder. Errors: ConfigError with what the compiler says."""
        library = folder / "libcuda.so.1"
        # Whoever opens the driver by its name gets what is preloaded already.
        options = "-std=gnu17 -shared -fPIC -O1 -w -Wl,-soname,libcuda.so.1 -lpthread -o".split()
        done = subprocess.run(
            [self.compiler, *options, library, SOURCE, f"-I{self.headers}"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ConfigError(
                f"{self.compiler} can't compile {SOURCE} with the headers in {self.headers}: "
                f"{done.stderr.strip()[:500]}; {HOW_TO}"
            )
        driver = folder / "libcuda.so"  # Triton links its launchers with it
        driver.unlink(missing_ok=True)
        driver.symlink_to(library.name)
        return library

    def call(
        self,
        environment: dict[str, str],
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 300,
    ) -> Any:
        """What function(*args) returns in a process of this environment; both importable.

        Errors: subprocess's, with the output, if it fails or takes more than `timeout` seconds.
        """
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result"
            (Path(folder) / "call").write_bytes(pickle.dumps((function, args)))
            subprocess.run(
                [self.python, "-c", ANSWER, folder],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
            return pickle.loads(result.read_bytes())


def answer(folder: str) -> None:
    """In the process that `StandIn.call` starts: the pickled call, and what it returned."""
    torch.set_num_threads(1)
    torch.backends.cudnn.enabled = False
    function, args = pickle.loads((Path(folder) / "call").read_bytes())
    (Path(folder) / "result").write_bytes(pickle.dumps(function(*args)))


def find_stand_in() -> StandIn:
    """What it takes: this interpreter if its torch is a CUDA build, or the clone's .venv-cuda.

    Errors: ConfigError that names what is missing.
    """
    if sys.platform != "linux":
        raise ConfigError("the stand-in needs Linux, on which its library replaces CUDA's")
    compilers = [os.environ.get("CC", ""), "gcc", "clang"]
    compiler = next((name for name in compilers if shutil.which(name)), "")
    if not compiler:
        raise ConfigError(
            "the stand-in needs a C compiler: gcc, clang or the one that CC names (Debian: apt-get "
            "install gcc)"
        )
    python = sys.executable
    if torch.version.cuda is None and IN_CLONE.exists():
        python = str(IN_CLONE)
    done = subprocess.run([python, "-c", WHERE], capture_output=True, text=True)
    package = Path(done.stdout.strip()).parent
    version = package / "version.py"  # read, since importing torch takes seconds
    found = version.exists() and re.search(r"^cuda\b.*'(\d+)\.", version.read_text(), re.MULTILINE)
    if not found or found[1] != "13":
        has = f"CUDA {found[1]}" if found else "no CUDA build of torch"
        raise ConfigError(
            f"the stand-in needs torch for CUDA 13 (tested: 2.14.1), and {python} has {has}; "
            f"{HOW_TO}"
        )
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [package.parent / "nvidia/cu13/include", Path(toolkit, "include")]
    for headers in folders:
        if (headers / "cuda_runtime_api.h").exists() and (headers / "crt/host_config.h").exists():
            return StandIn(python, headers, compiler)
    raise ConfigError(
        f"the stand-in needs CUDA's headers, which are not in {folders[0]}: "
        f"{python} -m pip install nvidia-cuda-runtime nvidia-cuda-crt; {HOW_TO}"
    )


def environment(
    library: Path, gpus: int, values: bool = False, memory: int = 0, **more: str
) -> dict[str, str]:
    """The variables of a process that sees so many GPUs.

    values: copied values can be read back. memory: bytes of each GPU; 0: an H100's.
    """
    variables = {
        "LD_PRELOAD": str(library),
        "FAKE_GPU_COUNT": str(gpus),
        "OMP_NUM_THREADS": "1",
        "TRITON_LIBCUDA_PATH": str(library.parent),
        # It is chosen for attention where it is allowed, and there is none.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }
    if values:
        variables["FAKE_GPU_VALUES"] = "1"
    if memory:
        variables["FAKE_GPU_MEMORY"] = str(memory)
    return {**os.environ, **variables, **more}


# --- in the process on the stand-in


def imagined(ranks: int) -> World:
    """Rank 0 of so many, of which the others are only imagined, on machines of these GPUs."""
    if ranks == 1:
        return locate(RunConfig(device="cuda"))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", rank=0, world_size=ranks, store=store, device_id=device)
    per_machine = torch.cuda.device_count()
    return World(world_size=ranks, local_world_size=per_machine, device=device)


class Peaks(Counter[str]):
    """The allocator's, in bytes, by the phase of a step, from now on."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__()
        self._phase = "other"
        self._enter = clock.enter
        clock.enter = self.enter  # type: ignore[method-assign]
        torch.cuda.reset_peak_memory_stats()

    def enter(self, phase: str) -> str:
        self[self._phase] = max(self[self._phase], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        if phase != "communication":  # within another phase
            self._phase = phase
        return self._enter(phase)


def peaks_of(words: Sequence[str], ranks: int = 1) -> dict[str, int]:
    """The peaks of rank 0 with these settings, from its second step on. Errors: the task's."""
    # Drawn weights would take the host's memory, and never arrive.
    run = build_run(load_config(words), imagined(ranks), resumes=True)
    # It compares values, and there are none.
    with patch.object(hooks, "is_written", lambda whole, sharded: False):
        train_step(run, next(run.data))
        time.sleep(1)  # NCCL's watchdog holds DDP's first buckets until it wakes, every 100 ms
        peaks = Peaks(run.world.clock)
        for _ in range(STEPS):
            train_step(run, next(run.data))
    return dict(peaks)
