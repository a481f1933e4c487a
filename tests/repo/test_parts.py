"""Core and features: a feature is a file that may be missing.

What features import of other packages is imported here once, and each test forks.
"""

import ast
import importlib
import multiprocessing
import sys
from importlib.abc import MetaPathFinder

import pytest
import torch._dynamo  # noqa: F401
import transformers.modeling_utils  # noqa: F401
from conftest import ROOT

import dist_amp.train
import dist_amp.verify.__main__  # noqa: F401
from dist_amp.commands.parts import Package, imported

PACKAGE = Package(ROOT / "dist_amp")
CLONE_ONLY = {
    "bench",
    "commands.new",
    "commands.parts",
    "commands.project",
}  # benchmarks; makes projects


class Missing(MetaPathFinder):
    """Hides all files of the package but some."""

    def __init__(self, kept):
        self._kept = {f"dist_amp.{name}".removesuffix(".__init__") for name in kept} | {"dist_amp"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dist_amp" and name not in self._kept:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
        return


def import_with(kept, modules):
    """In a process of its own: import these files in a tree of the kept ones; exit status."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dist_amp"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Missing(kept))
    for name in modules:
        importlib.import_module(f"dist_amp.{name}".removesuffix(".__init__"))


def failure_of(kept, modules):
    process = multiprocessing.get_context("fork").Process(target=import_with, args=(kept, modules))
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize("module", sorted(PACKAGE.core))
def test_no_core_file_imports_a_feature_at_its_top_level(module):
    tree = ast.parse(PACKAGE.files[module].read_text())
    outside = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = set(imported(ast.Module(outside, [])))
    names |= {name.rpartition(".")[0] for name in names}
    assert names.isdisjoint(PACKAGE.feature_of)


@pytest.mark.parametrize("feature", PACKAGE.features)
def test_a_feature_can_be_imported_with_core_and_what_it_needs_alone(feature):
    files = PACKAGE.files_with(PACKAGE.chosen([feature]))
    own = PACKAGE.reached(PACKAGE.features[feature].files) - PACKAGE.core
    assert failure_of(files, sorted(own)) == 0


def test_core_can_be_imported_alone():
    assert failure_of(PACKAGE.files_with([]), sorted(PACKAGE.core)) == 0


def test_a_missing_feature_is_noticed():
    assert failure_of(PACKAGE.files_with([]), ["optimizers.ema"]) == 1


def test_every_file_belongs_to_core_or_to_a_feature():
    assert set(PACKAGE.files) - PACKAGE.files_with(PACKAGE.features) == CLONE_ONLY


@pytest.mark.parametrize("feature", PACKAGE.features.values(), ids=lambda feature: feature.name)
def test_a_feature_says_what_it_is_and_which_page_describes_it(feature):
    assert feature.about
    assert (ROOT / feature.docs).is_file()
