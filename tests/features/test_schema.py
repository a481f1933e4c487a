"""dist_amp schema: what editors accept in a config is what a run accepts."""

import tomllib

import pytest
from conftest import ROOT
from jsonschema import Draft202012Validator

from dist_amp.commands.schema import main
from dist_amp.config.load import load_config
from dist_amp.config.schema import described, json_schema
from dist_amp.errors import ConfigError

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
SCHEMA = json_schema()
WRONG = """
train.stepz = 5
train.steps = "5"
train.steps = 0
train.steps = 1.5
train.accumulation_steps = "automatic"
train.clip_by = "norms"
optim.lr = 0
optim.betas = [0.9]
precision.scaler.init_scale = 0.5
checkpoint.keep = 1
data.sources.wiki.weight = 0
data.sources.wiki.pth = "a.txt"
""".strip().splitlines()


def problems(text, of=SCHEMA):
    errors = Draft202012Validator(of).iter_errors(tomllib.loads(text))
    return [f"{list(error.path)}: {error.message}" for error in errors]


def test_the_schema_is_one_of_draft_2020_12_and_the_stored_one_is_the_commands(capsys):
    Draft202012Validator.check_schema(SCHEMA)
    assert main([]) == 0
    assert (ROOT / "configs/schema.json").read_text() == capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_names_the_schema_and_is_valid(path):
    text = path.read_text()
    assert text.startswith("#:schema schema.json\n")
    assert (path.parent / "schema.json").exists()
    assert problems(text) == []


@pytest.mark.parametrize("line", WRONG)
def test_what_the_schema_rejects_is_what_a_run_rejects(line, tmp_path):
    assert len(problems(line)) == 1
    path = tmp_path / "wrong.toml"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError):
        load_config(["--config", str(path)], environ={})


def test_every_setting_has_its_meaning_and_a_default_that_is_valid():
    for key, about in described(SCHEMA, sources=["wiki"]).items():
        assert about["description"], key
        Draft202012Validator(about).validate(about["default"])
