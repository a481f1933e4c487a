"""Run code on GPUs that are not there: fake_gpu.c says what that shows, and what it can't.

    result = on_fake_gpus(8, my_function, argument)    # my_function(argument), in a fresh process

The function must be importable. Build it first: DIST_AMP_FAKE_GPU=1 bash tests/engines.sh
"""

import os
import pickle
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
ROOT = TESTS.parent
LIBRARY = FOLDER / "build/libcuda.so.1"
PYTHON = ROOT / ".venv-cuda/bin/python"

needs_fake_gpus = pytest.mark.skipif(
    not (LIBRARY.exists() and PYTHON.exists()),
    reason="the stand-in for GPUs is not built: DIST_AMP_FAKE_GPU=1 bash tests/engines.sh",
)


def environ(gpus: int, values: bool = False, **more: str) -> dict[str, str]:
    """The variables of a process that sees so many GPUs. values: copied values can be read back."""
    variables = {
        "LD_PRELOAD": str(LIBRARY),
        "FAKE_GPU_COUNT": str(gpus),
        "PYTHONPATH": f"{ROOT}:{TESTS}",
        "OMP_NUM_THREADS": "1",
        "TRITON_LIBCUDA_PATH": str(LIBRARY.parent),
        # It is chosen for attention where it is allowed, and there is none.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        # Models come from folders; the hub is not asked for more.
        "HF_HUB_OFFLINE": "1",
    }
    if values:
        variables["FAKE_GPU_VALUES"] = "1"
    return {**os.environ, **variables, **more}


def on_fake_gpus(
    gpus: int,
    function: Callable[..., Any],
    *args: Any,
    values: bool = False,
    timeout: float = 300,
    **more: str,
) -> Any:
    """What function(*args) returns there; AssertionError with its output if it raises."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        (Path(folder) / "call").write_bytes(pickle.dumps((function, args)))
        done = subprocess.run(
            [PYTHON, "-m", "fake_gpu", folder],
            cwd=folder,
            env=environ(gpus, values, **more),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode or not answer.exists():
            said = f"{done.stdout}\n{done.stderr}"
            raise AssertionError(f"{function.__name__}: exit status {done.returncode}\n{said}")
        return pickle.loads(answer.read_bytes())


def main(folder: Path) -> None:
    """In the fresh process: the pickled call, and what it returned."""
    import torch

    torch.set_num_threads(1)
    # There is no cuDNN: convolutions and batch norms take torch's own kernels.
    torch.backends.cudnn.enabled = False
    function, args = pickle.loads((folder / "call").read_bytes())
    (folder / "answer").write_bytes(pickle.dumps(function(*args)))
