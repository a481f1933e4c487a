"""dist_amp: a distributed mixed-precision training template. Start reading at step.py, then train.py."""

__version__ = "0.1.0"
