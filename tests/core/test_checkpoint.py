"""A resumed run goes on as if it had never stopped, or names what differs from the checkpoint's."""

from itertools import product

import pytest
import torch
from messages import message_of
from ranks import on_ranks
from test_script_run import same
from tiny import Changed, Overflow, Tiny, log_row, make_run, save, state_of, take_steps, variant
from torch import nn

from dist_amp.checkpoint.compatibility import dataset_hash
from dist_amp.world import World

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp")]
ELASTIC = ["--train.global_batch_size", 12, "--train.micro_batch_size", 1]
ELASTIC += ["--train.accumulation_steps", "auto"]


class Dropped(Tiny):
    """Draws random numbers in every forward, so that a lost generator shows."""

    norm = nn.Identity

    def build_model(self):
        layers = nn.Linear(8, 16), self.norm(), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 1)
        return nn.Sequential(*layers)


class Normed(Dropped):
    """Has batch statistics, which differ between ranks."""

    def norm(self):
        return nn.BatchNorm1d(16)


class SomeLayers(nn.Sequential):
    def forward(self, x):
        for layer in self[:-1]:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return self[-1](x)


class DropsLayers(Tiny):
    """Random numbers choose its layers, and so the order in which gradients are ready."""

    def build_model(self):
        return SomeLayers(*Tiny(depth=5).build_model())


def settings(folder, strategy, dtype, *more):
    words = ["--parallel.strategy", strategy, "--run.dir", str(folder), "--train.steps", 10]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 2]
    words += ["--optim.warmup_steps", 3, "--precision.scaler.growth_interval", 2]
    words += ["--use_amp", "false"] if dtype == "fp32" else ["--precision.dtype", dtype]
    return [*words, *more]


def steps_of(run, count):
    """The world's loss in each of so many steps, and over each three; the samples of each."""
    losses, samples = [], []
    for _ in range(count):
        start = run.data.position
        (report,) = take_steps(run, 1)
        run.metrics.after_step(report)
        losses.append((run.world.sum(report.loss_sum) / report.weight).item())
        if run.step % 3 == 0:
            losses.append(log_row(run).loss)
        mine = [index for _, indices in run.data.at(start) for index in indices]
        samples.append(sorted(index for indices in run.world.gather(mine) for index in indices))
    return losses, samples


def facts_of(run):
    """What a run has after four steps, in the next ones, and then."""
    seed, state = torch.initial_seed(), state_of(run)
    return seed, state, *steps_of(run, 4), state_of(run)


def saved_or_resumed(world, strategy, folder, dtype, is_same):
    """The facts of a run that is saved after four steps, and of the next one in its folder."""
    task, more = Tiny, ELASTIC
    if is_same:
        task, more = Dropped if strategy in ("fsdp", "hsdp") else Normed, []
    if (world.world_size, strategy) == (3, "ddp"):
        # Not two ranks, since DDP divides by the number of ranks in two ways, which differ unless
        # it is a power of two.
        task = DropsLayers
    words = settings(folder, strategy, dtype, *more, "--run.deterministic", "true")
    words += ["--data.workers", 2 if dtype == "bf16" else 0, "--run.resume", "auto"]
    run = make_run(world, task(samples=60), *words)
    if run.resumed_from_step is None:
        steps_of(run, 4)  # into the midst of a log interval
        save(run)
    assert run.step == 4
    facts = facts_of(run)
    run.data.close()
    torch.use_deterministic_algorithms(False)
    return facts


SHARDED = (2, "fsdp")
# (who saves, who resumes, dtype): each strategy and dtype at least once; the whole product is slow.
ALWAYS = {
    *(((1, "single"), (1, "single"), "fp32"), ((2, "ddp"), (2, "ddp"), "fp16")),
    *((SHARDED, SHARDED, "bf16"), ((4, "hsdp"), (4, "hsdp"), "fp16")),
    *((SHARDED, reader, "fp32") for reader in LAYOUTS if reader != SHARDED),
    *(((1, "single"), SHARDED, "fp32"), ((3, "ddp"), (3, "ddp"), "fp32")),
}
WHOLE = ALWAYS | {*product(LAYOUTS, LAYOUTS, ["fp32"])}
WHOLE |= {(layout, layout, dtype) for layout in LAYOUTS for dtype in ("bf16", "fp16")}


@pytest.mark.parametrize(
    ("saver", "reader", "dtype"),
    [pytest.param(*row, marks=[] if row in ALWAYS else pytest.mark.slow) for row in sorted(WHOLE)],
    ids=lambda value: value if isinstance(value, str) else f"{value[1]}{value[0]}",
)
def test_a_resumed_run_is_bit_identical_and_on_another_layout_goes_on_with_the_same_samples(
    tmp_path, saver, reader, dtype
):
    is_same = saver == reader
    saved = on_ranks(saver[0], saved_or_resumed, saver[1], tmp_path, dtype, is_same)
    resumed = on_ranks(reader[0], saved_or_resumed, reader[1], tmp_path, dtype, is_same)
    if is_same:
        for own, before in zip(resumed, saved, strict=True):
            assert same(list(own), list(before))
        return
    seed, state, losses, samples, _ = saved[0]
    if reader[0] != saver[0]:
        seeds = {seed, *(own[0] for own in resumed)}
        assert len(seeds) == 1 + reader[0], "each rank draws numbers that the start has not drawn"
    for _, own_state, own_losses, own_samples, _ in resumed:
        assert all(map(torch.equal, own_state, state))
        assert own_losses == pytest.approx(losses, rel=1e-5), "the same sums in other orders"
        assert own_samples == samples


