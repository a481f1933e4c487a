"""What a task brings to the update: its optimizer, parameter groups and schedule; Muon; the
built-in schedules.
"""

import copy
import math

import pytest
import torch
from own_optimizers import MAKERS, Lion, Own
from ranks import on_ranks
from tiny import Tiny, log_row, make_run, moments_of, parameters_of, take_steps
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.checkpoint.saver import Saver, save
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.optim import build_optimizer, learning_rate
from dist_amp.optimizers.muon import Muon
from dist_amp.optimizers.sgd import FusedSGD
from dist_amp.precision import takes_grad_scale
from dist_amp.settings import OptimConfig
from dist_amp.step import train_step
from dist_amp.verify.reference import RepeatableTask
from dist_amp.world import World, local

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp")]


def words(folder, strategy, *more):
    small = ["--train.steps", 10, "--train.micro_batch_size", 2, "--optim.lr", 0.01]
    small += ["--data.shuffle", "false", "--parallel.strategy", strategy]
    return [*small, "--run.dir", str(folder), *more]


FP16 = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 64]


def are_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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
    """Parameters, counters, and this rank's part of the optimizer's state."""
    tensors = [*parameters_of(run).values(), run.schedule.counters]
    for p in run.parallel.parameters:
        for value in run.optimizer.state[p].values():
            part = local(torch.as_tensor(value))
            # Of 8-bit moments the codes and scales.
            tensors += [part.codes, part.scale] if hasattr(part, "codes") else [part]
    return tensors


def skipped_and_resumed(world, folder, strategy, kind, width):
    """Whether runs that are resumed before any applied step, after a skipped one and later continue
    bit for bit.

    The first step's gradients are infinite on the last rank alone.
    """
    task = Own(kind, bad=(world.world_size - 1,), width=width)

    def fresh(*more):
        return make_run(world, task, *words(folder, strategy, *FP16, *more))

    def resumed():
        saver = Saver(run)
        saver.save(wait=False)  # in the background, where the state can be copied
        saver.on_log(log_row(run))
        while run.metrics.save is not None:
            saver.on_log(log_row(run))
        return fresh("--run.resume", "auto")

    run = fresh()
    start = parameters_of(run)
    others = [resumed()]
    assert not take_steps(run, 1)[0].applied
    assert are_equal(start.values(), parameters_of(run).values())
    assert run.schedule.counters.tolist() == [0, 1, 1]
    take_steps(others[0], 1)
    for _ in range(2):
        others.append(resumed())
        assert others[-1].step == run.step
        assert all(report.applied for one in (run, *others) for report in take_steps(one, 2))
    assert not torch.equal(start["1.0.weight"], parameters_of(run)["1.0.weight"])
    return all(are_equal(all_of(run), all_of(other)) for other in others)


OFTEN = [("lion", 2, "ddp")]
OFTEN += [(kind, 2, "fsdp") for kind in ("muon", "adafactor", "lion", "nesterov")]
OFTEN += [("muon", 1, "single")]
# .ci/run installs torchao with the engines.
SLOW = {"adamw_8bit": [pytest.mark.slow, pytest.mark.engine]}
# Two of torch's do not work on sharded parameters: Rprop's masked assignment, fused SGD's kernel.
CELLS = OFTEN + [
    pytest.param(kind, ranks, strategy, marks=SLOW.get(kind, pytest.mark.slow))
    for kind in MAKERS
    for ranks, strategy in LAYOUTS
    if (kind, ranks, strategy) not in OFTEN
    and not (strategy == "fsdp" and kind in ("rprop", "fused sgd"))
]


@pytest.mark.parametrize(("kind", "ranks", "strategy"), CELLS)
def test_an_optimizer_of_the_tasks_skips_on_all_ranks_and_resumes_bit_for_bit(
    tmp_path, kind, ranks, strategy
):
    width = 8
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
        width = 96  # it quantises moments of 4,096 elements and more, on each rank
    assert all(on_ranks(ranks, skipped_and_resumed, tmp_path, strategy, kind, width))


def after_five_steps(world, strategy, kind, *more):
    small = ["--use_amp", "false", "--train.global_batch_size", 8]
    run = make_run(world, Own(kind), *words("unused", strategy, *small, *more))
    take_steps(run, 5)
    return parameters_of(run)


