"""The configuration: where values come from, which one wins, and the errors for wrong ones."""

import tomllib
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Protocol

import pytest
import torch
from conftest import needs
from tiny import Tiny

from dist_amp.config import validate
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.load import load_config
from dist_amp.config.suggestions import REMOVED
from dist_amp.config.text import flat, to_toml
from dist_amp.errors import ConfigError
from dist_amp.precision import build_precision
from dist_amp.run import run_folder
from dist_amp.settings import (
    CheckpointConfig,
    DataConfig,
    MixedSourceConfig,
    PrecisionConfig,
    RunConfig,
    ScalerConfig,
    TaskConfig,
    TrainConfig,
)
from dist_amp.supervise.command_line import Parser
from dist_amp.train import main
from dist_amp.world import World


def load(*argv, **environ):
    return load_config([str(word) for word in argv], environ)


def values(config):
    return flat(to_toml(config))


def written(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text)
    return path


def refused(call, *args, **more):
    """The error message for a wrong config: one line, exit status 64."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **more)
    assert caught.value.exit_code == 64
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusal(*argv, **environ):
    return refused(load, *argv, **environ)


def assert_says(message, *parts):
    missing = [part for part in parts if str(part) not in message]
    assert not missing, f"{missing} not in: {message}"


# Where values come from.


def test_each_later_source_wins(tmp_path):
    first = "[train]\nsteps = 1\nmicro_batch_size = 1\n[optim]\nlr = 1\nmomentum = 0.1"
    second = "[train]\nmicro_batch_size = 2\n[optim]\nlr = 2\nmomentum = 0.2"
    first, second = written(tmp_path, first, "a.toml"), written(tmp_path, second, "b.toml")
    environment = {"DIST_AMP_OPTIM__LR": "3", "DIST_AMP_OPTIM__MOMENTUM": "0.3"}
    for form in ("--config {} {}", "--config {} --config {}", "--config={} --config={}"):
        words = form.format(first, second).split()
        config = load("--optim.momentum", "0.4", *words, **environment)
        assert config.train.accumulation_steps == "auto"
        assert (config.train.steps, config.train.micro_batch_size) == (1, 2)
        assert (config.optim.lr, config.optim.momentum) == (3, 0.4)


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False)])
def test_booleans_in_a_file(tmp_path, word, value):
    path = written(tmp_path, f"[precision]\ntf32 = {word}\nuse_amp = {word}")
    precision = load("--config", path).precision
    assert (precision.tf32, precision.use_amp) == (value, value)


def test_a_list_is_several_words_or_an_array(tmp_path):
    betas = (0.8, 0.9)
    assert load("--optim.betas", "0.8", "0.9").optim.betas == betas
    assert load("--config", written(tmp_path, "[optim]\nbetas = [0.8, 0.9]")).optim.betas == betas
    assert load(DIST_AMP_OPTIM__BETAS="0.8 0.9").optim.betas == betas


@pytest.mark.parametrize("option", ["--print_config", "--print-config"])
def test_what_print_config_prints_reads_back_the_same(tmp_path, monkeypatch, capsys, option):
    monkeypatch.chdir(tmp_path)
    words = ["--train.steps", "7", "--use_amp", "false", "--task.target", "tiny:Tiny"]
    assert main([*words, option]) == 0
    path = written(tmp_path, capsys.readouterr().out)
    assert values(load("--config", path)) == values(load(*words))
    assert list(tmp_path.iterdir()) == [path], "nothing else happens"


def test_help_lists_every_key_with_its_meaning_and_the_chosen_tasks_arguments(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    keys = [key for key in values(load()) if not key.startswith("task.args.")]
    assert [key for key in keys if f"--{key} " not in text] == []
    assert "--help task.args" in text
    assert "The peak learning rate." in text
    assert main(["--task.target", "tiny:NeedsName", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--task.args.name " in text
    assert "--task.args.width " in text
    assert "--task.args.context " not in text


def test_a_wrong_config_is_one_line_and_status_64(capsys):
    assert main(["--optim.lr", "fast"]) == 64
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: optim.lr=fast on the command line must be a number\n"


def test_there_are_at_most_77_settings():  # the budget is 75; run.observers is the latest
    names = [{item.name for item in fields(each)} for each in (MixedSourceConfig, DataConfig)]
    of_mixtures = names[0] - names[1]
    of_the_task = {key for key in values(load()) if key.startswith("task.args.")}
    assert len(values(load()).keys() - (of_the_task | of_mixtures | {"task.args"})) <= 77


# Wrong keys.


@pytest.mark.bad_input("unknown key in a file, in the environment, on the command line")
def test_an_unknown_key_names_its_source_and_the_nearest_right_one(tmp_path):
    path = written(tmp_path, "[optim]\nlrr = 1")
    assert_says(refusal("--config", path), "optim.lrr", f"in {path}", "did you mean optim.lr?")
    assert_says(refusal("--config", path), f"in {path}, line 2;")
    message = refusal(DIST_AMP_TRAIN__STEP="1")
    assert_says(message, "train.step ", "DIST_AMP_TRAIN__STEP", "did you mean train.steps?")
    message = refusal("--train.micro_batchsize", "1")
    assert_says(message, "train.micro_batchsize on the command line; did you mean train.micro_b")


@pytest.mark.bad_input("a setting's name as in other libraries (`learning_rate`, `batch_size`)")
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("learning_rate", "optim.lr"),
        ("batch_size", "train.micro_batch_size"),
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("precision.strategy", "parallel.strategy"),
        ("seed", "run.seed"),
        pytest.param("task.args.widht", "task.args.width", marks=needs("tasks.causal_lm")),
        ("optim-lr", "optim.lr"),
        ("OPTIM.LR", "optim.lr"),
        ("optim.lerning_rate", "optim.lr"),
        ("train.max_step", "train.steps"),
    ],
)
def test_for_a_misplaced_or_misspelt_key_the_right_one_is_suggested(wrong, right):
    assert_says(refusal(f"--{wrong}", "1"), f"did you mean {right}?")


@pytest.mark.bad_input("a launcher's option for the main job (`--nproc-per-node`)")
def test_a_launchers_option_is_said_to_be_one():
    message = refusal("--nproc-per-node", "4")
    assert_says(message, "unknown key nproc_per_node", "option of torchrun and of dist_amp launch")


@pytest.mark.bad_input("a key without its dashes on the command line")
@pytest.mark.parametrize("words", ["train.steps 5", "train.steps=5"])
def test_for_a_key_without_dashes_the_whole_argument_is_suggested(words):
    assert_says(refusal(*words.split()), "belongs to no key; write --train.steps=5")
    assert_says(
        refusal("--optim.lr", "1", *words.split()), "must be a number; write --train.steps=5"
    )


@pytest.mark.bad_input("a choice that is misspelt")
@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("precision.dtype", "bfloat16", "bf16"),
        ("parallel.strategy", "fsdp2", "fsdp"),
        ("precision.use_amp", "False.", "false"),
        ("eval.every", "of", "off"),
    ],
)
def test_for_a_misspelt_choice_the_nearest_is_suggested(key, value, right):
    message = refusal(f"--{key}", value)
    assert_says(message, f"{key}={value} on the command line", f"; did you mean {right}?")


@pytest.mark.bad_input("a number in quotes in a file")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[train]\n\n# so\nsteps = "2"\n', "train.steps=2 in {}, line 4 must be a whole number, "),
        (
            '[optim]\nbetas = ["0.9", "0.95"]',
            "optim.betas=0.9 0.95 in {}, line 2 must be a number, ",
        ),
        (
            'precision.use_amp = "true"',
            "precision.use_amp=true in {}, line 1 must be true or false, ",
        ),
        (
            '[eval]\n"every" = "5"',
            "eval.every=5 in {}, line 2 must be a whole number or off, without quotes",
        ),
    ],
)
def test_a_number_in_quotes_is_refused_with_its_line(tmp_path, text, said):
    path = written(tmp_path, text)
    message = refusal("--config", path)
    assert_says(message, said.format(path), "without quotes")


@pytest.mark.bad_input("a setting of an earlier release")
@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_is_rejected_with_what_to_do_now(key, tmp_path):
    message = f"{key} on the command line is no longer a setting: {REMOVED[key]}"
    assert refusal(f"--{key}", "1") == message
    assert key not in values(load())


@pytest.mark.bad_input("a removed setting of a mixture's source")
def test_a_removed_setting_of_a_mixtures_source_is_rejected():
    message = refusal("--data.sources.wiki.revision", "v2")
    assert_says(message, "data.sources.wiki.revision", "append it to data.name")


def test_a_runs_own_config_of_an_earlier_release_is_read(tmp_path, monkeypatch, capsys):
    text = '[train]\nsteps = 7\ngc_every = 10\n[checkpoint]\non_failure = "stop"\n'
    path = written(tmp_path, text, "config.toml")
    monkeypatch.chdir(tmp_path)
    for config in (load("--config", path), load("--config", "config.toml")):
        assert (config.train.steps, config.checkpoint) == (7, CheckpointConfig())
    left_out = [line for line in capsys.readouterr().err.splitlines() if "gc_every" in line]
    path.write_text('[precision]\ndtype = "bf16"\nmatmul = "fp8"\n')
    assert load("--config", path).precision.dtype == "fp8"
    said = f"line 3 is no longer a setting: {REMOVED['train.gc_every']}"
    assert left_out == [f"note: train.gc_every in {name}, {said}" for name in (path, "config.toml")]
    assert_says(refusal("--config", written(tmp_path, text)), "train.gc_every", "mine.toml")


def test_a_word_that_is_no_key_or_a_value_in_place_of_a_section_is_rejected(tmp_path):
    assert_says(refusal("--zzz", "1"), "unknown key zzz", "--help")
    path = written(tmp_path, "[precision]\nscaler = 1")
    assert_says(refusal("--config", path), "precision.scaler", path)
    assert_says(refusal("optim_lr", "1"), "'optim_lr'", "--section.key")


@pytest.mark.bad_input("required key missing")
def test_a_missing_required_key_is_named():
    message = refusal("--task.target", "tiny:NeedsName")
    assert_says(message, "task.args.name is required", "--task.args.name VALUE")


# Wrong files.


@pytest.mark.bad_input("key given twice in a file")
@pytest.mark.bad_input("config file missing or not TOML")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[optim]\nmomentum = 0\nlr = 1\nmomentum = 1\n", ["line 4"]),
        (b"[optim]\nmomentum = 0\nmomentum = 1", ["line 3"]),
        (b"[optim]\nlr = 1\n[optim]\neps = 1\n", ["line 3"]),
        (b"[optim]\nlr: 1\n", ["not TOML", "line 2"]),
        (b"\x80\x02}q\x00", ["not TOML"]),
    ],
)
def test_a_file_that_is_not_toml_or_repeats_a_key_is_named_with_the_line(text, said, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(text)
    assert_says(refusal("--config", path), path, *said)


def test_a_config_that_is_no_file_is_rejected(tmp_path):
    assert_says(refusal("--config", "missing.toml"), "missing.toml", "No such file", "TOML file")
    assert_says(refusal("--config"), "--config", "path of a TOML file")
    assert_says(refusal("--config", tmp_path), tmp_path, "directory")


# Wrong values.


@pytest.mark.bad_input("wrong type")
@pytest.mark.bad_input("unknown dtype or strategy")
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.steps", "many", "a whole number"),
        ("train.steps", "1.5", "a whole number"),
        ("train.steps", "1e3", "a whole number"),
        ("train.steps", "", "a whole number"),
        ("optim.lr", "fast", "a number"),
        ("precision.use_amp", "maybe", "true or false"),
        ("train.accumulation_steps", "all", "a whole number or auto"),
        ("eval.every", "never", "a whole number or off"),
        pytest.param("task.args.width", "wide", "a whole number", marks=needs("tasks.causal_lm")),
        ("precision.dtype", "int8", "one of auto, bf16, fp16, fp8"),
        ("parallel.strategy", "zero3", "one of auto, single, ddp, fsdp, hsdp"),
    ],
)
def test_a_wrong_type_names_key_value_source_and_what_is_expected(key, value, expected):
    shown = value or "(nothing)"
    assert refusal(f"--{key}={value}") == f"{key}={shown} on the command line must be {expected}"


def test_a_wrong_type_in_a_file_or_in_the_environment_names_the_source(tmp_path):
    path = written(tmp_path, "[optim]\nlr = true")
    assert refusal("--config", path) == f"optim.lr=true in {path}, line 2 must be a number"
    message = refusal(DIST_AMP_RUN__SEED="x")
    assert message == "run.seed=x in the environment as DIST_AMP_RUN__SEED must be a whole number"


def test_too_few_or_too_many_values_are_rejected():
    message = refusal("--train.steps", "--optim.lr", "1")
    assert_says(message, "train.steps", "nothing", "a whole number")
    assert_says(refusal("--train.steps", "5", "6"), "train.steps=5 6", "a whole number")
    for words in ("0.9", "0.9 0.95 0.99"):
        message = refusal("--optim.betas", *words.split())
        assert_says(
            message, f"optim.betas={words}", "2 values, separated by spaces, as in 0.9 0.95"
        )


@pytest.mark.bad_input("a number out of range (lr, steps, accumulation, betas, ratios)")
@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("run.seed", "-1", "at least 0"),
        ("run.seed", str(2**70), "at most"),
        ("run.timeout_seconds", "0", "above 0"),
        ("data.validation_split", "0.0", "above 0 and below 1"),
        ("data.validation_split", "1.5", "above 0 and below 1"),
        ("precision.scaler.init_scale", "0.5", "at least 1"),
        ("data.workers", "-1", "at least 0"),
        ("precision.scaler.growth_factor", "1", "above 1"),
        ("precision.scaler.backoff_factor", "1", "above 0 and below 1"),
        ("precision.scaler.growth_interval", "0", "at least 1"),
        ("parallel.replicas", "0", "at least 1"),
        ("train.steps", "0", "at least 1"),
        ("train.micro_batch_size", "0", "at least 1"),
        ("train.accumulation_steps", "0", "at least 1"),
        ("train.global_batch_size", "-8", "at least 1"),
        ("train.max_grad_norm", "0", "above 0"),
        ("train.max_grad_value", "-1", "above 0"),
        ("train.max_skips_in_a_row", "0", "at least 1"),
        ("optim.lr", "0", "above 0"),
        ("optim.lr", "-1", "above 0"),
        ("optim.lr", "nan", "above 0"),
        ("optim.lr", "inf", "finite"),
        ("optim.warmup_steps", "-1", "at least 0"),
        ("optim.min_lr_ratio", "1.5", "at least 0 and at most 1"),
        ("optim.weight_decay", "-0.1", "at least 0"),
        ("optim.betas", "1.0 0.9", "at least 0 and below 1"),
        ("optim.betas", "0.9 1.0", "at least 0 and below 1"),
        ("optim.betas", "nan 0.9", "at least 0 and below 1"),
        ("optim.eps", "0", "above 0"),
        ("optim.momentum", "1", "at least 0 and below 1"),
        ("eval.every", "0", "at least 1 or off"),
        ("eval.batches", "0", "at least 1 or one of auto, all"),
        ("checkpoint.every", "0", "at least 1"),
        ("checkpoint.keep", "0", "at least"),
        ("metrics.log_every", "0", "at least 1"),
        ("metrics.fingerprint", "0", "at least 1 or off"),
        pytest.param("task.args.vocabulary", "255", "at least 256", marks=needs("tasks.causal_lm")),
    ],
)
def test_a_number_out_of_range_names_key_value_source_and_range(key, value, rule):
    message = refusal(f"--{key}", *value.split())
    assert_says(message, key, value.split()[0], "on the command line", rule)


# Values that do not work together.


@pytest.mark.bad_input("batch sizes that do not multiply out")
def test_batch_sizes_that_do_not_multiply_out_are_named_with_values_that_would():
    message = refused(accumulation_steps, TrainConfig(micro_batch_size=8, global_batch_size=100), 8)
    parts = ["train.global_batch_size=100", "micro_batch_size 8 x world size 8 = 64"]
    assert_says(message, *parts, "use global_batch_size=128")
    config = TrainConfig(micro_batch_size=8, global_batch_size=512, accumulation_steps=3)
    message = refused(accumulation_steps, config, 8)
    parts = ["train.global_batch_size=512", "accumulation_steps 3 = 192"]
    assert_says(message, *parts, "use accumulation_steps=8")


@pytest.fixture
def native_cpu(monkeypatch):
    """Nothing warns of a dtype that this CPU only emulates."""
    monkeypatch.setattr(validate, "present", lambda name: False)


@pytest.mark.bad_input("scaler settings with bf16 or fp32")
def test_scaler_settings_without_fp16_warn_once(capsys, native_cpu):
    build_precision(PrecisionConfig(scaler=ScalerConfig(init_scale=2.0)), False, World())
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert_says(warning, "precision.scaler has no effect in bf16", "fp16")


@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(dtype="fp16")])
def test_default_scaler_settings_cause_no_warning(precision, capsys, native_cpu):
    build_precision(precision, False, World())
    assert capsys.readouterr().err == ""


@pytest.mark.bad_input(
    "a `cast_by` that the strategy does not support, or a policy dtype with `use_amp=false`"
)
def test_a_policy_needs_sharding():
    message = refused(build_precision, PrecisionConfig(cast_by="policy"), False, World())
    assert_says(message, "precision.cast_by=policy", "fsdp or hsdp", "use precision.cast_by=autoc")


@pytest.mark.parametrize("cast_by", ["autocast", "policy"])
def test_a_cast_needs_mixed_precision(cast_by):
    config = PrecisionConfig(use_amp=False, cast_by=cast_by)
    message = refused(build_precision, config, True, World())
    assert_says(message, f"precision.cast_by={cast_by}", "use_amp=false", "use auto")


class Shape(Enum):
    ROUND = 1
    SQUARE = 2


class Shaped(Tiny):
    def __init__(self, shape: Shape = Shape.ROUND, sizes: dict[str, int] | None = None):
        super().__init__()


@pytest.mark.bad_input("a task argument that is a dict")
def test_an_enum_is_written_by_its_name_and_a_dict_is_refused_as_an_argument_of_a_task():
    words = ["--task.target", "test_config:Shaped"]
    config = load_config([*words, "--task.args.shape", "SQUARE"], environ={})
    assert config.task.args.shape is Shape.SQUARE
    assert tomllib.loads(to_toml(config))["task"]["args"] == {"shape": "SQUARE"}
    with pytest.raises(ConfigError, match=r"task.args.sizes=a=1 .* must be .*no setting can be a"):
        load_config([*words, "--task.args.sizes", "a=1"], environ={})


def test_the_launchers_variables_are_no_settings():
    names = ("PYTHON", "LAUNCHER", "CACHE", "METADATA", "COMMAND", "FAILED_AT", "NNODES")
    assert load(**{f"DIST_AMP_{name}": "1" for name in names}) == load()


def test_a_text_from_the_environment_keeps_its_spaces():
    config = load_config([], {"DIST_AMP_RUN__DIR": "my runs/first try"})
    assert config.run.dir == "my runs/first try"


@pytest.mark.bad_input("an empty run.dir")
def test_an_empty_run_dir_is_refused():
    with pytest.raises(ConfigError, match="run.dir is empty; give a folder's path, or auto"):
        run_folder(load_config(["--run.dir", ""], {}).run, World())


def test_a_home_folders_path_is_expanded_from_files_environment_and_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text('run.dir = "~/a"\ndata.path = "~/b/*.txt"\n')
    words = ["--config=~/c.toml", "--run.resume=~/d"]
    config = load_config(words, {"DIST_AMP_DATA__TOKENIZER": "~/e"})
    found = [config.run.dir, config.data.path, config.run.resume, config.data.tokenizer]
    assert found == [f"{tmp_path}/{name}" for name in ("a", "b/*.txt", "d", "e")]
    parser = Parser("test", None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(["~/f", "--out=~/g"])
    assert (options.run, options.out) == (tmp_path / "f", tmp_path / "g")
    assert run_folder(RunConfig(dir="~/h"), World()) == tmp_path / "h"
    made = [RunConfig(resume="~/a").resume, DataConfig(path="~/a").path, TaskConfig("~/a").target]
    assert made == [f"{tmp_path}/a"] * 3


class Given(Protocol):
    """Not checked at run time."""


class OddTypes(Tiny):
    def __init__(self, a: Given | None = None, b: torch.dtype = torch.float32, **more):
        super().__init__()


@pytest.mark.bad_input("a task argument of a type that no setting can have, or that **kwargs takes")
def test_an_argument_whose_type_no_setting_can_have_is_refused_and_the_others_work(capsys):
    task = ["--task.target", "test_config:OddTypes"]
    for words in (["--task.args.a", "x"], ["--task.args.b", "torch.bfloat16"]):
        assert_says(refusal(*task, *words), f"{words[0][2:]}={words[1]}", "no setting can have its")
    assert_says(refusal(*task, "--task.args.more", 3), "unknown key", "the task takes a, b")
    assert main([*task, "--help", "task.args"]) == 0
    assert "--task.args.b" in capsys.readouterr().out
