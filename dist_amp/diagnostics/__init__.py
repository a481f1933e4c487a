"""Observers that watch a run and report what is wrong with it; each file can be deleted."""
