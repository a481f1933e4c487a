"""Datasets by settings in [data]: files, hub datasets, tokens, packing, mixtures, images.

Docs: docs/data.md
"""
