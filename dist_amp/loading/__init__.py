"""From a dataset to micro-batches: the order of samples, each rank's share, and the loader."""
