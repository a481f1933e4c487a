"""What a task brings to the update: its optimizer, parameter groups and schedule; Muon; the built-in schedules."""

import copy
import math

import pytest
import torch
from own_optimizers import MAKERS, Lion, Own
from ranks import on_ranks
from tiny import Tiny, log_row, make_run, moments_of, parameters_of, take_steps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.checkpoint.saver import Saver, save
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.fast.fused import FusedSGD, local, optimizer_class, takes_device_lr, takes_grad_scale
from dist_amp.optim import build_optimizer, learning_rate
from dist_amp.optimizers.muon import Muon
from dist_amp.settings import OptimConfig
from dist_amp.step import train_step
from dist_amp.verify.reference import RepeatableTask
from dist_amp.world import World

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp")]


def words(folder, strategy, *more):
    small = ["--train.steps", 10, "--train.micro_batch_size", 2, "--data.shuffle", "false", "--optim.lr", 0.01]
    return ["--parallel.strategy", strategy, "--run.dir", str(folder), *small, *more]


class Counter(TorchDispatchMode):
    """Counts the operations with this in their names."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.name in str(function)
        return function(*args, **(kwargs or {}))


# A task's own optimizer.


def all_of(run):
    """Parameters, counters, and this rank's part of the optimizer's state; of 8-bit moments the codes and scales."""
    values = [value for p in run.parallel.parameters for value in run.optimizer.state[p].values()]
    parts = [local(torch.as_tensor(value)) for value in values]
    inner = [[part.codes, part.scale] if hasattr(part, "codes") else [part] for part in parts]
    return [*parameters_of(run).values(), *(tensor for tensors in inner for tensor in tensors), run.schedule.counters]


def skipped_and_resumed(world, folder, strategy, kind, width):
    """Whether runs that are resumed before any applied step, after a skipped one and later go on bit for bit.

    The first step's gradients are infinite on the last rank alone.
    """
    words_ = words(folder, strategy, "--precision.dtype", "fp16", "--precision.scaler.init_scale", 64)

    def fresh(*more):
        return make_run(world, Own(kind, bad=(world.world_size - 1,), width=width), *words_, *more)

    def resumed():
        saver = Saver(run)
        saver.save(wait=False)  # in the background, where the state can be copied
        saver.on_log(log_row(run))
        while saver._pending is not None:
            saver.on_log(log_row(run))
        return fresh("--run.resume", "auto")

    run = fresh()
    start, others = parameters_of(run), [resumed()]
    assert not take_steps(run, 1)[0].applied
    assert all(torch.equal(a, b) for a, b in zip(start.values(), parameters_of(run).values(), strict=True))
    assert run.schedule.counters.tolist() == [0, 1, 1]
    take_steps(others[0], 1)
    for _ in range(2):
        others.append(resumed())
        assert others[-1].step == run.step
        assert all(report.applied for one in (run, *others) for report in take_steps(one, 2))
    assert not torch.equal(start["1.0.weight"], parameters_of(run)["1.0.weight"])
    return [torch.equal(a, b) for other in others for a, b in zip(all_of(run), all_of(other), strict=True)]


OFTEN = {"muon", "adafactor", "lion", "nesterov"}
SLOW = {"adamw_8bit": [pytest.mark.slow, pytest.mark.engine]}  # .ci/run installs torchao with the engines
# torch's own do not work on sharded parameters: Rprop's masked assignment, and the kernel of fused SGD.
CELLS = [
    pytest.param(kind, ranks, strategy, marks=[] if kind in OFTEN else SLOW.get(kind, pytest.mark.slow))
    for kind in MAKERS
    for ranks, strategy in LAYOUTS
    if not (strategy == "fsdp" and kind in ("rprop", "fused sgd"))
]


@pytest.mark.parametrize(("kind", "ranks", "strategy"), CELLS)
def test_an_optimizer_of_the_tasks_skips_on_all_ranks_and_resumes_bit_for_bit(tmp_path, kind, ranks, strategy):
    width = 8
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
        width = 96  # it quantises moments of 4,096 elements and more, on each rank
    for equal in on_ranks(ranks, skipped_and_resumed, tmp_path, strategy, kind, width):
        assert all(equal)


def after_five_steps(world, strategy, kind, *more):
    small = ["--use_amp", "false", "--train.global_batch_size", 8]
    run = make_run(world, Own(kind), *words("unused", strategy, *small, *more))
    take_steps(run, 5)
    return parameters_of(run)


@pytest.mark.parametrize("kind", ["adafactor", "lion", "nesterov", "muon"])
def test_world_sizes_and_strategies_agree_on_an_optimizer_of_the_tasks(kind):
    alone = on_ranks(1, after_five_steps, "single", kind)[0]
    for strategy in ("ddp", "fsdp"):
        for parameters in on_ranks(2, after_five_steps, strategy, kind):
            for name, value in parameters.items():
                # float32 sums in another order, over five steps. Muon's bfloat16 and Lion's sign give the same for
                # both unless a value lies within that of a rounding boundary, which none of these few hundred does.
                torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "said"), [("lion", "Lion"), ("nesterov", "SGD")])
def test_an_optimizer_that_cannot_skip_by_itself_takes_the_textbook_path_and_says_so_once(capsys, kind, said):
    run = make_run(World(), Own(kind), *words("unused", "single"))
    line = f"optimizer {said}: steps by unscale_, clip_grad_norm_ and step, with two host reads per step\n"
    assert capsys.readouterr().out.count(line) == 1
    assert not takes_grad_scale(run.optimizer)
    assert all(
        group["lr"] == pytest.approx(0.01) and isinstance(group["lr"], float) for group in run.optimizer.param_groups
    )


@pytest.mark.parametrize("kind", ["muon", "fused adamw"])
def test_an_optimizer_that_skips_in_its_kernel_reads_nothing(capsys, kind):
    run = make_run(World(), Own(kind), *words("unused", "single"))
    assert "optimizer" not in capsys.readouterr().out
    take_steps(run, 1)  # the first step checks that every parameter has a gradient
    batches = [next(run.data) for _ in range(2)]
    reads = []
    for batch in batches:
        with Counter("_local_scalar_dense") as counter:
            train_step(run, batch)
        reads.append(counter.count)
    assert reads == [0, 0]


class OwnStep(torch.optim.AdamW):
    """A subclass of a fused class, whose step knows nothing of grad_scale and found_inf."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class StepsByItself(Own):
    def optimizer(self, groups, lr):
        return OwnStep(groups, lr=lr, fused=True)


