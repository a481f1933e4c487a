"""For larger models: blocks, activation checkpointing, compilation, initial and frozen weights."""
