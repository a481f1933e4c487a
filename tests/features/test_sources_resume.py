"""Core as test_resume.py tests it, with sources."""

import json

import pytest
from test_checkpoint import settings
from tiny import Tiny, make_run, save

from dist_amp.checkpoint.compatibility import with_rows_as_begun
from dist_amp.checkpoint.format import CONFIG, MANIFEST, checkpoint_folder, signed_text
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
        ("last", "auto", {}, "last"),
        ("auto", "auto", {"dist_amp": "0.1.0"}, "auto"),
        ("auto", "shuffled", {"dist_amp": "0.1.0"}, "shuffled"),  # begun by an earlier version
    ],
)
@pytest.mark.parametrize("table", ["data", "data.sources.web"])
def test_a_run_keeps_the_order_in_which_its_version_read_the_rows(
    tmp_path, table, now, saved, made_by, expected
):
    def config_with(value):
        path = f"--{table}.path" if table != "data" else "--data.text_column"
        return load_config([path, "text", f"--{table}.validation_split", value])

    run = make_run(World(), Tiny(), *settings(tmp_path, "single", "fp32"))
    save(run)
    folder = checkpoint_folder(run.folder, 0)
    content = json.loads((folder / MANIFEST).read_text())
    del content["xxh3"]
    (folder / MANIFEST).write_text(signed_text(content | {"versions": made_by}))
    (folder / CONFIG).write_text(to_toml(config_with(saved)))
    data = with_rows_as_begun(config_with(now), folder).data
    part = data if table == "data" else tables_of(data)["web"]
    assert part.validation_split == expected
