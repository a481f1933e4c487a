"""A task and a start of the main job in which anything hangs.

PLANT="module:name:rank:what ..." says what a rank does before it calls that function; the module
`hanging` stands for methods of the task. `python hanging.py` also plants before the start.
"""

import importlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from tiny import Tiny
from torch.utils.data import default_collate

from dist_amp.train import main


def hangs():
    threading.Event().wait()  # the line that is named is this one, not one of the library


def hangs_once_it_is_told_to_stop():
    os.kill(os.getpid(), signal.SIGTERM)
    hangs()


def keeps_the_interpreter():
    re.match(r"(a+)+$", "a" * 60 + "b")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def works():
    end = time.monotonic() + 12
    while time.monotonic() < end:
        pass


class Hanging(Tiny):
    build_dataset = Tiny.build_dataset

    def on_step(self, run, report):
        if run.step == run.config.train.steps:
            self.at_last_step()

    def at_last_step(self):
        pass

    def collate(self, samples):
        return default_collate(samples)

    def on_evaluation(self, run, values):
        pass

    def state_dict(self):
        return {"kept": 1}

    def load_state_dict(self, state):
        pass


def plant(owner, name, what):
    real = getattr(owner, name)

    def planted(*args, **options):
        Path("reached").touch()
        globals()[what]()
        return real(*args, **options)

    setattr(owner, name, planted)


for text in os.environ["PLANT"].split():
    module, name, rank, what = text.split(":")
    if os.environ["RANK"] == rank:
        owner = Hanging if module == "hanging" else importlib.import_module(module)
        *classes, name = name.split(".")
        plant(getattr(owner, *classes) if classes else owner, name, what)

if __name__ == "__main__":
    sys.exit(main())