def test_a_subclass_that_replaces_a_fused_step_is_unscaled_clipped_and_skipped():
    scaled = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 64, "--train.max_grad_norm", 0.01]
    run = make_run(World(), StepsByItself(bad=(0,)), *words("unused", "single", *scaled))
    start = parameters_of(run)
    assert not take_steps(run, 1)[0].applied
    assert all(torch.equal(a, b) for a, b in zip(start.values(), parameters_of(run).values(), strict=True))
    assert take_steps(run, 1)[0].norm > 0.01
    moved = math.sqrt(
        sum((a - b).square().sum() for a, b in zip(start.values(), parameters_of(run).values(), strict=True))
    )
    # lr x max_grad_norm, in float32
    assert moved == pytest.approx(run.schedule.last_lr.item() * 0.01, rel=1e-4)


class NoOptimizer(Tiny):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def optimizer(self, groups, lr):
        return self.make(groups, lr, self)

    def build_model(self):
        self.model = super().build_model()
        return self.model


def leaving_one_out(groups, lr, task):
    groups[0]["params"] = groups[0]["params"][1:]
    return torch.optim.SGD(groups, lr=lr)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        super().step(closure)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda groups, lr, task: torch.optim.SGD, "returned the class SGD, not a torch optimizer; return one made of"),
        (lambda groups, lr, task: None, "returned an object of NoneType, not a torch optimizer"),
        (
            lambda groups, lr, task: torch.optim.SGD(groups[:1], lr=lr),
            "the task's optimizer SGD leaves out the parameter 0.0.bias (3 in all); make it of the groups",
        ),
        (
            leaving_one_out,
            "the task's optimizer SGD leaves out the parameter 0.0.weight; make it of the groups, as SGD(",
        ),
        (
            lambda groups, lr, task: torch.optim.Adam(groups, learning_rate=lr),
            "the task's optimizer(groups, lr) failed: TypeError: Adam.__init__() got an unexpected keyword argument "
            "'learning_rate' (test_optim.py, line ",
        ),
        (
            lambda groups, lr, task: torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=lr),
            "the task's optimizer LBFGS needs a closure in step(), and train_step calls it without one; use another",
        ),
        (
            lambda groups, lr, task: NeedsClosure(groups, lr=lr),
            "the task's optimizer NeedsClosure needs a closure in step()",
        ),
        (
            lambda groups, lr, task: torch.optim.SGD(task.model.parameters(), lr=lr),
            "the task's optimizer SGD has other groups than it was given; make it of the groups, as SGD(groups, lr=lr)",
        ),
    ],
)
def test_what_is_no_torch_optimizer_of_all_parameters_is_refused(make, said):
    with pytest.raises(ConfigError) as error:
        make_run(World(), NoOptimizer(make))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def failing_step(world, kind):
    run = make_run(world, Own(kind), *words("unused", "fsdp"))
    with pytest.raises(ConfigError) as error:
        take_steps(run, 1)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param(
            "rprop",
            "optimizer Rprop does not work on sharded parameters, as torch says: ",
            id="rprop",
            marks=pytest.mark.skipif(torch.__version__ >= (2, 15), reason="DTensor can, from torch 2.15 on"),
        ),
        pytest.param(
            "fused sgd",
            "optimizer SGD does not work on sharded parameters, as torch says: Operator aten._fused_sgd_",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_optimizer_that_dtensor_cannot_compute_is_refused_in_one_line(kind, said):
    for text in on_ranks(2, failing_step, kind):
        assert said in text
        assert text.endswith("; use parallel.strategy=ddp, or another optimizer")
        assert "\n" not in text


class ChangesItsGroups(Lion):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1


def test_an_optimizer_that_changes_its_groups_in_training_is_refused_when_it_is_to_be_saved(tmp_path):
    def make(groups, lr, task):
        return ChangesItsGroups([{**group, "k": 0} for group in groups], lr=lr)

    run = make_run(World(), NoOptimizer(make), *words(tmp_path, "single"))
    save(run)
    take_steps(run, 2)
    with pytest.raises(ConfigError, match="ChangesItsGroups changed k of matrices from 0 to 2.0 in training, and a ch"):
        save(run)


def test_another_optimizer_than_the_checkpoints_is_refused_by_its_class(tmp_path):
    run = make_run(World(), Own("lion"), *words(tmp_path, "single"))
    take_steps(run, 1)
    save(run)
    with pytest.raises(DataError, match="'Lion matrices': 3, 'Lion vectors': 3}, here {'Muon matrices': 3"):
        make_run(World(), Own("muon"), *words(tmp_path, "single", "--run.resume", "auto"))


def test_verify_compares_sgd_and_adamw_whatever_the_task_brings():
    class All(Grouped, Stairs):
        def optimizer(self, groups, lr):
            return Lion(groups, lr=lr)

    task = RepeatableTask(All(), torch.device("cpu"), 64)
    assert task.left_out == ["optimizer()", "groups()", "schedule()"]
    assert not any(hasattr(task, name) for name in ("optimizer", "groups", "schedule"))
    assert isinstance(make_run(World(), task).optimizer, torch.optim.AdamW)


# Half precision on a CPU, where torch's fused SGD does nothing.


class Halved(Tiny):
    def build_model(self):
        return super().build_model().bfloat16()

    def loss_sum(self, model, batch):
        return super().loss_sum(model, {**batch, "x": batch["x"].bfloat16()})


def test_sgd_in_half_precision_on_a_cpu_takes_the_path_that_works():
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    assert optimizer_class("sgd", True, [{"params": [parameter]}]) is torch.optim.SGD
    assert optimizer_class("sgd", True, [{"params": [parameter.float()]}]) is FusedSGD
    model = Halved().build_model()
    optimizer, said = build_optimizer(model, OptimConfig(name="sgd", lr=0.5)), []
    assert not takes_grad_scale(optimizer)
    build_optimizer(model, OptimConfig(name="sgd"), say=said.append)
    assert said == ["optimizer SGD: steps by unscale_, clip_grad_norm_ and step, with two host reads per step"]
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_a_tasks_fused_sgd_in_half_precision_on_a_cpu_is_refused():
    task = NoOptimizer(lambda groups, lr, task: torch.optim.SGD(groups, lr=lr, fused=True))
    with pytest.raises(ConfigError, match="SGD has fused=True, which on a CPU silently leaves half-precision paramet"):
        build_optimizer(Halved().build_model(), OptimConfig(), task)


# A task's own parameter groups.


class Grouped(Tiny):
    """Per-layer rates; `groups` may be replaced by another function of the model."""

    def __init__(self, groups=None, optimizer=None):
        super().__init__()
        self.make = groups
        if optimizer:
            self.optimizer = optimizer

    def groups(self, model):
        if self.make:
            return self.make(model)
        return [
            {"name": "layer 0", "params": "0.*", "lr_scale": 0.25},
            {"name": "layer 1", "params": ["1.0.weight", "1.0.bias"], "lr_scale": 0.5, "weight_decay": 0.0},
            {"params": model[2].parameters()},
        ]


def test_groups_take_names_patterns_and_parameters_and_fill_in_the_defaults():
    run = make_run(World(), Grouped(), *words("unused", "single"))
    groups = run.optimizer.param_groups
    assert [(g["name"], len(g["params"]), g["lr_scale"], g["weight_decay"]) for g in groups] == [
        ("layer 0", 2, 0.25, 0.1),
        ("layer 1", 2, 0.5, 0.0),
        ("group 2", 2, 1.0, 0.1),
    ]


def rates_and_moves(world, strategy, folder, fused):
    """What lr_scale does to a group's rate, before and after a resume; lr stays the base rate."""
    more = ["--use_amp", "false", "--optim.name", "sgd", "--optim.momentum", 0, "--optim.weight_decay", 0]
    more += ["--optim.fused", fused, "--optim.schedule", "linear"]
    run = make_run(world, Grouped(), *words(folder, strategy, *more))
    rates = []
    for _ in range(2):
        for _ in range(2):
            rates.append([float(group["lr"]) / run.schedule.lr.item() for group in run.optimizer.param_groups])
            rates[-1].append(run.schedule.lr.item())
            take_steps(run, 1)
        save(run)
        run = make_run(world, Grouped(), *words(folder, strategy, *more, "--run.resume", "auto"))
    whole_rate = make_run(world, Tiny(), *words("unused", strategy, *more))
    scaled = make_run(world, Grouped(), *words("unused", strategy, *more))
    start = parameters_of(scaled)
    take_steps(whole_rate, 1)
    take_steps(scaled, 1)
    a, b = parameters_of(whole_rate), parameters_of(scaled)
    moves = [
        ((b[name] - start[name]).norm() / (a[name] - start[name]).norm()).item() for name in ("0.0.weight", "1.0.bias")
    ]
    return rates, moves


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
@pytest.mark.parametrize("fused", ["true", "false"])
def test_lr_scale_multiplies_the_groups_rate_also_after_a_resume(tmp_path, ranks, strategy, fused):
    for rates, moves in on_ranks(ranks, rates_and_moves, strategy, tmp_path, fused):
        assert [rate[:3] for rate in rates] == [pytest.approx([0.25, 0.5, 1.0], rel=1e-6)] * 4
        assert [rate[3] for rate in rates] == pytest.approx([0.01 * (1 - 0.09 * step) for step in range(4)], rel=1e-6)
        # The weights are near 1 and move by a thousandth: float32 rounds that to 1e-4.
        assert moves == pytest.approx([0.25, 0.5], rel=1e-3)


def test_the_rates_of_groups_are_looked_up_without_a_host_read():
    run = make_run(World(), Grouped(), *words("unused", "single"))
    with Counter("_local_scalar_dense") as counter:
        run.schedule.step(torch.tensor(True))
    assert counter.count == 0
    assert takes_device_lr(run.optimizer)
    assert [
        group["lr"].data_ptr() - run.optimizer.param_groups[0]["lr"].data_ptr() for group in run.optimizer.param_groups
    ] == [0, 4, 8]


class TiedGroups(Tiny):
    def build_model(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        model[2].weight = model[0].weight
        return model

    def groups(self, model):
        return [{"name": "a", "params": ["2.weight", "0.weight"]}, {"name": "b", "params": ["*.bias", "4.weight"]}]


def test_a_tied_parameter_has_both_its_names():
    run = make_run(World(), TiedGroups())
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [1, 4]


REST = {"name": "rest", "params": ["1.*", "2.*"]}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            lambda model: [REST],
            "groups(model) leave out the parameter 0.0.weight (2 in all); put each trained parameter",
        ),
        (
            lambda model: [REST, {"name": "first", "params": ["0.*", "1.0.bias"]}],
            "groups(model) put the parameter 1.0.bias into two groups, rest and first; name it in one",
        ),
        (lambda model: [REST, {"params": "layers.0.*"}], "names 'layers.0.*', which matches no trained parameter; the"),
        (
            lambda model: [REST, {"params": [torch.ones(3, requires_grad=True)]}],
            "a tensor of shape [3] that is no para",
        ),
        (lambda model: [REST, {**REST, "params": "0.*"}], "gave two groups the name rest; name each differently"),
        (lambda model: [{"params": "*", "lr": 0.1}], "the task's group 0 has an lr; give lr_scale, which multip"),
        (lambda model: [{"params": "*", "lr_scale": -1}], "has lr_scale=-1; give a number, 0 or more"),
        (lambda model: [{"params": "*", "weight_decay": "0.1"}], "has weight_decay='0.1'; give a number, 0 or more"),
        (lambda model: [["0.*"]], 'groups(model) gave list as a group; give a dict with "params"'),
        (lambda model: [{"param": "*"}], "groups(model) gave a group with ['param'], but no params"),
        (lambda model: None, "the task's groups(model) returned NoneType; return a list of dicts"),
        (lambda model: {"params": "*"}, "the task's groups(model) returned dict; return a list of dicts"),
        (lambda model: [{"params": model}], 'the task\'s group 0 has Sequential in its "params"; use .parameters() or'),
        (lambda model: [{"name": "a", "params": [model[0], "1.*"]}], "the task's group a has Sequential in its"),
        (lambda model: [{"params": None}], 'the task\'s group 0 has NoneType in its "params"'),
        (
            lambda model: [{"params": model.body}],
            "groups(model) failed: AttributeError: 'Sequential' object has no attri",
        ),
        (lambda model: (model.body for _ in range(1)), "groups(model) failed: AttributeError: 'Sequential' object has"),
        (lambda model: [{"params": "*", "lr_scal": 0}], "has the key 'lr_scal', which AdamW does not read; did you me"),
        (lambda model: [{"params": "*", "weigth_decay": 0}], "did you mean weight_decay?"),
        (lambda model: [{"params": "*", "betaz": (0.9, 0.9)}], "did you mean betas?"),
        (
            lambda model: [{"params": "*", "x": 1}],
            "which AdamW does not read; it takes params, name, lr_scale, weight_",
        ),
    ],
)
def test_groups_that_miss_or_repeat_a_parameter_or_are_malformed_are_refused(groups, said):
    with pytest.raises(ConfigError) as error:
        make_run(World(), Grouped(groups))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 64


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (None, {"betas": (0.8, 0.9), "eps": 1e-6}),
        (Muon, {"use_muon": False, "betas": (0.8, 0.9)}),
        (Muon, {"momentum": 0.5, "ns_steps": 3}),
        (Lion, {"betas": (0.8, 0.9)}),
    ],
)
def test_a_group_takes_the_options_of_its_optimizer(make, options):
    groups = [{"name": "all", "params": ["*.weight"], **options}, {"name": "biases", "params": "*.bias"}]
    run = make_run(World(), Grouped(lambda model: groups, make))
    assert {key: run.optimizer.param_groups[0][key] for key in options} == options


