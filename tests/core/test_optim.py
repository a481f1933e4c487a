"""What a task brings to the update: its optimizer, parameter groups and schedule; the built-in
schedules.
"""

import math
from itertools import chain

import pytest
import torch
from messages import message_of
from optimizer_runs import LAYOUTS, MAKERS, Counter, Own, given_gradients, words
from ranks import on_ranks
from tiny import Tiny, log_row, make_run, parameters_of, take_steps, variant
from torch.optim import SGD

from dist_amp.errors import ConfigError
from dist_amp.optim import build_optimizer, learning_rate
from dist_amp.optimizers.groups import GroupRates
from dist_amp.optimizers.sgd import FusedSGD
from dist_amp.precision import takes_grad_scale
from dist_amp.settings import OptimConfig
from dist_amp.step import train_step
from dist_amp.world import World, local

# ---- a task's own optimizer


def are_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def all_of(run):
    """Parameters, counters, and this rank's part of the optimizer's state."""
    values = [value for p in run.parallel.parameters for value in run.optimizer.state[p].values()]
    parts = [local(torch.as_tensor(value)) for value in values]
    # Of 8-bit moments the codes and scales.
    moments = [[part.codes, part.scale] if hasattr(part, "codes") else [part] for part in parts]
    return [*parameters_of(run).values(), run.schedule.counters, *chain(*moments)]


def skipped_and_resumed(world, folder, strategy, kind):
    """Whether runs that are resumed after a skipped step and later continue bit for bit.

    The first step's gradients are infinite on the last rank alone.
    """
    # 8 bits: it quantises moments of 4,096 elements and more, on each rank.
    task = Own(kind, bad=(world.world_size - 1,), width=96 if "8bit" in kind else 8)
    small = words(
        folder, strategy, "--precision.dtype", "fp16", "--precision.scaler.init_scale", 64
    )
    run = make_run(world, task, *small)
    start = parameters_of(run)
    assert not take_steps(run, 1)[0].applied
    assert are_equal(start.values(), parameters_of(run).values())
    assert run.schedule.counters.tolist() == [0, 1, 1]
    others = []
    for _ in range(2):
        run.saver.save(wait=False)  # in the background, where the state can be copied
        run.saver.finish()
        others.append(make_run(world, task, *small, "--run.resume", "auto"))
        assert others[-1].step == run.step
        assert all(report.applied for one in (run, *others) for report in take_steps(one, 2))
    assert not torch.equal(start["1.0.weight"], parameters_of(run)["1.0.weight"])
    return all(are_equal(all_of(run), all_of(other)) for other in others)


def cell(kind, ranks, strategy):
    # .ci/run installs torchao with the engines.
    marks = [pytest.mark.engine] if kind == "adamw_8bit" else []
    if (kind, strategy) not in [("lion", "ddp"), ("muon", "fsdp"), ("adafactor", "fsdp")]:
        marks.append(pytest.mark.slow)
    return pytest.param(kind, ranks, strategy, marks=marks)


# Two of torch's do not work on sharded parameters: Rprop's masked assignment, fused SGD's kernel.
UNSHARDED = {("rprop", "fsdp"), ("fused sgd", "fsdp")}
CELLS = [
    cell(kind, *layout)
    for kind in MAKERS
    for layout in LAYOUTS
    if (kind, layout[1]) not in UNSHARDED
]


@pytest.mark.parametrize(("kind", "ranks", "strategy"), CELLS)
def test_an_optimizer_of_the_tasks_skips_on_all_ranks_and_resumes_bit_for_bit(
    tmp_path, kind, ranks, strategy
):
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
    assert all(on_ranks(ranks, skipped_and_resumed, tmp_path, strategy, kind))


def test_an_8bit_optimizer_is_compiled_without_the_cache_with_which_it_is_wrong():
    """torch reads a compiled step of quantised moments wrongly from its AOTAutograd cache."""
    pytest.importorskip("torchao")
    import torch._functorch.config as functorch

    with functorch.patch(enable_autograd_cache=True):
        for kind, is_used in (("lion", True), ("adamw_8bit", False)):
            make_run(World(), Own(kind), *words("unused", "single"))
            assert functorch.enable_autograd_cache is is_used


