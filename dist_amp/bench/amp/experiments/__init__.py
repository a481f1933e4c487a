"""The experiments of the AMP report: a small file each, whose docstring describes it and whose settings run it.

All but `dtypes` are settings of the main job and figures to compare with, in `EXPERIMENT`: see experiment.py.
"""
