"""Rejects several processes started by srun or mpirun without torch's RANK and WORLD_SIZE."""

import os

from dist_amp.errors import ConfigError

# Variables in which launchers put their number of processes. SLURM_NTASKS is not one of them: a
# batch script has it too, for the processes that it will start with srun.
TASK_COUNTS = (
    *("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    *("FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE"),
)


def refuse_copies() -> None:
    """Raises ConfigError if a launcher has started several processes without WORLD_SIZE."""
    for name in TASK_COUNTS:
        count = os.environ.get(name, "")
        if "WORLD_SIZE" not in os.environ and count.isdigit() and int(count) > 1:
            raise ConfigError(
                f"{name}={count}, but RANK and WORLD_SIZE are not set: {count} processes would "
                "train a copy each; start one process per machine (srun --ntasks-per-node=1 "
                f"--cpu-bind=none): torchrun --standalone --nproc_per_node={count} -m "
                "dist_amp.train ..., or launch/slurm.sbatch or many_nodes.sh for several machines; "
                f"for {count} separate runs set RANK=0 and WORLD_SIZE=1"
            )
