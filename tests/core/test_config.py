"""The configuration: where values come from, which one wins, and the errors for wrong ones."""

import re
import tomllib
from enum import Enum
from pathlib import Path

import pytest
import torch
from messages import message_of
from tiny import Tiny

from dist_amp.config.auto import accumulation_steps
from dist_amp.config.load import load_config
from dist_amp.config.suggestions import REMOVED
from dist_amp.config.text import flat, to_toml
from dist_amp.precision import build_precision
from dist_amp.run import run_folder
from dist_amp.settings import CheckpointConfig, PrecisionConfig, TrainConfig
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


def refusal(*argv, **environ):
    return message_of(64, load, *argv, **environ)


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


def test_booleans_lists_and_texts_are_read_from_each_source(tmp_path):
    for word, value in (("true", True), ("false", False)):
        path = written(tmp_path, f"precision.use_amp = {word}\noptim.betas = [0.8, 0.9]")
        environment = {"PRECISION__USE_AMP": word, "OPTIM__BETAS": "0.8 0.9"}
        for config in (
            load("--config", path),
            load("--use_amp", word.title(), "--optim.betas", "0.8", "0.9"),
            load(**{f"DIST_AMP_{name}": text for name, text in environment.items()}),
        ):
            assert config.precision.use_amp is value
            assert config.optim.betas == (0.8, 0.9)
    assert load(DIST_AMP_RUN__DIR="my runs/first try").run.dir == "my runs/first try"


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
    assert "The peak learning rate." in text
    assert main(["--task.target", "tiny:NeedsName", "--help"]) == 0
    text = capsys.readouterr().out
    found = [name for name in ("name", "width", "context") if f"--task.args.{name} " in text]
    assert found == ["name", "width"]


def test_a_setting_of_precision_chooses_bf16_where_auto_might_choose_float32():
    for words in (["--use_amp", "true"], ["--parallel.reduce_dtype", "bf16"]):
        assert load(*words).precision.dtype == "bf16"
    assert load("--use_amp", "true", "--precision.dtype", "fp16").precision.dtype == "fp16"
    assert load("--optim.lr", "1").precision.dtype == "auto"


def test_a_home_folders_path_is_expanded_wherever_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text('run.dir = "~/a"\ndata.path = "~/b/*.txt"\n')
    words = ["--config=~/c.toml", "--run.resume=~/d"]
    config = load_config(words, {"DIST_AMP_DATA__TOKENIZER": "~/e"})
    found = [config.run.dir, config.data.path, config.run.resume, config.data.tokenizer]
    parser = Parser("test", None)
    parser.add_argument("run", type=Path)
    found += [parser.parse_args(["~/h"]).run]
    names = ("a", "b/*.txt", "d", "e", "h")
    assert list(map(str, found)) == [f"{tmp_path}/{name}" for name in names]


# The words of a command line, and what their error says.
WRONG = [
    # Keys.
    ("--zzz 1", "unknown key zzz on the command line; --help lists every key"),
    ("--train.micro_batchsize 1", "on the command line; did you mean train.micro_batch_size?"),
    ("--learning_rate 1", "did you mean optim.lr?"),
    ("--precision.strategy 1", "did you mean parallel.strategy?"),
    ("--OPTIM.LR 1", "did you mean optim.lr?"),
    ("--optim.lr.max 1 --optim.lr 1", "unknown key optim.lr.max"),
    ("--train 5", "unknown key train"),
    ("--nproc-per-node 4", "option of torchrun and of dist_amp launch"),
    ("--task.target tiny:NeedsName", "task.args.name is required and not set; add --task.args.n"),
    ("--task.args 5 --task.target tiny:Tiny", "unknown key task.args"),
    ("--data.sources.wiki.revision v2", "data.sources.wiki.revision on the command line is no lo"),
    # Words that belong to none.
    ("optim_lr 1", "'optim_lr' on the command line belongs to no key; write --section.key"),
    ("--config", "--config names no file; give the path of a TOML file"),
    ("--config dmeo", "neither a file here nor a shipped config; give the path of a TOML file"),
    ("--config missing.toml", "missing.toml: No such file or directory; give the path of a TOML"),
    # Types, choices and ranges.
    ("--train.steps=", "train.steps=(nothing) on the command line must be a valid integer"),
    ("--train.steps 1e3", "train.steps=1e3 on the command line must be a valid integer"),
    ("--eval.every of", "must be a valid integer or 'off'; did you mean off?"),
    ("--precision.dtype bfloat16", "'auto', 'bf16', 'fp16' or 'fp8'; did you mean bf16?"),
    ("--optim.betas 0.9", "must be more values"),
    ("--optim.betas 1.0 0.9", "must be less than 1"),
    ("--train.steps 0", "must be greater than or equal to 1"),
    ("--parallel.activation_checkpointing 0", "or equal to 1 or 'none', 'full' or 'selective'"),
    ("--optim.lr inf", "must be a finite number"),
    ("--eval.every 0", "must be greater than or equal to 1 or 'off'"),
]


