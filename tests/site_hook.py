"""The docs' site also has the files of the repository that its pages link to, as pages.

A hook of mkdocs.yml: the pages' links stay as a git host needs them. The README is the first page.
A Markdown file becomes a page, of which the links count too; any other file becomes a page that
shows its text.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FOLDER = "repository/"
START = "index.md"
# The path in [text](path#heading): no address, no heading alone.
LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+")


def in_site(path):
    """Where the site's sources have a file of the repository."""
    if path == "README.md":
        return START
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return FOLDER + path.removesuffix(".md") + ".md"


def in_repository(source):
    """Where the repository has a file of the site's sources."""
    if source == START:
        return "README.md"
    if source.startswith(FOLDER):
        return source.removeprefix(FOLDER)
    return "docs/" + source


def linked(path, text):
    """The repository's files that a Markdown file links to."""
    targets = [normpath(join(dirname(path), link)) for link in LINK.findall(text)]
    return [target for target in targets if (ROOT / target).is_file()]


def as_page(path, text):
    if path.endswith(".md"):
        return text
    options = "---\nsearch: {exclude: true}\nhide: [toc]\n---"
    suffix = path.rpartition(".")[2]
    return f"{options}\n# {path}\n\n``````{suffix}\n{text}\n``````\n"


def on_files(files, config):
    """Add the README, what the pages link to, and what that links to."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, START, content=readme))
    waiting = [in_repository(file.src_uri) for file in files.documentation_pages()]
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text()
        if in_site(path) not in files.src_uris:
            files.append(File.generated(config, in_site(path), content=as_page(path, text)))
        if path.endswith(".md"):
            links = linked(path, text)
            waiting.extend(link for link in links if in_site(link) not in files.src_uris)


def on_page_markdown(markdown, page, config, files):
    """Let the links lead to where the site has the files."""
    source = page.file.src_uri

    def to_site(match):
        target = normpath(join(dirname(in_repository(source)), match[0]))
        if not (ROOT / target).is_file():
            return match[0]  # mkdocs reports it
        return relpath(in_site(target), dirname(source) or ".")

    return LINK.sub(to_site, markdown)
