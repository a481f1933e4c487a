"""Core as test_security.py tests it, with sources."""

import pytest
import test_security_with_features
from test_security import ADDRESS
from test_security_with_features import given

from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.errors import ConfigError
from dist_amp.sources.files import file_system

# Fixtures.
secretive = test_security_with_features.secretive


@pytest.mark.bad_input("a masked secret of a run's config.toml, in a task's argument or data.path")
def test_a_masked_value_is_never_used_in_silence(tmp_path, secretive, launch, monkeypatch):
    words = [*secretive, *given()]
    monkeypatch.chdir(launch.folder)
    monkeypatch.syspath_prepend(launch.folder)
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(load_config(words, {})))
    with pytest.raises(ConfigError, match=r"task.args.address in .*config.toml, line .* is masked"):
        load_config(["--config", str(saved)], {})
    config = load_config(["--config", str(saved), *given()], {})
    assert config.task.args.address == ADDRESS
    with pytest.raises(ConfigError, match="DIST_AMP_DATA__PATH"):
        file_system(config.data.path)
