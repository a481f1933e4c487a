"""The path from a dataset to micro-batches: the order of samples, its shards, and the loader."""
