"""Where a project lacks the default task, Tiny is in its place: a config is made without naming a
task, as for one that is an object.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from dist_amp.files import present
from dist_amp.settings import TaskConfig


def stand_in(task: type) -> None:
    name, _, cls = TaskConfig.target.partition(":")
    package = name.rpartition(".")[0]
    if not present(package.partition(".")[2]):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
        sys.modules[package].__spec__ = ModuleSpec(package, None, is_package=True)
    if not present(name.partition(".")[2]):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        setattr(sys.modules[name], cls, task)