def test_other_groups_than_the_checkpoints_are_refused(tmp_path):
    run = make_run(World(), Grouped(), *words(tmp_path, "single"))
    take_steps(run, 1)
    save(run)
    with pytest.raises(DataError, match="'adamw layer 0': 2"):
        make_run(World(), Tiny(), *words(tmp_path, "single", "--run.resume", "auto"))


def test_frozen_parameters_belong_to_no_group():
    class Frozen(Grouped):
        def build_model(self):
            model = super().build_model()
            model[0].requires_grad_(False)
            return model

    run = make_run(World(), Frozen(lambda model: [{"name": "all", "params": model.parameters()}]))
    assert len(run.optimizer.param_groups[0]["params"]) == 4


# Schedules.


class Stairs(Tiny):
    def schedule(self, step):
        return [0.0, 1.0, 0.5][step // 2] if step < 6 else 0.25


def scheduled(world, strategy, folder):
    run = make_run(world, Stairs(), *words(folder, strategy, "--optim.warmup_steps", 5))
    rates = []
    for _ in range(2):
        for _ in range(2):
            take_steps(run, 1)
            rates.append(run.schedule.last_lr.item())
        save(run)
        run = make_run(world, Stairs(), *words(folder, strategy, "--optim.warmup_steps", 5, "--run.resume", "auto"))
    return rates


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_tasks_schedule_is_the_whole_factor_by_applied_step_also_after_a_resume(tmp_path, ranks, strategy):
    for rates in on_ranks(ranks, scheduled, strategy, tmp_path):
        assert rates == pytest.approx([0.0, 0.0, 0.01, 0.01], rel=1e-6)


def test_a_skipped_step_does_not_move_a_tasks_schedule():
    class Both(Own, Stairs):
        pass

    run = make_run(World(), Both(bad=(0, 2)), *words("unused", "single", "--train.micro_batch_size", 1))
    rates = []
    for _ in range(5):
        take_steps(run, 1)
        rates.append(run.schedule.last_lr.item())
    assert run.schedule.counters.tolist() == [3, 2, 0]
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.01], rel=1e-6)


