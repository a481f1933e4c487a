"""The process that `on_fake_gpus` starts."""

import sys
from pathlib import Path

from fake_gpu import main

main(Path(sys.argv[1]))
