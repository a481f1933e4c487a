"""`dist_amp verify`: check that all ranks, strategies and precisions take the steps of one process.

findings.py checks whether the task itself can be compared. Then cells.py takes the steps as the
main job does, reference.py takes them in plain torch, and compare.py compares the two.
Docs: docs/verification.md
"""