def statistics_of(run):
    buffers = dict(run.parallel.module.named_buffers())
    return torch.cat([buffers["1.running_mean"], buffers["1.running_var"]]).clone()


def statistics_after_a_save_and_in_an_evaluation(world, folder):
    run = make_run(world, Normed(), *settings(folder, "fsdp", "bf16"))
    assert run.precision.cast_by == "autocast", "the policy would not cast the statistics"
    assert all(report.applied for report in take_steps(run, 2))
    save(run)
    own = statistics_of(run)
    with run.parallel.evaluating():
        return own, statistics_of(run)


def test_checkpoints_and_evaluations_have_the_average_of_the_ranks_batch_statistics(tmp_path):
    own, averaged = zip(
        *on_ranks(2, statistics_after_a_save_and_in_an_evaluation, tmp_path), strict=True
    )
    words = ["--run.resume", "auto", "--train.accumulation_steps", 4]
    alone = make_run(World(), Normed(), *settings(tmp_path, "single", "bf16"), *words)
    assert not torch.equal(*own)
    # A float32 sum of two, and half of it.
    torch.testing.assert_close(averaged[0], torch.stack(own).mean(0), atol=1e-6, rtol=0)
    assert all(torch.equal(average, statistics_of(alone)) for average in averaged)


@pytest.mark.bad_input("an explicit resume path that is missing or not a checkpoint")
@pytest.mark.bad_input("resume=auto without any checkpoint")
@pytest.mark.bad_input("`run.resume` set to an older checkpoint of the same folder")
def test_resume_takes_a_checkpoint_or_a_run_and_refuses_what_is_neither_or_is_older(tmp_path):
    def resumed(folder, path):
        return make_run(World(), Tiny(), *settings(folder, "single", "fp32", "--run.resume", path))

    first, new = tmp_path / "first", tmp_path / "new"
    run = resumed(first, "auto")
    take_steps(run, 1)
    older = save(run)
    take_steps(run, 1)
    newer = save(run)
    for path, step in ((older, 1), (newer, 2), (first, 2), ("auto", 0)):
        assert resumed(new, path).step == step
    assert not new.exists()
    (tmp_path / "empty").mkdir()
    refused = [(tmp_path / "nowhere", "nowhere does not exist")]
    refused += [(tmp_path / "empty", "empty is not a checkpoint")]
    refused += [(older, "is older than step_00000002 next to it; resume it in a new --run.dir")]
    for path, said in refused:
        assert said in message_of(65, resumed, first if path == older else new, path)
    run = resumed(new, older)
    take_steps(run, 3)
    save(run)
    assert resumed(new, older).step == 4, "the same command, started again"


@pytest.mark.parametrize(
    "optimizer", [["adamw", "--optim.fused", "false"], ["sgd", "--optim.momentum", 0]]
)
def test_saving_before_a_step_was_applied_changes_nothing(tmp_path, optimizer):
    words = ["--run.dir", tmp_path, "--data.shuffle", "false", "--use_amp", "false"]
    words += ["--optim.name", *optimizer]
    runs = [make_run(World(), Overflow(bad=(0,)), *words) for _ in range(2)]
    for run, saves in zip(runs, (True, False), strict=True):
        take_steps(run, 1)  # skipped
        if saves:
            save(run)
        take_steps(run, 2)
    assert same(*map(state_of, runs))
    assert make_run(World(), Overflow(bad=(0,)), *words, "--run.resume", "auto").step == 1


# ---- what a checkpoint fits

