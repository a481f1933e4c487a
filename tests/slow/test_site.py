"""The docs as a site: built as mkdocs.yml says, complete, searchable, with the docstrings."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from conftest import ROOT

EXTRA = "needs the extra `docs`: pip install -c launch/constraints.txt -e '.[docs]'"
missing = not (find_spec("material") and find_spec("mkdocstrings_handlers"))
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.skipif(missing, reason=EXTRA)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme, about mkdocs 2
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_it_is_complete_with_docstrings_and_linked_files_and_is_searched(site):
    start = (site / "index.html").read_text()
    navigation = set(re.findall(r'<a href="([^"]+)" class="md-nav__link', start))
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= navigation
    api = (site / "api.html").read_text()
    names = "run.build_run run.ScriptRun.save train.fit step.evaluate step.train_step task.Task"
    for name in names.split():
        assert f'id="dist_amp.{name}"' in api, name
    assert "runs/&lt;UTC time&gt;-&lt;id&gt;" in api, "a setting's docstring; not taken for a tag"
    recipes = (site / "recipes.html").read_text()
    assert 'href="repository/dist_amp/task.py.html"' in recipes
    assert 'href="index.html#your-model"' in recipes
    index = json.loads((site / "search/search_index.json").read_text())
    for word, page in (("accumulation_steps", "api.html"), ("SIGSTOP", "debugging.html")):
        found = [entry["location"] for entry in index["docs"] if word in entry["text"]]
        assert page in {location.partition("#")[0] for location in found}, word


def test_a_page_shows_no_markup_as_text_and_nothing_is_fetched_from_another_host(site):
    """Markdown that a git host takes for a list or a table, and the site's Markdown does not."""
    fetched = r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"'
    for page in site.rglob("*.html"):
        html = page.read_text()
        assert not re.search(fetched, html), page
        html = re.sub(r"<(script|pre)\b.*?</\1>", "", html, flags=re.DOTALL)
        markup = r"^(?:<p>)?(?:[-*] |\|[ -]|```|#+ |:::).*"
        assert re.findall(markup, html, re.MULTILINE) == [], page
