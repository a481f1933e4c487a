"""What the README and docs/ show is what happens, and what they link to exists."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs/recipes.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TASK, SNIPPET = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(NOTEBOOK,) = re.findall(r"```python\n(.*?)```", RECIPES, re.DOTALL)


def without_fences(page):
    """The page's text outside of fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_lines(source):
    """A function's statements, one normalised line each: without docstring, comments and annotations."""
    function = ast.parse(source).body[0]
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.unparse(function).splitlines()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1100


def test_the_readmes_training_step_is_the_real_one():
    from dist_amp.step import train_step

    (shown,) = re.findall(r"<!-- step\.py: train_step -->\n```py\n(.*?)```", README, re.DOTALL)
    assert code_lines(shown) == code_lines(inspect.getsource(train_step))


def test_the_readmes_task_trains_by_the_command_that_it_shows(launch, tmp_path):
    (tmp_path / "my_file.py").write_text(TASK)
    (arguments,) = re.findall(r"^python -m dist_amp.train (--task.target my_file.*)$", README, re.MULTILINE)
    done = launch(0, *arguments.split(), "--run.dir", "run", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "done: 300 steps (300 applied, 0 skipped)" in done.stdout


@pytest.mark.parametrize(
    ("snippet", "printed"),
    [
        pytest.param(SNIPPET, r"last loss ([\d.]+)\n", id="README"),
        pytest.param(NOTEBOOK, r"last loss ([\d.]+), held out ([\d.]+)\n", id="recipes"),
    ],
)
def test_the_notebook_snippets_train_and_leave_no_files(launch, snippet, printed, tmp_path):
    (tmp_path / "my_file.py").write_text(TASK)
    (tmp_path / "notebook.py").write_text(snippet)
    done = launch.module("notebook.py", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.fullmatch(printed, done.stdout).groups()]
    assert max(losses) < 2, "from 16 at the start, the mean of |x| squared"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] not in "._") == ["my_file.py", "notebook.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading_that_exist(page):
    links = re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]+))?\)", without_fences(page))
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_index_lists_every_page():
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in f"{index}(README.md)"] == []


def test_the_screenshot_is_small():
    assert 0 < (ROOT / "docs/images/tensorboard.png").stat().st_size < 150_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_path_and_test_that_a_page_names_exists(page):
    from dist_amp.config.load import load_config
    from dist_amp.config.parse import flat_values

    text = page.read_text()
    keys = dict(flat_values(load_config([], environ={})))
    for key in re.findall(r"--([a-z_]+\.[a-z_.]+)", text):
        key = re.sub(r"^data\.sources\.\w+\.(?!weight)", "data.", key)
        assert key in keys or key.startswith(("task.args", "data.sources.")), key
    for path in re.findall(r"(?<![\w/.])(?:configs|launch|dist_amp|tests)/[\w./]+\w", text):
        assert (ROOT / path).exists(), path
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for word in re.findall(r"launch/test\.sh (?:-m slow )?-k ([a-z]\w+)", text):
        assert re.search(rf"def test_\w*{word}", tests), word


def test_every_core_file_is_in_the_readmes_reading_order():
    listed = set(re.findall(r"\b(\w+\.py)\b", README.split("## Reading order")[1]))
    assert listed == {path.name for path in (ROOT / "dist_amp").glob("*.py")} - {"__init__.py"}


def test_every_file_that_the_architecture_page_names_exists():
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    folders = {path.name for path in (ROOT / "dist_amp").iterdir() if (path / "__init__.py").exists()}
    assert {folder for folder, _ in rows} == folders
    for folder, text in rows:
        for name in re.findall(r"`([a-z_]+)`", text):
            assert (ROOT / "dist_amp" / folder / f"{name}.py").exists(), f"{folder}/{name}"
