"""Runs whose files are kept on object storage: run.dir = "s3://bucket/run".

Docs: docs/checkpointing.md
"""