@pytest.mark.parametrize("kind", ["adafactor", "lion", "muon"])
def test_world_sizes_and_strategies_agree_on_an_optimizer_of_the_tasks(kind):
    alone = after_five_steps(World(), "single", kind)
    for strategy in ("ddp", "fsdp"):
        for parameters in on_ranks(2, after_five_steps, strategy, kind):
            for name, value in parameters.items():
                # float32 sums in another order, over five steps. Muon's bfloat16 and Lion's sign
                # give the same for both unless a value lies within that of a rounding boundary,
                # which none of these few hundred does.
                torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)


@pytest.mark.bad_input("a task's optimizer that can't unscale and skip in its kernel")
@pytest.mark.parametrize(("kind", "said"), [("lion", "Lion"), ("nesterov", "SGD")])
def test_an_optimizer_that_cannot_skip_by_itself_takes_the_textbook_path_and_says_so_once(
    capsys, kind, said
):
    run = make_run(World(), Own(kind), *words("unused", "single"))
    line = f"optimizer {said}: steps by unscale_, clip_grad_norm_ and step, with two host reads"
    assert capsys.readouterr().out.count(line) == 1
    assert not takes_grad_scale(run.optimizer)
    assert all(
        group["lr"] == pytest.approx(0.01) and isinstance(group["lr"], float)
        for group in run.optimizer.param_groups
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
    clipped = [*FP16, "--train.max_grad_norm", 0.01]
    run = make_run(World(), StepsByItself(bad=(0,)), *words("unused", "single", *clipped))
    start = parameters_of(run)
    assert not take_steps(run, 1)[0].applied
    assert are_equal(start.values(), parameters_of(run).values())
    assert take_steps(run, 1)[0].norm > 0.01
    moves = [value - start[name] for name, value in parameters_of(run).items()]
    # lr x max_grad_norm, in float32
    expected = run.schedule.last_lr.item() * 0.01
    assert nn.utils.get_total_norm(moves).item() == pytest.approx(expected, rel=1e-4)


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
    return SGD(groups, lr=lr)


class NeedsClosure(SGD):
    def step(self, closure):
        super().step(closure)


@pytest.mark.bad_input(
    "a task's `optimizer(groups, lr)` that returns a class or no torch optimizer, or one without "
    "all parameters"
)
@pytest.mark.bad_input("a task's optimizer whose `step` needs a closure")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda groups, lr, task: SGD, "returned the class SGD, not a torch optimizer; return one"),
        (lambda groups, lr, task: None, "returned an object of NoneType, not a torch optimizer"),
        (
            lambda groups, lr, task: SGD(groups[:1], lr=lr),
            "the task's optimizer SGD leaves out the parameter 0.0.bias (3 in all); make it of the "
            "groups",
        ),
        (
            leaving_one_out,
            "SGD leaves out the parameter 0.0.weight; make it of the groups, as SGD(",
        ),
        (
            lambda groups, lr, task: torch.optim.Adam(groups, learning_rate=lr),
            "optimizer(groups, lr) failed: TypeError: Adam.__init__() got an unexpected keyword "
            "argument 'learning_rate' (test_optim.py, line ",
        ),
        (
            lambda groups, lr, task: torch.optim.LBFGS(groups[0]["params"], lr),
            "LBFGS needs a closure in step(), and train_step calls it without one; use another",
        ),
        (
            lambda groups, lr, task: NeedsClosure(groups, lr=lr),
            "the task's optimizer NeedsClosure needs a closure in step()",
        ),
        (
            lambda groups, lr, task: SGD(task.model.parameters(), lr=lr),
            "the task's optimizer SGD has other groups than it was given; make it of the groups, "
            "as SGD(groups, lr=lr)",
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


@pytest.mark.bad_input("a task's optimizer that DTensor can't compute on shards")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param(
            "rprop",
            "optimizer Rprop does not work on sharded parameters, as torch says: ",
            id="rprop",
            marks=pytest.mark.skipif(
                torch.__version__ >= (2, 15), reason="DTensor can, from torch 2.15 on"
            ),
        ),
        pytest.param(
            "fused sgd",
            "optimizer SGD does not work on sharded parameters, as torch says: Operator "
            "aten._fused_sgd_",
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


@pytest.mark.bad_input(
    "an optimizer that changes options of its groups in training, when a checkpoint is due"
)
def test_an_optimizer_that_changes_its_groups_in_training_is_refused_when_it_is_to_be_saved(
    tmp_path,
):
    def make(groups, lr, task):
        return ChangesItsGroups([{**group, "k": 0} for group in groups], lr=lr)

    run = make_run(World(), NoOptimizer(make), *words(tmp_path, "single"))
    save(run)
    take_steps(run, 2)
    with pytest.raises(
        ConfigError,
        match="ChangesItsGroups changed k of matrices from 0 to 2.0 in training, and a ch",
    ):
        save(run)


def test_another_optimizer_than_the_checkpoints_is_refused_by_its_class(tmp_path):
    run = make_run(World(), Own("lion"), *words(tmp_path, "single"))
    take_steps(run, 1)
    save(run)
    with pytest.raises(
        DataError, match="'Lion matrices': 3, 'Lion vectors': 3}, here {'Muon matrices': 3"
    ):
        make_run(World(), Own("muon"), *words(tmp_path, "single", "--run.resume", "auto"))


def test_verify_compares_sgd_and_adamw_whatever_the_task_brings():
    class All(Grouped, Stairs):
        def optimizer(self, groups, lr):
            return Lion(groups, lr=lr)

    task = RepeatableTask(All(), torch.device("cpu"), 64, frozenset())
    assert task.left_out == ["optimizer()", "groups()", "schedule()"]
    assert not any(hasattr(task, name) for name in ("optimizer", "groups", "schedule"))
    assert isinstance(make_run(World(), task).optimizer, torch.optim.AdamW)


# Half precision on a CPU, where torch's fused SGD does nothing.


class Halved(Tiny):
    def build_model(self):
        return super().build_model().bfloat16()

    def loss_sum(self, model, batch):
        return super().loss_sum(model, {**batch, "x": batch["x"].bfloat16()})


@pytest.mark.bad_input(
    "`optim.name=sgd` with half-precision parameters on a CPU, which torch's fused kernel leaves "
    "as they are"
)
def test_sgd_in_half_precision_on_a_cpu_takes_the_path_that_works():
    assert type(build_optimizer(Tiny().build_model(), OptimConfig(name="sgd"))) is FusedSGD
    model = Halved().build_model()
    assert type(build_optimizer(model, OptimConfig(name="sgd"))) is SGD
    optimizer, said = build_optimizer(model, OptimConfig(name="sgd", lr=0.5)), []
    assert not takes_grad_scale(optimizer)
    build_optimizer(model, OptimConfig(name="sgd"), say=said.append)
    assert said == [
        "optimizer SGD: steps by unscale_, clip_grad_norm_ and step, with two host reads per step"
    ]
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(
        not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )


@pytest.mark.bad_input("a task's SGD with `fused=True` of such parameters")
def test_a_tasks_fused_sgd_in_half_precision_on_a_cpu_is_refused():
    task = NoOptimizer(lambda groups, lr, task: SGD(groups, lr=lr, fused=True))
    with pytest.raises(
        ConfigError,
        match="SGD has fused=True, which on a CPU silently leaves half-precision paramet",
    ):
        build_optimizer(Halved().build_model(), OptimConfig(), task)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_fused_sgd_takes_torchs_steps_bit_for_bit_also_without_some_gradients(momentum):
    ours, reference = Tiny().build_model(), Tiny().build_model()
    reference.load_state_dict(ours.state_dict())
    config = OptimConfig(name="sgd", lr=0.1, momentum=momentum, weight_decay=0.0)
    mine = build_optimizer(ours, config)
    torchs = SGD(reference.parameters(), lr=0.1, momentum=momentum, fused=True)
    for step in range(5):
        for model in (ours, reference):
            given_gradients(model, step)
            if step in (1, 2):
                model[0][0].weight.grad = None
        mine.step()
        torchs.step()
        assert are_equal(ours.parameters(), reference.parameters())


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
            {
                "name": "layer 1",
                "params": ["1.0.weight", "1.0.bias"],
                "lr_scale": 0.5,
                "weight_decay": 0.0,
            },
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
    more = ["--use_amp", "false", "--optim.name", "sgd", "--optim.momentum", 0]
    more += ["--optim.weight_decay", 0, "--optim.fused", fused, "--optim.schedule", "linear"]
    run = make_run(world, Grouped(), *words(folder, strategy, *more))
    rates = []
    for _ in range(2):
        for _ in range(2):
            lr = run.schedule.lr.item()
            rates.append([float(group["lr"]) / lr for group in run.optimizer.param_groups] + [lr])
            take_steps(run, 1)
        save(run)
        run = make_run(world, Grouped(), *words(folder, strategy, *more, "--run.resume", "auto"))
    plain = make_run(world, Tiny(), *words("unused", strategy, *more))
    scaled = make_run(world, Grouped(), *words("unused", strategy, *more))
    start = parameters_of(scaled)
    take_steps(plain, 1)
    take_steps(scaled, 1)
    a, b = parameters_of(plain), parameters_of(scaled)
    names = ("0.0.weight", "1.0.bias")
    moves = [((b[n] - start[n]).norm() / (a[n] - start[n]).norm()).item() for n in names]
    return rates, moves


@pytest.mark.parametrize(
    ("ranks", "strategy", "fused"),
    [(1, "single", "false"), (2, "ddp", "true"), (2, "fsdp", "true")],
)
def test_lr_scale_multiplies_the_groups_rate_also_after_a_resume(tmp_path, ranks, strategy, fused):
    for rates, moves in on_ranks(ranks, rates_and_moves, strategy, tmp_path, fused):
        assert [rate[:3] for rate in rates] == [pytest.approx([0.25, 0.5, 1.0], rel=1e-6)] * 4
        expected = [0.01 * (1 - 0.09 * step) for step in range(4)]
        assert [rate[3] for rate in rates] == pytest.approx(expected, rel=1e-6)
        # The weights are near 1 and move by a thousandth: float32 rounds that to 1e-4.
        assert moves == pytest.approx([0.25, 0.5], rel=1e-3)


def test_the_rates_of_groups_are_looked_up_without_a_host_read():
    run = make_run(World(), Grouped(), *words("unused", "single"))
    with Counter("_local_scalar_dense") as counter:
        run.schedule.step(torch.tensor(True))
    assert counter.count == 0
    assert all(isinstance(group["lr"], torch.Tensor) for group in run.optimizer.param_groups)


class TiedGroups(Tiny):
    def build_model(self):
        model = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        model[2].weight = model[0].weight
        return model

    def groups(self, model):
        return [
            {"name": "a", "params": ["2.weight", "0.weight"]},
            {"name": "b", "params": ["*.bias", "4.weight"]},
        ]


def test_a_tied_parameter_has_both_its_names():
    run = make_run(World(), TiedGroups())
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [1, 4]


REST = {"name": "rest", "params": ["1.*", "2.*"]}


def group(params="*", **keys):
    return {"params": params, **keys}


@pytest.mark.bad_input(
    "a task's `groups(model)` that miss or repeat a parameter, match none, or are malformed"
)
@pytest.mark.bad_input("a key in a task's group that neither the template nor the optimizer reads")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: [REST], "leave out the parameter 0.0.weight (2 in all); put each trained"),
        (
            lambda m: [REST, {"name": "first", "params": ["0.*", "1.0.bias"]}],
            "put the parameter 1.0.bias into two groups, rest and first; name it in one",
        ),
        (lambda m: [REST, group("layers.0.*")], "'layers.0.*', which matches no trained parameter"),
        (lambda m: [REST, group([torch.ones(3, requires_grad=True)])], "tensor of shape [3] that"),
        (lambda m: [REST, {**REST, "params": "0.*"}], "gave two groups the name rest; name each"),
        (lambda m: [group(lr=0.1)], "the task's group 0 has an lr; give lr_scale, which multip"),
        (lambda m: [group(lr_scale=-1)], "has lr_scale=-1; give a number, 0 or more"),
        (lambda m: [group(weight_decay="0.1")], "has weight_decay='0.1'; give a number, 0 or more"),
        (lambda m: [["0.*"]], 'groups(model) gave list as a group; give a dict with "params"'),
        (lambda m: [{"param": "*"}], "groups(model) gave a group with ['param'], but no params"),
        (lambda m: None, "the task's groups(model) returned NoneType; return a list of dicts"),
        (lambda m: group(), "the task's groups(model) returned dict; return a list of dicts"),
        (lambda m: [group(m)], 'the task\'s group 0 has Sequential in its "params"; use .param'),
        (lambda m: [group([m[0], "1.*"], name="a")], "the task's group a has Sequential in its"),
        (lambda m: [group(None)], 'the task\'s group 0 has NoneType in its "params"'),
        (
            lambda m: [group(m.body)],
            "groups(model) failed: AttributeError: 'Sequential' object has",
        ),
        (lambda m: (m.body for _ in "1"), "groups(model) failed: AttributeError: 'Sequential' obj"),
        (lambda m: [group(lr_scal=0)], "has the key 'lr_scal', which AdamW does not read; did you"),
        (lambda m: [group(weigth_decay=0)], "did you mean weight_decay?"),
        (lambda m: [group(betaz=(0.9, 0.9))], "did you mean betas?"),
        (lambda m: [group(x=1)], "which AdamW does not read; it takes params, name, lr_scale, wei"),
    ],
)
def test_groups_that_miss_or_repeat_a_parameter_or_are_malformed_are_refused(make, said):
    with pytest.raises(ConfigError) as error:
        make_run(World(), Grouped(make))
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
    groups = [
        {"name": "all", "params": ["*.weight"], **options},
        {"name": "biases", "params": "*.bias"},
    ]
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
    more = ["--optim.warmup_steps", 5]
    run = make_run(world, Stairs(), *words(folder, strategy, *more))
    rates = []
    for _ in range(2):
        for _ in range(2):
            take_steps(run, 1)
            rates.append(run.schedule.last_lr.item())
        save(run)
        run = make_run(world, Stairs(), *words(folder, strategy, *more, "--run.resume", "auto"))
    return rates


