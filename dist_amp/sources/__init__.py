"""Datasets by config: files, hub datasets, tokens, packing, mixtures, images.

Docs: docs/data.md
"""