@pytest.mark.parametrize("factor", [-0.1, math.nan, math.inf, None, "fast", "0.5", torch.ones(2)])
def test_a_schedule_that_gives_no_factor_is_refused_at_the_start(factor):
    class Odd(Tiny):
        def schedule(self, step):
            return factor if step == 7 else 1.0

    with pytest.raises(ConfigError) as error:
        make_run(World(), Odd(), "--train.steps", 10)
    assert f"the task's schedule(7) returned {factor!r}; return a number, 0 or more" in str(error.value)


def test_a_schedule_that_fails_is_refused_with_its_file_and_line():
    class Fails(Tiny):
        def schedule(self, step):
            return 1 / step

    with pytest.raises(
        ConfigError, match=r"schedule\(0\) failed: ZeroDivisionError: division by zero \(test_optim.py, "
    ):
        make_run(World(), Fails())


def test_wsd_warms_up_stays_and_decays_in_the_last_share_of_the_steps():
    config = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=3, decay_ratio=0.4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 20) for step in range(21)]
    assert rates[:3] == [0.25, 0.5, 0.75]
    assert rates[3:13] == [1.0] * 10
    assert rates[12:] == pytest.approx([1 - 0.9 * step / 8 for step in range(9)])
    late = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=15, decay_ratio=1.0, min_lr_ratio=0.0)
    assert learning_rate(late, 15, 20) == 1.0
    assert learning_rate(late, 20, 20) == 0.0


