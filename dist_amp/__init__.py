"""dist_amp: a distributed mixed-precision training template. Start reading at step.py, then
train.py.
"""

from pathlib import Path

__version__ = "1.0.0"

# So that `python -m dist_amp.export` runs commands/export.py, and `python -m dist_amp` lists all.
__path__.append(str(Path(__file__).parent / "commands"))
