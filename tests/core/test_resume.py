"""A run resumes the same training, data, model and optimizer; else it names the difference."""

from dataclasses import replace

import pytest
import torch
from test_checkpoint import settings
from tiny import Rows, Tiny, make_run, save, take_steps
from torch import nn

from dist_amp import optim
from dist_amp.checkpoint.compatibility import check_config, dataset_hash
from dist_amp.errors import ConfigError, DataError
from dist_amp.world import World

ALLOW = ("--run.allow_config_change", "true")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Settings of a run whose checkpoint of step 2 lies in its folder, to be resumed."""
    words = settings(tmp_path_factory.mktemp("run"), "single", "bf16", "--optim.lr", 1e-3)
    run = make_run(World(), Tiny(), *words)
    take_steps(run, 2)
    save(run)
    return [*words, "--run.resume", "auto"]


def refused(kind, words, *more, task=None):
    with pytest.raises(kind) as error:
        make_run(World(), task or Tiny(), *words, *more)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == {ConfigError: 64, DataError: 65}[kind]
    return str(error.value)


@pytest.mark.bad_input("run folder of another config")
@pytest.mark.bad_input("another global batch on resume")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--optim.lr 3e-3", "optim.lr=0.001, now 0.003:"),
        ("--optim.schedule linear --data.shuffle false", "now False; optim.sch"),
        ("--data.drop_last true", "data.drop_last=False, now True:"),
        ("--precision.dtype fp16", "precision.dtype=bf16, now fp16: use"),
        ("--train.max_grad_norm 2.0", "train.max_grad_norm=1.0, now 2.0"),
        ("--task.args.depth 3 --task.target tiny:Tiny", "depth=2, now 3"),
        ("--train.accumulation_steps 3", "train.global_batch_size=4, now 6: use the old"),
        ("--run.seed 5", "run.seed=0, now 5: use the old values, or"),
    ],
)
def test_another_training_is_refused_with_the_difference_and_how_to_allow_it(words, more, said):
    text = refused(ConfigError, words, *more.split())
    assert said in text
    assert text.endswith("continue anyway with --run.allow_config_change true")


def test_another_training_is_resumed_with_a_warning_if_it_is_allowed(words, capsys):
    more = ["--optim.lr", 3e-3, "--train.accumulation_steps", 3]
    run = make_run(World(), Tiny(), *words, *more, *ALLOW)
    assert (run.step, run.data.position) == (2, 8)
    assert "was made with optim.lr=0.001, now 0.003" in capsys.readouterr().err


def test_a_bf16_checkpoint_that_is_continued_in_fp16_begins_with_the_first_loss_scale(words):
    run = make_run(World(), Tiny(), *words, "--precision.dtype", "fp16", *ALLOW)
    assert run.scaler.scale_tensor.item() == run.config.precision.scaler.init_scale


@pytest.mark.parametrize(
    "more",
    [
        "--data.workers 1 --metrics.log_every 3 --checkpoint.every 7 --debug.nonfinite off",
        "--train.micro_batch_size 4 --train.accumulation_steps 1 --optim.fused false "
        "--precision.scaler.init_scale 4 --run.deterministic false",
    ],
)
def test_what_does_not_change_the_mathematics_may_change(words, capsys, more):
    run = make_run(World(), Tiny(), *words, *more.split())
    assert run.step == 2
    take_steps(run, 1)
    run.data.close()
    assert "another" not in capsys.readouterr().err


class OwnSchedule(Tiny):
    def schedule(self, step):
        return 1.0


def test_more_steps_are_reported_under_a_schedule_but_not_the_tasks(words, capsys):
    said = "train.steps was 10 and is 20: from step 2 on, the learning rate follows the cosine"
    for task, reported in ((Tiny(), True), (OwnSchedule(), False)):
        assert make_run(World(), task, *words, "--train.steps", 20).step == 2
        assert (said in capsys.readouterr().err) == reported


@pytest.mark.bad_input("dataset fingerprint, length or seed changed")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Tiny(samples=65), r"now there are 65 of"),
        (Tiny(seed=1), r"made with 64 samples of fingerprint "),
    ],
)
def test_other_data_are_refused_with_length_and_fingerprint_of_both(words, task, said, capsys):
    assert said in refused(DataError, words, task=task)
    assert make_run(World(), task, *words, *ALLOW).step == 2
    assert "resuming after as many samples of the new data" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows["y"].copy_(rows["y"].flip(0)),
        lambda rows: rows["x"][0, 0].copy_(torch.nextafter(rows["x"][0, 0], torch.tensor(9.0))),
        lambda rows: rows.update(x=rows["x"].bfloat16()),
        lambda rows: rows.update(t=["text"] * 64),
    ],
    ids=["order", "a bit", "a dtype", "a column"],
)
def test_the_fingerprint_knows_values_types_and_order(change):
    class Columns(Tiny):
        def build_dataset(self, split):
            rows = super().build_dataset(split)
            change(rows.columns)
            return rows

    before, again, changed = (
        dataset_hash(make_run(World(), task).data) for task in (Tiny(), Tiny(), Columns())
    )
    assert before == again != changed


def test_the_fingerprint_draws_no_random_numbers(tmp_path):
    run = make_run(World(), Tiny(), *settings(tmp_path, "single", "fp32"))
    take_steps(run, 1)
    before = torch.get_rng_state()
    save(run)
    assert torch.equal(torch.get_rng_state(), before)


class Unreadable(Rows):
    def __getitem__(self, index):
        if index == 63:
            raise OSError("truncated")
        return super().__getitem__(index)


class Broken(Tiny):
    def build_dataset(self, split):
        return Unreadable(**super().build_dataset(split).columns)


def test_a_sample_that_cannot_be_read_ends_no_save(tmp_path):
    words = settings(tmp_path, "single", "fp32", "--data.shuffle", "false")
    run = make_run(World(), Broken(), *words)
    take_steps(run, 1)
    save(run)
    assert make_run(World(), Broken(), *words, "--run.resume", "auto").step == 1


class Wider(Tiny):
    def build_model(self):
        return nn.Sequential(super().build_model(), nn.Linear(1, 1))


class Bigger(Tiny):
    def __init__(self, width=8):
        super().__init__()
        self.width = width

    def build_model(self):
        model = super().build_model()
        model[0][0] = nn.Linear(8, self.width, bias=self.width != 8)
        return model


@pytest.mark.bad_input("a parameter that is missing, extra, or of another shape or dtype")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Wider(), "model.0.0.0.weight is missing there and [8, 8] torch.float32 here"),
        (Bigger(), "model.0.0.bias is [8] torch.float32 there and missing here (1 such)"),
        (Bigger(16), "model.0.0.weight is [8, 8] torch.float32 there and [16, 8] torch.float32"),
    ],
)
def test_another_model_is_refused_with_the_first_parameter_of_both(words, task, said):
    assert "does not fit this model: " + said in refused(DataError, words, task=task)


@pytest.mark.bad_input("another optimizer or other parameter groups")
def test_another_optimizer_is_refused_even_where_another_training_is_allowed(words, monkeypatch):
    text = refused(DataError, words, "--optim.name", "sgd", *ALLOW)
    there = "{'adamw matrices': 3, 'adamw vectors': 3}"
    assert f"{there}, here {{'sgd matrices': 3, 'sgd vectors': 3}}" in text

    def one_group(model, config):
        return [{"name": "all", "params": list(model.parameters()), "weight_decay": 0.0}]

    monkeypatch.setattr(optim, "parameter_groups", one_group)
    assert f"{there}, here {{'adamw all': 6}}" in refused(DataError, words)


@pytest.mark.parametrize(("attempt", "step"), [("0", 0), ("1", 2)])
def test_what_torchrun_starts_again_goes_on_though_the_command_says_never(
    words, monkeypatch, attempt, step
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    assert make_run(World(), Tiny(), *words, "--run.resume", "never").step == step


def test_a_setting_that_a_checkpoint_is_too_old_to_know_has_its_default(tmp_path):
    run = make_run(World(), Tiny(), "--run.dir", tmp_path, "--train.micro_batch_size", 2)
    config = save(run) / "config.toml"
    old = [line for line in config.read_text().splitlines() if not line.startswith("eps = ")]
    assert len(old) == len(config.read_text().splitlines()) - 1
    config.write_text("\n".join(old))
    check_config(config.parent, run.config, run.task, World())
    changed = replace(run.config, optim=replace(run.config.optim, eps=0.1))
    with pytest.raises(ConfigError, match="optim.eps=1e-08, now 0.1"):
        check_config(config.parent, changed, run.task, World())
