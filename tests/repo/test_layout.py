"""Each test file is in the folder of what it needs: projects get whole files."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT, TESTS

from dist_amp.commands.parts import Package

PACKAGE = Package(ROOT / "dist_amp")
FOLDERS = ("core", "features", "together", "repo", "slow", "gpu")
FILES = sorted(TESTS.rglob("test_*.py"))


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def files_in(folder):
    return [path for path in FILES if path.parent == TESTS / folder]


def test_every_test_file_is_in_one_of_the_folders():
    assert {path.parent for path in FILES} == {TESTS / folder for folder in FOLDERS}


def test_no_two_files_of_tests_have_one_name():
    names = [path.name for path in TESTS.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", files_in("features"), ids=lambda path: path.stem)
def test_a_file_is_named_by_its_feature_and_imports_no_other_features_tests(path):
    feature = PACKAGE.feature_of_test(path)
    assert feature, f"there is no feature whose name {path.stem} has"
    core = {other.stem for other in files_in("core")}
    for module in imported_modules(path):
        if module.startswith("test_") and module not in core:
            assert PACKAGE.feature_of_test(Path(module)) == feature


@pytest.mark.parametrize("path", files_in("core"), ids=lambda path: path.stem)
def test_tests_of_core_import_no_tests_of_features(path):
    others = {other.stem for other in FILES} - {other.stem for other in files_in("core")}
    assert others.isdisjoint(imported_modules(path))
