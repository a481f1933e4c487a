"""The proof that every way of running computes the step of one process with the whole batch.

Docs: docs/verification.md
"""
