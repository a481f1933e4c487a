"""The commands other than train; imported by nothing else."""
