"""Optimizers beyond AdamW: SGD, Muon, a task's groups and optimizer, and the average of weights."""
