"""The documented table of metrics is the one that TensorBoard's descriptions come from."""

import re

from forked import ROOT

from dist_amp.telemetry.tags import TAGS


def test_the_documented_table_has_every_tag_with_its_unit_and_meaning():
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == {tag: f"{unit} | {meaning}" for tag, (unit, meaning) in TAGS.items()}
