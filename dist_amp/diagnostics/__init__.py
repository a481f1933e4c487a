"""Observers that watch a run and report problems; most files are optional and can be deleted."""