def test_a_tasks_schedule_is_the_whole_factor_by_applied_step_also_after_a_resume(tmp_path):
    for rates in on_ranks(2, scheduled, "fsdp", tmp_path):
        assert rates == pytest.approx([0.0, 0.0, 0.01, 0.01], rel=1e-6)


def test_a_skipped_step_does_not_move_a_tasks_schedule():
    class Both(Own, Stairs):
        pass

    one = ["--train.micro_batch_size", 1]
    run = make_run(World(), Both(bad=(0, 2)), *words("unused", "single", *one))
    rates = []
    for _ in range(5):
        take_steps(run, 1)
        rates.append(run.schedule.last_lr.item())
    assert run.schedule.counters.tolist() == [3, 2, 0]
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.01], rel=1e-6)


@pytest.mark.bad_input("a task's `schedule(step)` that returns no number from 0 on")
@pytest.mark.parametrize("factor", [-0.1, math.nan, math.inf, None, "fast", "0.5", torch.ones(2)])
def test_a_schedule_that_gives_no_factor_is_refused_at_the_start(factor):
    class Odd(Tiny):
        def schedule(self, step):
            return factor if step == 7 else 1.0

    with pytest.raises(ConfigError) as error:
        make_run(World(), Odd(), "--train.steps", 10)
    expected = f"the task's schedule(7) returned {factor!r}; return a number, 0 or more"
    assert expected in str(error.value)


