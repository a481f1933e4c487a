"""Each test file is in the folder of what it needs: projects get whole files."""

from conftest import ROOT, TESTS

from dist_amp.commands.parts import Parts, imports_of

PARTS = Parts(ROOT / "dist_amp", ROOT / "launch")
FILES = sorted(TESTS.rglob("test_*.py"))


def other_tests(path):
    """The other test files that a file imports, by their names."""
    return {name.partition(".")[0] for name in imports_of(path) if name.startswith("test_")}


def files_in(folder):
    return [path for path in FILES if path.parent == TESTS / folder]


def test_every_test_file_is_in_one_of_the_folders_under_a_name_of_its_own():
    folders = ("core", "features", "together", "repo", "slow", "gpu")
    assert {path.parent for path in FILES} == {TESTS / folder for folder in folders}
    names = [path.name for path in TESTS.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_tests_of_core_and_of_features_import_only_what_every_project_with_them_has():
    core = {path.stem for path in files_in("core")}
    for path in files_in("core"):
        assert other_tests(path) <= core, path
    for path in files_in("features"):
        feature = PARTS.feature_of_test(path)
        assert feature, f"there is no feature whose name {path.stem} has"
        for module in other_tests(path) - core:
            assert PARTS.feature_of_test(path.with_name(f"{module}.py")) == feature, path
