"""python -m dist_amp.bench NAME: in a clone, the same as python -m benchmarks NAME."""

import runpy

if __name__ == "__main__":
    runpy.run_module("benchmarks", run_name="__main__")