@pytest.mark.bad_input("a key that is unknown, misspelt, of another library or without its dashes")
@pytest.mark.bad_input("a launcher's option for the main job (`--nproc-per-node`)")
@pytest.mark.bad_input("a required key that is missing; a choice that is misspelt")
@pytest.mark.bad_input("a value of a wrong type or out of range (lr, steps, betas, ratios)")
@pytest.mark.parametrize(("words", "said"), WRONG)
def test_a_wrong_command_line_names_the_key_the_value_and_the_rule(words, said, capsys):
    message = refusal(*words.split())
    assert said in message
    assert main(words.split()) == 64
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.bad_input("a config file that is not TOML, or has a number in quotes, or a key twice")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optim]\nlrr = 1", "unknown key optim.lrr in {}; did you mean optim.lr?"),
        ("[optim]\nlr = true", "optim.lr=true in {} must be a valid number"),
        ("[precision]\nscaler = 1", "unknown key precision.scaler in {}"),
        ('[train]\nsteps = "2"', 'steps="2" in {} must be a valid integer'),
        ('optim.betas = ["0.9", 0.5]', 'betas=["0.9", 0.5] in {} must be a valid number'),
        ("[optim]\nlr = 1\n[optim]\neps = 1\n", "line 3"),
        ("\udcff", "{} is not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_the_key_and_value(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text, errors="surrogateescape")
    assert said.format(path) in refusal("--config", path)


def test_a_wrong_variable_of_the_environment_is_named_and_the_launchers_are_no_settings():
    said = "unknown key train.step in the environment as DIST_AMP_TRAIN__STEP; did you mean train."
    assert said in refusal(DIST_AMP_TRAIN__STEP="1")
    message = refusal(DIST_AMP_RUN__SEED="x")
    assert message == "run.seed=x in the environment as DIST_AMP_RUN__SEED must be a valid integer"
    names = ("PYTHON", "LAUNCHER", "CACHE", "METADATA", "FAILED_AT", "NNODES")
    assert load(**{f"DIST_AMP_{name}": "1" for name in names}) == load()


@pytest.mark.bad_input("a setting of an earlier release")
def test_a_removed_setting_is_rejected_with_what_to_do_now():
    for key, what_to_do in REMOVED.items():
        message = f"{key} on the command line is no longer a setting: {what_to_do}"
        assert refusal(f"--{key}", "1") == message
    assert not REMOVED.keys() & values(load()).keys()


def test_a_runs_own_config_of_an_earlier_release_is_read(tmp_path, monkeypatch, capsys):
    text = '[train]\nsteps = 7\ngc_every = 10\n[checkpoint]\non_failure = "stop"\n'
    path = written(tmp_path, text, "config.toml")
    monkeypatch.chdir(tmp_path)
    for config in (load("--config", path), load("--config", "config.toml")):
        assert (config.train.steps, config.checkpoint) == (7, CheckpointConfig())
    left_out = [line for line in capsys.readouterr().err.splitlines() if "gc_every" in line]
    path.write_text('[precision]\ndtype = "bf16"\nmatmul = "fp8"\n')
    assert load("--config", path).precision.dtype == "fp8"
    said = f"is no longer a setting: {REMOVED['train.gc_every']}"
    assert left_out == [f"note: train.gc_every in {name} {said}" for name in (path, "config.toml")]
    assert f"train.gc_every in {tmp_path}/mine.toml" in refusal("--config", written(tmp_path, text))


@pytest.mark.bad_input("batch sizes that do not multiply out")
def test_accumulation_and_global_batch_size_determine_one_another_or_are_refused():
    def steps(world_size=4, **settings):
        return accumulation_steps(TrainConfig(micro_batch_size=8, **settings), world_size)

    assert steps() == 1
    assert steps(accumulation_steps=3) == steps(global_batch_size=96) == 3
    assert steps(global_batch_size=96, accumulation_steps=3) == 3
    said = "not a multiple of micro_batch_size 8 x world size 1 = 8; use global_batch_size=16"
    assert said in message_of(64, steps, 1, global_batch_size=20)
    assert message_of(64, steps, 8, global_batch_size=512, accumulation_steps=3) == (
        "train.global_batch_size=512 is not micro_batch_size 8 x world size 8 x accumulation_steps "
        "3 = 192; use accumulation_steps=8"
    )


@pytest.mark.bad_input("a `cast_by` that does not go with the strategy")
def test_a_cast_by_the_policy_of_what_is_not_sharded_is_refused():
    message = message_of(64, build_precision, PrecisionConfig(cast_by="policy"), False, World())
    assert "precision.cast_by=policy needs parallel.strategy fsdp or" in message


@pytest.mark.bad_input("an empty run.dir")
def test_a_run_dir_is_by_default_the_time_and_launch_and_an_empty_one_is_refused():
    assert re.fullmatch(r"runs/\d{8}T\d{6}Z-[0-9a-f]{6}", str(run_folder(load().run, World())))
    message = message_of(64, run_folder, load("--run.dir", "").run, World())
    assert "run.dir is empty; give a folder's path, or auto" in message


class Shape(Enum):
    ROUND = 1
    SQUARE = 2


class OddTypes(Tiny):
    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        shape: Shape = Shape.ROUND,
        sizes: dict[str, int] | None = None,
        **more,
    ):
        super().__init__()


@pytest.mark.bad_input("a task argument of a type that no setting can have, or that **kwargs takes")
def test_an_argument_whose_type_no_setting_can_have_is_refused_and_the_others_work(capsys):
    task = ["--task.target", "test_config:OddTypes"]
    said = "task.args.dtype=torch.half on the command line must be left out, as no setting can have"
    assert said in refusal(*task, "--task.args.dtype=torch.half")
    assert "; the task takes dtype, shape, sizes" in refusal(*task, "--task.args.more", 3)
    config = load(*task, "--task.args.shape", "2", "--task.args.sizes.big", "3")
    assert (config.task.args.shape, config.task.args.sizes) == (Shape.SQUARE, {"big": 3})
    written = tomllib.loads(to_toml(config))["task"]["args"]
    assert written == {"shape": 2, "sizes": {"big": 3}}
    assert main([*task, "--help", "task.args"]) == 0
    assert "--task.args.dtype" in capsys.readouterr().out
