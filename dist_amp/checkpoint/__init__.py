"""Checkpoints: what is saved, how it is written, hashed, read, and whether it fits a run."""
