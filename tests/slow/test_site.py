"""The docs as a site: built as mkdocs.yml says, complete, searchable, with the docstrings."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from importlib.util import find_spec

import pytest
from conftest import ROOT

from dist_amp.step import train_step

EXTRA = "needs the extra `docs`: pip install -c launch/constraints.txt -e '.[docs]'"
missing = not (find_spec("material") and find_spec("mkdocstrings_handlers"))
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.skipif(missing, reason=EXTRA)]


def build(source, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme, about mkdocs 2
    return subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_it_is_complete_with_docstrings_and_linked_files_and_is_searched(site):
    start = (site / "index.html").read_text()
    navigation = set(re.findall(r'<a href="([^"]+)" class="md-nav__link', start))
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert len(pages) > 15
    assert {f"{page}.html" for page in pages} <= navigation
    api = (site / "api.html").read_text()
    for name in ("run.build_run", "run.ScriptRun.save", "train.fit", "step.evaluate", "task.Task"):
        assert f'id="dist_amp.{name}"' in api, name
    assert f'id="{train_step.__module__}.train_step"' in api
    api = re.sub(r"<(script|style|pre)\b.*?</\1>", "", api, flags=re.DOTALL)
    shown = " ".join(unescape(re.sub(r"<[^>]+>", "", api)).split())  # on one line
    for paragraph in train_step.__doc__.replace("`", "").split("\n\n"):
        assert " ".join(paragraph.split()) in shown
    assert "runs/<UTC time>-<id>" in shown, "a setting's docstring; not taken for a tag"
    recipes = (site / "recipes.html").read_text()
    assert 'href="repository/dist_amp/task.py.html"' in recipes
    assert 'href="index.html#your-model"' in recipes
    assert "Apache License" in unescape((site / "repository/LICENSE.html").read_text())
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


def test_broken_links_and_headings_fail_the_build(tmp_path):
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "site", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    broken = ("gone.md", "data.md#gone", "../dist_amp/gone.py", "../README.md#gone", "#gone")
    with (tmp_path / "source/docs/api.md").open("a") as page:
        page.writelines(f"\n[x]({link})\n" for link in broken)
    (tmp_path / "source/docs/new.md").write_text("# New\n")
    done = build(tmp_path / "source", tmp_path / "site")
    assert done.returncode != 0
    for link in broken:
        in_site = link.replace("../README", "index")
        assert f"contains a link '{in_site}'" in done.stderr
    assert 'not included in the "nav" configuration:\n  - new.md' in done.stderr
