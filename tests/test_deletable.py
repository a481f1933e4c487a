"""Each optional feature, and all at once, can be deleted: the rest trains, saves and resumes."""

import ast
import tomllib
from itertools import combinations

import deletable
import pytest
from architecture import files

from dist_amp.commands.deletion import without_blocks
from dist_amp.commands.features import with_dependents
from dist_amp.commands.project_tests import defined

FEATURES = deletable.features()


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A copy of the package without any optional feature."""
    root = tmp_path_factory.mktemp("bare")
    deletable.copy_without(FEATURES, root)
    return root


@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_no_name_is_undefined_or_unused(tmp_path, feature):
    deletable.copy_without([feature], tmp_path)
    assert deletable.unknown_names(tmp_path) == ""
    assert deletable.missing_imports(tmp_path) == []


@pytest.mark.parametrize(("strategy", "dtype"), [("ddp", "bf16"), ("fsdp", "bf16")])
def test_without_all_features_the_main_job_trains_saves_resumes_and_reports(bare, strategy, dtype):
    deletable.check(bare, strategy, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("feature", FEATURES)
def test_without_one_feature_the_main_job_trains_saves_resumes_and_reports(
    tmp_path, feature, strategy
):
    deletable.copy_without([feature], tmp_path)
    deletable.check_imports(tmp_path)
    deletable.check(tmp_path, strategy, "bf16")


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_names_files_tests_and_a_page_that_exist(feature):
    row = FEATURES[feature]
    named = [*row["files"], *row.get("tests", ()), row["docs"].split("#")[0]]
    assert row["about"]
    assert [name for name in named if not (deletable.ROOT / name).exists()] == []


@pytest.mark.parametrize("feature", FEATURES)
def test_whole_lines_that_a_feature_cuts_start_at_a_lines_start(feature):
    """A cut that starts within the indentation would move the next line into the block before."""
    for file, blocks in FEATURES[feature].get("entries", {}).items():
        text = (deletable.ROOT / file).read_text()
        for block in blocks:
            if isinstance(block, str) and block.endswith("\n"):
                before = text.partition(block)[0]
                assert before == "" or before.endswith("\n"), f"{file}: {block!r}"


def test_any_two_features_can_be_deleted_together():
    removed = {name: tuple(row["files"]) for name, row in FEATURES.items()}
    texts = {}
    for pair in combinations(FEATURES, 2):
        entries = [FEATURES[name].get("entries", {}) for name in pair]
        names = with_dependents(pair, FEATURES)
        gone = tuple(file for name in names for file in removed[name])
        for file in entries[0].keys() & entries[1].keys():
            if file.startswith(gone):
                continue
            text = texts.setdefault(file, (deletable.ROOT / file).read_text())
            for name in names:
                text = without_blocks(text, FEATURES[name].get("entries", {}).get(file, ()), file)


def test_each_file_of_an_optional_folder_belongs_to_a_feature():
    listed = {file for row in FEATURES.values() for file in row["files"]}
    optional = ("sources", "diagnostics", "optimizers", "scaling", "tasks", "verify", "commands")
    # Needed by every run, though they lie beside what is optional.
    needed = {"scaling.blocks"}
    for name, path in files().items():
        folder = name.split(".")[0]
        file = str(path.relative_to(deletable.ROOT))
        if folder in optional and name not in needed and not name.endswith("__init__"):
            assert file in listed or f"dist_amp/{folder}" in listed, file


def test_the_tests_of_projects_and_the_features_that_they_need_exist():
    needs = tomllib.loads((deletable.ROOT / "features.toml").read_text())["tests"]
    every = needs.pop("every_project")
    assert [file for file in every if not (deletable.ROOT / file).exists()] == []
    for file, rows in needs.items():
        body = ast.parse((deletable.ROOT / file).read_text()).body
        names = {name for node in body for name in defined(node)}
        assert set(rows) - {"file"} <= names, file
        assert {feature for features in rows.values() for feature in features} <= set(FEATURES)
