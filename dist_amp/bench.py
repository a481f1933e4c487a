"""python -m dist_amp.bench NAME: in a clone, the same as python -m benchmarks NAME."""

import runpy
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("benchmarks") is None:
        fix = "start them in the folder of a clone"
        print(f"error: the benchmarks are not installed; {fix}", file=sys.stderr)
        sys.exit(64)
    runpy.run_module("benchmarks", run_name="__main__")