@pytest.mark.bad_input("a task's `groups`, `optimizer` or `schedule` that raises")
def test_a_schedule_that_fails_is_refused_with_its_file_and_line():
    class Fails(Tiny):
        def schedule(self, step):
            return 1 / step

    with pytest.raises(
        ConfigError,
        match=r"schedule\(0\) failed: ZeroDivisionError: division by zero \(test_optim.py, ",
    ):
        make_run(World(), Fails())


def test_wsd_warms_up_stays_and_decays_in_the_last_fifth_of_the_steps():
    config = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=3, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 20) for step in range(21)]
    assert rates[:3] == [0.25, 0.5, 0.75]
    assert rates[3:17] == [1.0] * 14
    assert rates[16:] == pytest.approx([1 - 0.9 * step / 4 for step in range(5)])
    late = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=18, min_lr_ratio=0.0)
    assert learning_rate(late, 18, 20) == 1.0
    assert learning_rate(late, 20, 20) == 0.0


# Muon.


def given_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_gives_the_numbers_of_torchs_own_on_matrices_and_of_adamw_on_the_others(
    adjust, nesterov
):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))

    ours, theirs = made(), made()

    def split(model):
        parameters = list(model.parameters())
        return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim == 1]

    mine = Muon(
        [{"name": str(n), "params": ps, "weight_decay": 0.1} for n, ps in enumerate(split(ours))],
        lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust,
    )  # fmt: skip
    matrices, vectors = split(theirs)
    torchs = [
        torch.optim.Muon(
            matrices,
            lr=0.02,
            weight_decay=0.1,
            momentum=0.95,
            nesterov=nesterov,
            adjust_lr_fn=adjust,
        ),
        torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), fused=True),
    ]
    for step in range(5):
        given_gradients(ours, step)
        given_gradients(theirs, step)
        mine.step()
        for optimizer in torchs:
            optimizer.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            # The momentum is the same, so the orthogonalised matrices are; two roundings of float32
            # per step differ.
            torch.testing.assert_close(a, b, rtol=0, atol=2**-22 * (step + 1))


