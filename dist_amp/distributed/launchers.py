"""Launchers that start processes which torch does not join: srun and mpirun."""

import os

from dist_amp.errors import ConfigError

# Where launchers that torch does not know put the number of processes that they start.
TASK_COUNTS = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE"),
    *("JSM_NAMESPACE_SIZE", "HOROVOD_SIZE"),
)


def refuse_copies() -> None:
    """Errors: ConfigError if srun or mpirun has started several processes that can't join."""
    environ = os.environ
    slurm = "SLURM_STEP_NUM_TASKS"  # of an srun
    # A batch script, and a shell in an allocation, have SLURM_NTASKS for the sruns to come.
    step = environ.get("SLURM_STEP_ID", "batch" if environ.get("ENVIRONMENT") == "BATCH" else "0")
    is_task = step.isdigit() and len(step) < 10  # a batch script's may be 2**32 - 5
    if slurm not in environ and "SLURM_PROCID" in environ and is_task:
        slurm = "SLURM_NTASKS"
    for name in (slurm, *TASK_COUNTS):
        count = environ.get(name, "")
        if "WORLD_SIZE" in environ or not count.isdigit() or int(count) < 2:
            continue
        srun, script = "", "launch/many_nodes.sh on each"
        if name == slurm:
            srun, script = "srun --ntasks=1 --cpu-bind=none ", "sbatch launch/slurm.sbatch"
        raise ConfigError(
            f"{name}={count}, but RANK and WORLD_SIZE are not set: {count} processes would train "
            f"a copy each; on one machine use {srun}torchrun --standalone --nproc_per_node={count} "
            f"-m dist_amp.train ..., on several {script}; for {count} separate runs set RANK=0 "
            "and WORLD_SIZE=1"
        )