def after_five_steps(world, strategy):
    small = ["--use_amp", "false", "--train.global_batch_size", 8]
    run = make_run(world, Own("adafactor"), *words("unused", strategy, *small))
    take_steps(run, 5)
    return parameters_of(run)


def test_shards_take_the_steps_of_one_process_with_an_optimizer_for_whole_tensors():
    sharded, alone = on_ranks(2, after_five_steps, "fsdp")[0], after_five_steps(World(), "single")
    # float32 sums in another order, over five steps
    torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.bad_input("a task's optimizer that can't unscale and skip in its kernel")
def test_an_optimizer_that_cannot_skip_by_itself_takes_the_textbook_path_and_says_so_once(capsys):
    run = make_run(World(), Own("lion"))
    line = "optimizer Lion: gradients are unscaled and clipped before its step, with two host"
    assert capsys.readouterr().out.count(line) == 1
    take_steps(run, 1)  # the first step checks that every parameter has a gradient
    batch = next(run.data)
    with Counter("_local_scalar_dense") as counter:
        train_step(run, batch)
    assert counter.count == 1  # by item(); reading the learning rate is another

    class OwnStep(torch.optim.AdamW):
        """A subclass of a fused class, whose step knows nothing of grad_scale and found_inf."""

        def step(self, closure=None):
            pass

    task = variant(optimizer=lambda groups, lr: OwnStep(groups, lr=lr, fused=True))
    assert not takes_grad_scale(build_optimizer(task.build_model(), OptimConfig(), task))


def test_a_rate_that_an_optimizer_keeps_in_a_tensor_is_filled_in_place():
    """As torchao's, whose compiled step reads that tensor."""
    run = make_run(World(), variant(optimizer=lambda groups, lr: SGD(groups, lr=torch.tensor(lr))))
    rates = [group["lr"] for group in run.optimizer.param_groups]
    take_steps(run, 2)
    assert [id(group["lr"]) for group in run.optimizer.param_groups] == [*map(id, rates)]
    assert rates == [run.schedule.lr] * 2


# ---- SGD


@pytest.mark.bad_input(
    "`optim.name=sgd` with half-precision parameters on a CPU, which torch's fused kernel leaves "
    "as they are"
)
@pytest.mark.bad_input("a task's SGD with `fused=True` of such parameters")
def test_sgd_in_half_precision_on_a_cpu_takes_the_path_that_works():
    model = Tiny().build_model()
    assert type(build_optimizer(model, OptimConfig(name="sgd"))) is FusedSGD
    said = []
    optimizer = build_optimizer(model.bfloat16(), OptimConfig(name="sgd", lr=0.5), say=said.append)
    assert type(optimizer) is SGD
    assert not takes_grad_scale(optimizer)
    assert len(said) == 1
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
    task = variant(optimizer=lambda groups, lr: SGD(groups, lr=lr, fused=True))
    with pytest.raises(ConfigError, match="SGD has fused=True, which on a CPU silently leaves"):
        build_optimizer(model, OptimConfig(), task)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_fused_sgd_takes_torchs_steps_bit_for_bit_also_without_some_gradients(momentum):
    ours, reference = Tiny().build_model(), Tiny().build_model()
    reference.load_state_dict(ours.state_dict())
    config = OptimConfig(name="sgd", lr=0.1, momentum=momentum, weight_decay=0.0)
    mine = build_optimizer(ours, config)
    torchs = SGD(reference.parameters(), lr=0.1, momentum=momentum, fused=True)
    for step in range(5):
        for model, optimizer in ((ours, mine), (reference, torchs)):
            given_gradients(model, step)
            if step in (1, 2):
                model[0][0].weight.grad = None
            optimizer.step()
        assert are_equal(ours.parameters(), reference.parameters())


# ---- a task's own parameter groups