# Muon.


def given_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_gives_the_numbers_of_torchs_own_on_matrices_and_of_adamw_on_the_others(adjust, nesterov):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))

    ours, theirs = made(), made()
    split = lambda model: [[p for p in model.parameters() if (p.ndim == 2) == matrices] for matrices in (True, False)]  # noqa: E731
    mine = Muon(
        [{"name": str(n), "params": ps, "weight_decay": 0.1} for n, ps in enumerate(split(ours))],
        lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust,
    )  # fmt: skip
    matrices, vectors = split(theirs)
    torchs = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust),
        torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), fused=True),
    ]
    for step in range(5):
        given_gradients(ours, step)
        given_gradients(theirs, step)
        mine.step()
        for optimizer in torchs:
            optimizer.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            # The momentum is the same, so the orthogonalised matrices are; two roundings of float32 per step differ.
            torch.testing.assert_close(a, b, rtol=0, atol=2**-22 * (step + 1))


class Wide(Own):
    def __init__(self, width: int = 10):
        super().__init__("muon", width=width)  # rows that two ranks, and four, do not share evenly


def muon_on_given_gradients(world, strategy):
    """Parameters and momentum after three steps on the same gradients, whatever the layout; and what they cost."""
    run = make_run(world, Wide(), *words("unused", strategy, "--use_amp", "false"))
    gathers = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in run.parallel.parameters:
            full = torch.randn(p.shape, generator=generator)
            p.grad = full
            if strategy != "single":
                from torch.distributed.tensor import distribute_tensor

                p.grad = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
        with Counter("all_gather_into_tensor") as counter, Counter("reduce") as others:
            run.optimizer.step()
        gathers.append((counter.count, others.count))
    local_sizes = [run.optimizer.state[p]["momentum_buffer"] for p in run.parallel.parameters if p.ndim == 2]
    sharded = [buffer.to_local().numel() < buffer.numel() for buffer in local_sizes] if strategy != "single" else []
    return parameters_of(run), moments_of(run), gathers, sharded


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "fsdp"), pytest.param(4, "fsdp"), pytest.param(4, "hsdp", marks=pytest.mark.slow)]
)
def test_sharded_muon_gathers_once_per_matrix_and_equals_one_process_bit_for_bit(ranks, strategy):
    parameters, moments, _, _ = on_ranks(1, muon_on_given_gradients, "single")[0]
    for theirs, their_moments, gathers, sharded in on_ranks(ranks, muon_on_given_gradients, strategy):
        assert gathers == [(3, 0)] * 3, "three matrices"
        assert any(sharded), "its state is sharded as the parameters are"
        # Each element of the momentum is computed alone, and every rank orthogonalises the same gathered matrix.
        assert all(torch.equal(theirs[name], value) for name, value in parameters.items() if value.ndim == 2)
        assert all(torch.equal(a, b) for a, b in zip(their_moments, moments, strict=True) if a.ndim == 2)
        for a, b in zip([*theirs.values(), *their_moments], [*parameters.values(), *moments], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-22, atol=0)  # AdamW's kernel rounds a shard's tail otherwise


