"""Core and features: a feature is a file that may be missing, and projects get whole files.

Core is imported once, in a fork that sees no feature; each feature is imported in a fork of that.
"""

import ast
import importlib
import multiprocessing
import sys
import tomllib
import traceback
from importlib.abc import MetaPathFinder

import torch._dynamo  # noqa: F401
import transformers.modeling_utils  # noqa: F401
from conftest import ROOT, TESTS

import dist_amp.train
import dist_amp.verify.__main__  # noqa: F401
from dist_amp.commands.new import distribution, distributions
from dist_amp.commands.parts import Parts, imported

PARTS = Parts(ROOT / "dist_amp", ROOT)
# Benchmarks, and what makes projects.
CLONE_ONLY = {"dist_amp/commands/new.py", "dist_amp/commands/parts.py"}
# Which extra each optional module is for.
NEEDS_EXTRA = {
    "hf": ("hf_causal_lm", "hf_classification", "huggingface"),
    "images": ("labelled_images",),
}
# Where an extra's package is imported by a function that says what to install.
ASKS_FOR_EXTRA = {
    "hf": ("tokenizer", "pretrained"),
    "gpu": ("health",),
    "float8": ("float8",),
    "plot": ("plot",),
}


def modules(files):
    """The names by which Python imports these files; scripts and tests are left out."""
    paths = [file.removesuffix(".py") for file in sorted(files) if file.startswith("dist_amp/")]
    return [path.removesuffix("/__init__").replace("/", ".") for path in paths]


class Missing(MetaPathFinder):
    """Hides all files of the package but some."""

    def __init__(self):
        self.kept = set()

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dist_amp" and name not in self.kept:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
        return


def in_a_fork(function, *args):
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join(600)  # ends a test that hangs
    return process.exitcode


def import_all(files, missing, kept, failed):
    """Import these files in a tree of the kept ones; write the traceback if that fails."""
    missing.kept = set(modules(kept))
    try:
        for name in modules(files):
            importlib.import_module(name)
    except BaseException:
        failed.write_text(traceback.format_exc())


def import_core_and_each_feature(folder):
    for name in [name for name in sys.modules if name.split(".")[0] == "dist_amp"]:
        del sys.modules[name]
    missing = Missing()
    sys.meta_path.insert(0, missing)
    import_all(PARTS.core, missing, PARTS.core, folder / "core")
    ema = ["dist_amp/optimizers/ema.py"]
    in_a_fork(import_all, ema, missing, PARTS.core, folder / "ema without its file")
    for name, (_, _, files) in PARTS.features.items():
        kept = PARTS.files_with([name])
        own = [file for file in kept - PARTS.core if PARTS.unit.get(file, files) is files]
        if in_a_fork(import_all, own, missing, kept, folder / name) != 0:
            (folder / name).write_text("its process died")


def test_core_is_imported_alone_and_each_feature_with_what_it_needs_alone(tmp_path):
    assert in_a_fork(import_core_and_each_feature, tmp_path) == 0
    failures = {path.name: path.read_text() for path in tmp_path.iterdir()}
    noticed = failures.pop("ema without its file")
    assert "ModuleNotFoundError: hidden: dist_amp.optimizers.ema" in noticed
    assert failures == {}


def imported_at_the_top(tree):
    outside = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return imported(ast.Module(outside, []))


def test_no_core_file_imports_a_feature_at_its_top_level():
    for file in (file for file in PARTS.core if file.startswith("dist_amp/")):
        tree = ast.parse(PARTS.files[file].read_text())
        assert PARTS.named_in(" ".join(imported_at_the_top(tree))).isdisjoint(PARTS.unit), file


def declared(*extras):
    """The distributions that pyproject.toml names, of the base package and of these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return {distribution(line) for group in groups for line in group}


def test_every_import_of_the_package_is_declared():
    for path in (ROOT / "dist_amp").rglob("*.py"):
        at_once = [extra for extra, modules in NEEDS_EXTRA.items() if path.stem in modules]
        later = [extra for extra, modules in ASKS_FOR_EXTRA.items() if path.stem in modules]
        tree = ast.parse(path.read_text())
        assert distributions(imported_at_the_top(tree)) <= declared(*at_once), path
        assert distributions(imported(tree)) <= declared(*at_once, *later), path


def test_every_file_belongs_to_core_or_to_a_feature_that_says_what_it_is():
    files = {file for file in PARTS.files if not file.startswith("tests/")}
    assert files - PARTS.files_with(PARTS.features) == CLONE_ONLY
    for name, feature in PARTS.features.items():
        assert feature.about, name
        assert (ROOT / feature.docs).is_file(), name
    assert PARTS.chosen(["export"]) == ["export", "frozen"], "model_card may be missing"


def test_a_test_file_is_in_the_folder_of_what_it_needs_under_a_name_of_its_own():
    """Projects get the tests of core and of their features."""
    paths = sorted(TESTS.rglob("*.py"))
    folders = ("core", "features", "together", "repo", "slow", "gpu")
    tests = {path for path in paths if path.match("test_*.py")}
    assert {path.parent for path in tests} == {TESTS / folder for folder in folders}
    names = [path.name for path in paths if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))
    for file in PARTS.files:
        if file.startswith(("tests/core/test_", "tests/features/test_")):
            assert (file in PARTS.core) != (file in PARTS.unit), "its name is no feature's"
            tests = {need for need in PARTS.needs(file) if "/test_" in need}
            assert tests <= PARTS.core | {*PARTS.unit.get(file, ())}, file