class Wide(Own):
    def __init__(self, width: int = 10):
        super().__init__("muon", width=width)  # rows that two ranks, and four, do not share evenly


def muon_on_given_gradients(world, strategy):
    """(parameters, moments, gathers and reductions of each step, whether momentum is sharded)
    after three steps on the same gradients, whatever the layout.
    """
    run = make_run(world, Wide(), *words("unused", strategy, "--use_amp", "false"))
    counts = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in run.parallel.parameters:
            p.grad = torch.randn(p.shape, generator=generator)
            if strategy != "single":
                layout = (p.device_mesh, p.placements)
                p.grad = distribute_tensor(p.grad, *layout, src_data_rank=None)
        with Counter("all_gather_into_tensor") as gathers, Counter("reduce") as reductions:
            run.optimizer.step()
        counts.append((gathers.count, reductions.count))
    matrices = [p for p in run.parallel.parameters if p.ndim == 2]
    momenta = [run.optimizer.state[p]["momentum_buffer"] for p in matrices]
    sharded = any(local(momentum).numel() < momentum.numel() for momentum in momenta)
    return parameters_of(run), moments_of(run), counts, sharded


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(4, "fsdp"), pytest.param(4, "hsdp", marks=pytest.mark.slow)]
)
def test_sharded_muon_gathers_once_per_matrix_and_equals_one_process_bit_for_bit(ranks, strategy):
    parameters, moments, _, _ = muon_on_given_gradients(World(), "single")
    expected = [*parameters.values(), *moments]
    for results in on_ranks(ranks, muon_on_given_gradients, strategy):
        sharded_parameters, sharded_moments, counts, sharded = results
        assert counts == [(3, 0)] * 3, "three matrices"
        assert sharded
        for a, b in zip([*sharded_parameters.values(), *sharded_moments], expected, strict=True):
            # Each element of the momentum is computed alone, and every rank orthogonalises the same
            # gathered matrix; AdamW's kernel rounds a shard's tail differently.
            rtol = 0 if a.ndim == 2 else 2**-22
            torch.testing.assert_close(a, b, rtol=rtol, atol=0)