class Embedded(Tiny):
    """An embedding, hidden matrices, an output layer: Muon is for the hidden ones."""

    def build_model(self):
        return nn.ModuleDict({"embedding": nn.Embedding(4, 8), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 1)})

    def loss_sum(self, model, batch):
        hidden = batch["x"] + model["embedding"](batch["x"][:, 0].long().clamp(0, 3))
        error = model["head"](model["hidden"](hidden).tanh()).squeeze(-1) - batch["y"]
        return (error.square() * batch["counts"]).sum()


def test_optim_name_muon_orthogonalises_hidden_matrices_alone():
    run = make_run(World(), Embedded(), *words("unused", "single", "--optim.name", "muon", "--optim.momentum", 0.95))
    names = {id(p): name for name, p in run.parallel.module.named_parameters()}
    groups = {group["name"]: [names[id(p)] for p in group["params"]] for group in run.optimizer.param_groups}
    assert groups == {
        "hidden matrices": ["hidden.weight"],
        "matrices": ["embedding.weight", "head.weight"],
        "vectors": ["hidden.bias", "head.bias"],
    }
    assert [group["use_muon"] for group in run.optimizer.param_groups] == [True, False, False]
    losses = [(report.loss_sum / report.weight).item() for report in take_steps(run, 8)]
    assert losses[-1] < losses[0]


