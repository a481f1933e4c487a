"""Train with Ray Train: python launch/ray_train.py [--workers N] [--restarts N] [--section.key
VALUE ...]

Each worker is a rank that runs dist_amp.train, on this machine or on a cluster made by `ray start`.
All machines need this checkout and the working directory at the same path, and run.dir on a shared
disk. Options: --workers (default 2; one GPU each, if there are any), --restarts (how often Ray may
restart the run from its newest checkpoint after a failure; default 0). A worker's other resources,
such as CPU cores, are set in ScalingConfig below.

Docs: docs/launching.md
"""

import argparse
import os
import sys

from dist_amp.config.load import load_config
from dist_amp.errors import Failure
from dist_amp.run import run_folder
from dist_amp.train import main
from dist_amp.world import World

try:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer
except ImportError as error:
    sys.exit(f"error: {error}; pip install -c launch/constraints.txt -e '.[ray]' brings Ray Train")


def rank(job: dict) -> None:  # runs in each worker, inside Ray's process group
    os.chdir(job["directory"])  # Ray changes the directory, and settings may have relative paths
    if status := main(job["words"]):
        raise RuntimeError(
            f"dist_amp.train ended with status {status}; see the error above or in the run's folder"
        )


parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--restarts", type=int, default=0)
options, words = parser.parse_known_args()
sys.path.insert(0, os.getcwd())  # as python -m does, so that my_file:MyTask is found
try:
    config = load_config(words)  # reports a mistake before Ray starts anything
    settings = {name: value for name, value in os.environ.items() if name.startswith("DIST_AMP_")}
    allocator = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
    if not allocator & os.environ.keys():
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # GPU memory fragments less
    settings["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # else workers print each line twice
    ray.init(runtime_env={"env_vars": settings})
    kind = "GPU" if config.run.device != "cpu" and "GPU" in ray.cluster_resources() else "CPU"
    available = int(ray.cluster_resources()[kind])
    if not available >= options.workers > 0:  # Ray would wait forever
        sys.exit(
            f"error: --workers={options.workers} must be between 1 and {available}, the {kind}s of "
            "Ray's cluster"
        )
    folder = str(run_folder(config.run, World()).absolute())  # the same after each restart
    job = {"words": [*words, "--run.dir", folder], "directory": os.getcwd()}
    backend = TorchConfig(
        "cpu:gloo,cuda:nccl" if kind == "GPU" else "gloo", timeout_s=int(config.run.timeout_seconds)
    )
    scaling = ScalingConfig(num_workers=options.workers, use_gpu=kind == "GPU")
    output = RunConfig(
        storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=options.restarts)
    )
    TorchTrainer(
        rank, train_loop_config=job, torch_config=backend, scaling_config=scaling, run_config=output
    ).fit()
except (Failure, TrainingFailedError) as error:
    sys.exit(f"error: {error}")
