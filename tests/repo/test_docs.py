"""What the documentation names exists: settings, files, commands, tests, links, and its budget."""

import ast
import inspect
import re

import pytest
from conftest import ROOT, TESTS

from dist_amp.config.load import load_config
from dist_amp.config.text import flat, to_toml
from dist_amp.step import train_step

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *DOCS]
PATHS = r"(?<![\w/.])(?:configs|launch|dist_amp|tests|docs|benchmarks)/[\w./]*\w"
MADE_BY_COMMANDS = {"tests/bad_inputs.md"}
TEXT_OF_TESTS = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
NOT_SETTINGS = {"metrics.jsonl", "parallel.model", "run.metrics.best", "run.schedule.factor"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_fences(page):
    """The page's text outside of fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_lines(source):
    """A function's statements, one normalised line each: without docstring and annotations."""
    function = ast.parse(source).body[0]
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.unparse(function).splitlines()


def test_the_readme_and_the_screenshot_are_small_and_the_readme_lists_every_page():
    assert len(README.read_text().splitlines()) <= 150
    assert 0 < (ROOT / "docs/images/tensorboard.png").stat().st_size < 150_000
    text = README.read_text()
    assert [page.name for page in DOCS if f"(docs/{page.name})" not in text] == []


def test_the_readmes_training_step_is_the_real_one():
    text = README.read_text()
    (shown,) = re.findall(r"<!-- step\.py: train_step -->\n```py\n(.*?)```", text, re.DOTALL)
    assert code_lines(shown) == code_lines(inspect.getsource(train_step))


@pages
def test_every_relative_link_leads_to_a_file_and_a_heading_that_exist(page):
    links = re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]+))?\)", without_fences(page))
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pages
def test_every_setting_path_and_test_that_a_page_names_exists(page):
    text = page.read_text()
    keys = flat(to_toml(load_config([], environ={})))
    sections = {key.partition(".")[0] for key in keys}
    named = re.findall(r"--([a-z_]+\.[a-z_.]*[a-z_])", text)
    named += re.findall(r"`([a-z_]+\.[a-z_.]*[a-z_])(?:=[^`]*| = [^`]*)?`", text)
    for key in named:
        is_key = key.partition(".")[0] in sections and not key.endswith((".py", ".toml", ".sh"))
        if is_key and key not in NOT_SETTINGS:
            assert key in keys or key.startswith(("task.args", "data.sources")), key
    for path in re.findall(PATHS, text):
        assert (ROOT / path).exists() or path in MADE_BY_COMMANDS, path
    for word in re.findall(r"launch/test\.sh (?:-m slow )?-k ([a-z]\w+)", text):
        assert re.search(rf"def test_\w*{word}", TEXT_OF_TESTS), word


def test_the_architecture_page_lists_every_folder_and_top_file():
    text = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "dist_amp"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)) == folders
    listed = set(re.findall(r"`(\w+\.py)`", text))
    assert {path.name for path in package.glob("*.py")} - listed == {"__init__.py"}
