"""Observers that watch a run and report what is wrong with it; most files can be deleted."""