class Grouped(Tiny):
    """Rates of its layers, which its schedule and its evaluations lower."""

    def groups(self, model):
        second = {"name": "layer 1", "params": ["1.0.weight", "1.0.bias"], "lr_scale": 0.5}
        return [
            {"name": "layer 0", "params": "0.*", "lr_scale": 0.25},
            {**second, "weight_decay": 0.0},
            {"params": model[2].parameters()},
        ]

    def schedule(self, step):
        return [1.0, 0.5, 0.25][step // 2] if step < 6 else 0.0

    def on_evaluation(self, run, values):
        run.schedule.factor *= 0.3


def test_groups_take_names_patterns_and_parameters_fill_in_defaults_and_are_printed_and_logged(
    capsys,
):
    run = make_run(World(), Grouped())
    groups = run.optimizer.param_groups
    assert [(g["name"], len(g["params"]), g["lr_scale"], g["weight_decay"]) for g in groups] == [
        ("layer 0", 2, 0.25, 0.1),
        ("layer 1", 2, 0.5, 0.0),
        ("group 2", 2, 1.0, 0.1),
    ]
    with Counter("_local_scalar_dense") as counter:
        run.schedule.step(torch.tensor(True))
    assert counter.count == 0, "host reads"
    assert all(isinstance(group["lr"], torch.Tensor) for group in groups)
    said = capsys.readouterr().out
    assert "optimizer AdamW, layer 0 (2 tensors): lr_scale 0.25, weight_decay 0.1, " in said
    assert said.count("betas (0.9, 0.95)") == 3
    assert "; group 2 (2 tensors): lr_scale 1.0, weight_decay 0.1, " in said
    assert "foreach" not in said, "what is not set is left out"
    row = log_row(run)
    tags = {"train/lr_layer 0": 0.25, "train/lr_layer 1": 0.5, "train/lr_group 2": 1.0}
    assert GroupRates(run).tags(row) == {tag: scale * row["lr"] for tag, scale in tags.items()}
    assert GroupRates(make_run(World(), Tiny())).tags(row) == {}


def without_the_first(groups, lr):
    groups[0]["params"] = groups[0]["params"][1:]
    return SGD(groups, lr=lr)


def grouped(*groups):
    return variant(groups=lambda model: groups)


REST = {"name": "rest", "params": ["1.*", "2.*"]}
FIRST = {"name": "first", "params": ["0.*", "1.0.bias"]}
REFUSED = [
    (variant(optimizer=without_the_first), "other groups or parameters than it was given; build"),
    (variant(optimizer=lambda g, lr: SGD(g, rate=lr)), "optimizer(groups, lr) failed: TypeError"),
    (variant(groups=lambda model: None), "groups(model) failed: TypeError: 'NoneType' object"),
    (grouped(REST), "left out 2 parameters, such as 0.0.weight; put each trained"),
    (grouped(REST, FIRST), "1.0.bias into rest and first; k"),
    (grouped(REST, {"params": "layers.0.*"}), "'layers.0.*', which matches no trained parameter"),
    (grouped({"params": torch.nn.Linear(1, 1)}), "a Linear, which matches no trained parameter"),
    (grouped({"params": "*", "lr": 0.1}), "has the key 'lr', which AdamW does not read; it takes"),
    (grouped({"params": "*", "lr_scale": -1}), "has lr_scale=-1; give a number, 0 or more"),
    (grouped({"params": "*", "weight_decay": math.inf}), "weight_decay=inf; give a number, 0 or"),
    (grouped({"param": "*"}), "as a group; make it a dict with"),
]


@pytest.mark.bad_input("a task's `optimizer(groups, lr)` that returns one without all parameters")
@pytest.mark.bad_input(
    "a task's `groups(model)` that miss or repeat a parameter, match none, or are malformed"
)
@pytest.mark.bad_input("a key in a task's group that neither the template nor the optimizer reads")
@pytest.mark.parametrize(("task", "said"), REFUSED)
def test_an_optimizer_or_groups_that_would_train_something_else_are_refused(task, said):
    assert said in message_of(64, make_run, World(), task)


# ---- schedules


def rates_and_end(world, folder, strategy, name):
    """The rates of six steps and of their groups, through and resumed; the ends."""
    found = []
    for cut in (None, 4):
        settings = words(folder / str(cut), strategy, "--eval.every", 2, "--optim.name", name)
        settings += ["--optim.warmup_steps", 5, "--run.resume", "auto"]
        run = make_run(world, Grouped(), *settings)
        rates = []
        while run.step < 6:
            scaled = [float(group["lr"]) for group in run.optimizer.param_groups]
            take_steps(run, 1)
            rates += [*scaled, log_row(run)["lr"]]
            if run.step % 2 == 0:
                run.evaluate()
            if run.step == cut:
                run.save()
                run = make_run(world, Grouped(), *settings)
        found.append((rates, parameters_of(run), run.schedule.factor))
    assert f"'{name} layer 0': 2" in message_of(65, make_run, world, Tiny(), *settings)
    return found


@pytest.mark.parametrize(
    ("ranks", "strategy", "name"), [(1, "single", "sgd"), (2, "fsdp", "adamw")]
)
def test_a_rate_is_that_of_the_tasks_schedule_times_its_factor_and_the_groups_also_resumed(
    tmp_path, ranks, strategy, name
):
    for through, resumed in on_ranks(ranks, rates_and_end, tmp_path, strategy, name):
        factors = (1, 1, 0.5 * 0.3, 0.5 * 0.3, 0.25 * 0.09, 0.25 * 0.09)
        expected = [0.01 * factor * scale for factor in factors for scale in (0.25, 0.5, 1, 1)]
        assert through[0] == pytest.approx(expected, rel=1e-6)
        assert resumed[0] == through[0]
        assert resumed[2] == through[2] == pytest.approx(0.027)
        assert are_equal(through[1].values(), resumed[1].values())


@pytest.mark.bad_input("a `run.schedule.factor` that is no number from 0 on")
def test_a_factor_that_is_no_rate_is_refused_and_one_of_a_checkpoint_is_said_at_the_resume(
    tmp_path, capsys
):
    for factor, said in ((1.0, False), (0.5, True)):
        settings = words(tmp_path / str(factor), "single", "--run.resume", "auto")
        run = make_run(World(), Tiny(), *settings)
        run.schedule.factor = factor
        run.save()
        run = make_run(World(), Tiny(), *settings)
        assert ("lr     times 0.5, as set before" in capsys.readouterr().out) == said
    for factor in (-0.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"run\.schedule\.factor=.* must be a finite numb"):
            run.schedule.factor = factor
    assert run.schedule.factor == 0.5


@pytest.mark.bad_input("a task's `schedule(step)` that returns no number from 0 on")
@pytest.mark.bad_input("a task's `groups`, `optimizer` or `schedule` that raises")
@pytest.mark.parametrize(
    ("at_7", "said"),
    [
        (-0.1, "schedule(7) returned -0.1; return a number, 0 or more"),
        (math.inf, "schedule(7) returned inf; return a number, 0 or more"),
        (None, "schedule(7) failed: TypeError"),
        (1.0, "schedule(9) failed: ZeroDivisionError: division by zero (test_optim.py, "),
    ],
)
def test_a_schedule_that_fails_or_gives_no_factor_is_refused_at_the_start(at_7, said):
    task = variant(schedule=lambda step: at_7 if step == 7 else 1 / (9 - step))
    assert said in message_of(64, make_run, World(), task, "--train.steps", 10)


def rates(schedule, warmup_steps, min_lr_ratio=0.1):
    """The learning rates of 20 steps with a peak of 2, and after them."""
    options = {"schedule": schedule, "warmup_steps": warmup_steps, "min_lr_ratio": min_lr_ratio}
    config = OptimConfig(lr=2.0, **options)
    return [learning_rate(config, step, 20) for step in range(21)]


@pytest.mark.parametrize(
    ("schedule", "remaining"),
    [
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        ("wsd", [1, 1, 1, 1, 0]),
        ("constant", [1] * 5),
    ],
)
def test_a_schedule_warms_up_and_falls_to_its_floor(schedule, remaining):
    found = rates(schedule, 4)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert found[4::4] == pytest.approx([2 * (0.1 + 0.9 * share) for share in remaining])
    assert found[4:] == sorted(found[4:], reverse=True)


def test_wsd_decays_linearly_in_the_last_fifth_of_the_steps_or_once_it_has_warmed_up():
    assert rates("wsd", 3)[16:] == pytest.approx([2 - 1.8 * step / 4 for step in range(5)])
    late = rates("wsd", 18, min_lr_ratio=0.0)
    assert (late[18], late[20]) == (2.0, 0.0)
