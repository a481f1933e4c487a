"""Core as test_resume.py tests it, with sources."""

import json

import pytest
from tiny import Tiny, make_run, save

from dist_amp.checkpoint.compatibility import with_rows_as_begun
from dist_amp.checkpoint.format import CONFIG, MANIFEST, signed_text
from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.sources.mixture import tables_of
from dist_amp.world import World


@pytest.mark.parametrize(
    ("now", "saved", "made_by", "expected"),
    [
        ("auto", "auto", {}, "shuffled"),
        ("0.1", "0.1", {}, "shuffled:0.1"),
        ("held_out", "held_out", {}, "held_out"),  # a split's name
        ("auto", "auto", {"dist_amp": "0.1.0"}, "auto"),
        ("auto", "shuffled", {"dist_amp": "0.1.0"}, "shuffled"),  # begun by an earlier version
    ],
)
def test_a_run_keeps_the_order_in_which_its_version_read_the_rows(
    tmp_path, now, saved, made_by, expected
):
    folder = save(make_run(World(), Tiny(), "--run.dir", tmp_path))
    content = json.loads((folder / MANIFEST).read_text())
    del content["xxh3"]
    (folder / MANIFEST).write_text(signed_text(content | {"versions": made_by}))
    for table, path in (("data", []), ("data.sources.web", ["--data.sources.web.path", "text"])):
        key = f"--{table}.validation_split"
        (folder / CONFIG).write_text(to_toml(load_config([*path, key, saved])))
        data = with_rows_as_begun(load_config([*path, key, now]), folder).data
        assert (tables_of(data).get("web") or data).validation_split == expected