def test_a_matrix_in_a_muon_group_is_a_matrix():
    with pytest.raises(ValueError, match=r"Muon takes matrices, not a parameter of shape \[8\]"):
        Muon([{"params": [nn.Parameter(torch.ones(8))], "use_muon": True}])


def test_muon_on_the_textbook_path_takes_the_same_steps():
    scaled = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 64, "--optim.name", "muon"]
    runs = []
    for fused in ("true", "false"):
        run = make_run(World(), Tiny(), *words("unused", "single", *scaled, "--optim.fused", fused))
        assert takes_grad_scale(run.optimizer) == (fused == "true")
        take_steps(run, 3)
        runs.append(parameters_of(run))
    for name, value in runs[0].items():
        # Unscaled and clipped in another order, in float32; see the test of world sizes.
        torch.testing.assert_close(value, runs[1][name], rtol=1e-5, atol=1e-6)


def test_the_settings_of_the_new_optimizers_are_checked():
    for words_, said in [
        (["--optim.name", "lion"], "optim.name=lion"),
        (["--optim.schedule", "stairs"], "optim.schedule=stairs"),
        (["--optim.decay_ratio", "0"], "optim.decay_ratio=0.0 on the command line must be above 0 and at most 1"),
        (["--optim.ema", "1"], "optim.ema=1"),
        (["--optim.ema", "on"], "optim.ema=on"),
    ]:
        with pytest.raises(ConfigError) as error:
            load_config(words_, environ={})
        assert said in str(error.value)