class Embedded(Tiny):
    """An embedding, hidden matrices, an output layer: Muon is for the hidden ones."""

    def build_model(self):
        return nn.ModuleDict(
            {"embedding": nn.Embedding(4, 8), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 1)}
        )

    def loss_sum(self, model, batch):
        hidden = batch["x"] + model["embedding"](batch["x"][:, 0].long().clamp(0, 3))
        error = model["head"](model["hidden"](hidden).tanh()).squeeze(-1) - batch["y"]
        return (error.square() * batch["counts"]).sum()


def test_optim_name_muon_orthogonalises_hidden_matrices_alone():
    muon = ["--optim.name", "muon", "--optim.momentum", 0.95]
    run = make_run(World(), Embedded(), *words("unused", "single", *muon))
    names = {id(p): name for name, p in run.parallel.module.named_parameters()}
    groups = {
        group["name"]: [names[id(p)] for p in group["params"]]
        for group in run.optimizer.param_groups
    }
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
    runs = []
    for fused in ("true", "false"):
        muon = [*FP16, "--optim.name", "muon", "--optim.fused", fused]
        run = make_run(World(), Tiny(), *words("unused", "single", *muon))
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
        (["--optim.ema", "1"], "optim.ema=1"),
        (["--optim.ema", "on"], "optim.ema=on"),
    ]:
        with pytest.raises(ConfigError) as error:
            load_config(words_, environ={})
        assert said in str(error.value)
