"""Core and features: a feature is a file that may be missing.

Core is imported once, in a fork that sees no feature; each feature is imported in a fork of that.
"""

import ast
import importlib
import multiprocessing
import sys
import traceback
from importlib.abc import MetaPathFinder

import torch._dynamo  # noqa: F401
import transformers.modeling_utils  # noqa: F401
from conftest import ROOT

import dist_amp.train
import dist_amp.verify.__main__  # noqa: F401
from dist_amp.commands.parts import Package, imported

PACKAGE = Package(ROOT / "dist_amp")
# Benchmarks, and what makes projects.
CLONE_ONLY = {"bench", "commands.new", "commands.parts", "commands.project"}


class Missing(MetaPathFinder):
    """Hides all files of the package but some."""

    def __init__(self, kept):
        self.keep(kept)

    def keep(self, modules):
        self._kept = {f"dist_amp.{name}".removesuffix(".__init__") for name in modules}
        self._kept.add("dist_amp")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dist_amp" and name not in self._kept:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
        return


def in_a_fork(function, *args):
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join(120)
    return process.exitcode


def import_all(modules, missing, kept, failed):
    """Import these files in a tree of the kept ones; write the traceback if that fails."""
    missing.keep(kept)
    try:
        for name in modules:
            importlib.import_module(f"dist_amp.{name}".removesuffix(".__init__"))
    except BaseException:
        failed.write_text(traceback.format_exc())


def import_core_and_each_feature(folder):
    for name in [name for name in sys.modules if name.split(".")[0] == "dist_amp"]:
        del sys.modules[name]
    missing = Missing([])
    sys.meta_path.insert(0, missing)
    core = PACKAGE.files_with([])
    import_all(sorted(PACKAGE.core), missing, core, folder / "core")
    in_a_fork(import_all, ["optimizers.ema"], missing, core, folder / "ema without its file")
    for name, feature in PACKAGE.features.items():
        own = sorted(PACKAGE.reached(feature.files) - PACKAGE.core)
        kept = PACKAGE.files_with(PACKAGE.chosen([name]))
        status = in_a_fork(import_all, own, missing, kept, folder / name)
        if status != 0:
            (folder / name).write_text(f"exit status {status}")


def test_core_is_imported_alone_and_each_feature_with_what_it_needs_alone(tmp_path):
    assert in_a_fork(import_core_and_each_feature, tmp_path) == 0
    failures = {path.name: path.read_text() for path in tmp_path.iterdir()}
    noticed = failures.pop("ema without its file")
    assert "ModuleNotFoundError: hidden: dist_amp.optimizers.ema" in noticed
    assert failures == {}


def test_no_core_file_imports_a_feature_at_its_top_level():
    found = {}
    for module in PACKAGE.core:
        tree = ast.parse(PACKAGE.files[module].read_text())
        outside = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = set(imported(ast.Module(outside, [])))
        names |= {name.rpartition(".")[0] for name in names}
        found[module] = names & PACKAGE.feature_of.keys()
    assert {module: names for module, names in found.items() if names} == {}


def test_every_file_belongs_to_core_or_to_a_feature():
    assert set(PACKAGE.files) - PACKAGE.files_with(PACKAGE.features) == CLONE_ONLY


def test_each_feature_says_what_it_is_and_which_page_describes_it():
    features = PACKAGE.features.values()
    assert [each.name for each in features if not each.about] == []
    assert [each.name for each in features if not (ROOT / each.docs).is_file()] == []