ALLOW = "--run.allow_config_change true"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Settings of a run whose checkpoint of step 2 lies in its folder, to be resumed."""
    words = settings(tmp_path_factory.mktemp("run"), "single", "bf16", "--optim.lr", 1e-3)
    run = make_run(World(), Tiny(), *words)
    take_steps(run, 2)
    save(run)
    return [*words, "--run.resume", "auto"]


def first_layer(width, bias=True):
    return lambda model: model[0].__setitem__(0, nn.Linear(8, width, bias=bias))


LAYER = Changed(lambda model: model.append(nn.Linear(1, 1, bias=False)))
FEWER, WIDER = Changed(first_layer(8, bias=False)), Changed(first_layer(16))
GROUPS = "{'adamw matrices': 3, 'adamw vectors': 3}, here {'sgd matrices': 3, 'sgd vectors': 3}"
REFUSED = [  # (exit status, settings, task, what is said)
    (64, "--optim.lr 3e-3", Tiny(), "optim.lr=0.001, now 0.003:"),
    (64, "--optim.schedule linear --data.shuffle false", Tiny(), "now False; optim.sch"),
    (64, "--precision.dtype fp16", Tiny(), "precision.dtype=bf16, now fp16: use"),
    (64, "--task.args.depth 3 --task.target tiny:Tiny", Tiny(), "depth=2, now 3"),
    (64, "--train.accumulation_steps 3", Tiny(), "train.global_batch_size=4, now 6: use the old"),
    (64, "--run.seed 5", Tiny(), "run.seed=0, now 5: use the old values, or"),
    (65, "", Tiny(samples=65), "now there are 65 of"),
    (65, "", Tiny(seed=1), "made with 64 samples of fingerprint "),
    (65, ALLOW, LAYER, "model.3.weight is missing there and [1, 1] torch.float32 here"),
    (65, ALLOW, FEWER, "model.0.0.bias is [8] torch.float32 there and missing here"),
    (65, ALLOW, WIDER, "model.0.0.weight is [8, 8] torch.float32 there and [16, 8] torch.flo"),
    (65, f"--optim.name sgd {ALLOW}", Tiny(), GROUPS),
]


@pytest.mark.bad_input("run folder of another config, or another global batch on resume")
@pytest.mark.bad_input("dataset fingerprint, length or seed changed")
@pytest.mark.bad_input("a parameter that is missing, extra, or of another shape or dtype")
@pytest.mark.bad_input("another optimizer or other parameter groups")
@pytest.mark.parametrize(("status", "more", "task", "said"), REFUSED)
def test_what_a_checkpoint_does_not_fit_is_refused_with_both_values_and_how_to_allow_it(
    words, status, more, task, said
):
    text = message_of(status, make_run, World(), task, *words, *more.split())
    assert said in text
    allows = text.endswith("continue anyway with --run.allow_config_change true")
    assert allows == (ALLOW not in more), "tensors must fit, whatever is allowed"


def test_another_training_on_other_data_is_resumed_with_a_warning_if_it_is_allowed(words, capsys):
    more = ["--optim.lr", 3e-3, "--train.accumulation_steps", 3, "--precision.dtype", "fp16"]
    run = make_run(World(), Tiny(seed=1), *words, *more, *ALLOW.split())
    assert (run.step, run.data.position) == (2, 8)
    said = capsys.readouterr().err
    assert "was made with optim.lr=0.001, now 0.003" in said
    assert "resuming after as many samples of the new data" in said
    assert run.scaler.scale_tensor.item() == run.config.precision.scaler.init_scale


def test_what_does_not_change_the_mathematics_may_change(words, capsys):
    more = "--data.workers 1 --metrics.log_every 3 --checkpoint.every 7 --debug.nonfinite off "
    more += "--train.micro_batch_size 4 --train.accumulation_steps 1 --optim.fused false "
    more += "--precision.scaler.init_scale 4 --run.deterministic false"
    run = make_run(World(), Tiny(), *words, *more.split())
    assert run.step == 2
    take_steps(run, 1)
    run.data.close()
    assert "another" not in capsys.readouterr().err


def test_more_steps_are_reported_under_a_schedule_but_not_the_tasks(words, capsys):
    said = "train.steps was 10 and is 20: from step 2 on, the learning rate follows the cosine"
    own_schedule = variant(schedule=lambda step: 1.0)
    for task in (Tiny(), own_schedule):
        assert make_run(World(), task, *words, "--train.steps", 20).step == 2
        assert (said in capsys.readouterr().err) == (task is not own_schedule)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows["x"][0, 0].copy_(torch.nextafter(rows["x"][0, 0], torch.tensor(9.0))),
        lambda rows: rows.update(x=rows["x"].bfloat16()),
        lambda rows: rows.update(t=["text"] * 64),
    ],
    ids=["a bit", "a dtype", "a column"],
)
def test_the_fingerprint_knows_values_types_and_columns(change):
    tasks = (Tiny(), Tiny(), Changed(columns=change))
    before, again, changed = (dataset_hash(make_run(World(), task).data) for task in tasks)
    assert before == again != changed


class Unreadable(Tiny.rows):
    def __getitem__(self, index):
        if index == 63:
            raise OSError("truncated")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_ends_no_save_and_the_fingerprint_draws_no_random_numbers(
    tmp_path,
):
    task = variant(rows=Unreadable)
    words = settings(tmp_path, "single", "fp32", "--data.shuffle", "false")
    run = make_run(World(), task, *words)
    take_steps(run, 1)
    before = torch.get_rng_state()
    save(run)
    assert torch.equal(torch.get_rng_state(), before)
    assert make_run(World(), task, *words, "--run.resume", "auto").step == 1


@pytest.mark.parametrize(("attempt", "step"), [("0", 0), ("1", 2)])
def test_what_torchrun_starts_again_goes_on_though_the_command_says_never(
    words, monkeypatch, attempt, step
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    assert make_run(World(), Tiny(), *words, "--run.resume", "never").step == step
