"""What test_profiling.py tests, with other features."""

import re

from conftest import ROOT

from dist_amp.config.load import load_config
from dist_amp.config.text import flat, to_toml


def test_every_debugging_setting_is_documented_and_every_documented_setting_exists():
    page = (ROOT / "docs/debugging.md").read_text()
    keys = flat(to_toml(load_config([], environ={})))
    debug_keys = [key for key in keys if key.startswith("debug.")]
    assert [key for key in debug_keys if key not in page] == []
    assert [key for key in re.findall(r"--([a-z_]+\.[a-z_.]+)", page) if key not in keys] == []
