"""`dist_amp verify`: check that all ranks, strategies and precisions take the steps of one process.

findings checks whether the task itself can be compared. Then cells takes the steps as the main job
does, reference takes them in plain torch, and compare compares the two.
Docs: docs/verification.md
"""
