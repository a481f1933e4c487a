"""Datasets by config: files, hub datasets, tokens, packing, mixtures, images."""
