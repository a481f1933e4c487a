"""Support for larger models: blocks, activation checkpointing, compilation, frozen weights."""
