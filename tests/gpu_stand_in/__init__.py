"""Run code on GPUs that are not there: fake_gpu.c, in place of CUDA under a real torch, says what
that shows, and what it can't.

    result = on_fake_gpus(8, my_function, argument)    # my_function(argument), in a fresh process

The function must be importable. DIST_AMP_FAKE_GPU=1 bash tests/engines.sh installs what it takes.
"""

import atexit
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
ROOT = TESTS.parent
# An interpreter whose torch is a CUDA build: this one, or the one that engines.sh installs.
PYTHON = sys.executable
TORCH = Path(torch.__file__).parent
installed = [*ROOT.glob(".venv-cuda/lib/python*/site-packages/torch")]
if torch.version.cuda is None and installed:
    PYTHON, TORCH = str(ROOT / ".venv-cuda/bin/python"), installed[0]
COMPILER = next(filter(shutil.which, [os.environ.get("CC", ""), "gcc", "clang"]), "")
HEADERS = [
    folder
    for folder in (TORCH.parent / "nvidia/cu13/include", Path("/usr/local/cuda/include"))
    if (folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_config.h").exists()
]
ANSWER = "import sys; from gpu_stand_in.stand_in import answer; answer(sys.argv[1])"

is_cuda_13 = re.search(r"^cuda\b.*'13\.", (TORCH / "version.py").read_text(), re.MULTILINE)
needs_fake_gpus = pytest.mark.skipif(
    sys.platform != "linux" or not (is_cuda_13 and COMPILER and HEADERS),
    reason="needs Linux, a C compiler, torch for CUDA 13 (tested: 2.14.1) and CUDA's headers: "
    "DIST_AMP_FAKE_GPU=1 bash tests/engines.sh installs them",
)


@cache
def library() -> Path:
    """The library, compiled once in this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    library = Path(folder.name) / "libcuda.so.1"
    # Whoever opens the driver by its name gets what is preloaded already.
    options = "-std=gnu17 -shared -fPIC -O1 -w -Wl,-soname,libcuda.so.1 -lpthread -o".split()
    source = FOLDER / "fake_gpu.c"
    subprocess.run([COMPILER, *options, library, source, f"-I{HEADERS[0]}"], check=True)
    (library.parent / "libcuda.so").symlink_to(library.name)  # Triton links its launchers with it
    return library


def environ(gpus: int, values: bool = False) -> dict[str, str]:
    """The variables of a process that sees so many GPUs. values: copied values can be read back."""
    return {
        **os.environ,
        "LD_PRELOAD": str(library()),
        "FAKE_GPU_COUNT": str(gpus),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{TESTS}",
        "HF_HUB_OFFLINE": "1",  # models come from folders
        "TRITON_LIBCUDA_PATH": str(library().parent),
        # It is chosen for attention where it is allowed, and there is none.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        **({"FAKE_GPU_VALUES": "1"} if values else {}),
    }


def on_fake_gpus(
    gpus: int, function: Callable[..., Any], *args: Any, values: bool = False, timeout: float = 300
) -> Any:
    """What function(*args) returns there; AssertionError with its output if it raises."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "call").write_bytes(pickle.dumps((function, args)))
        done = subprocess.run(
            [PYTHON, "-c", ANSWER, folder],
            env=environ(gpus, values),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{function.__name__}:\n{done.stdout}\n{done.stderr}"
        return pickle.loads((Path(folder) / "result").read_bytes())
