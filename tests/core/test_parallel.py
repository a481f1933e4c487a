"""Strategies: what is picked, what is refused, and what makes replicas equal."""

import atexit
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from messages import message_of
from ranks import on_ranks
from tiny import Tiny, make_run, moments_of, parameters_of, save, take_steps, whole
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from dist_amp import world as worlds
from dist_amp.checkpoint.state import load
from dist_amp.config.auto import pick_cast, pick_reduction, pick_strategy
from dist_amp.config.validate import check_parallel
from dist_amp.distributed.process_group import abort_process_groups
from dist_amp.errors import ConfigError
from dist_amp.settings import ParallelConfig, PrecisionConfig, RunConfig
from dist_amp.world import World, locate

TWO = World(world_size=2, local_world_size=2)


def test_auto_says_what_it_picked_and_why_and_one_process_runs_as_single(capsys):
    assert pick_strategy(ParallelConfig(), nn.Linear(4, 4), TWO) == "ddp"
    said = "parallel.strategy=auto: ddp, because weights, gradients and moments"
    assert said in capsys.readouterr().out
    for strategy in ("auto", "ddp", "hsdp"):
        one = pick_strategy(ParallelConfig(strategy=strategy), nn.Linear(4, 4), World())
        assert one == "single"
        said = f"parallel.strategy={strategy} needs more than one process; running as single"
        assert (said in capsys.readouterr().err) == (strategy != "auto")


def test_auto_shards_a_model_that_takes_more_than_half_of_the_gpu(monkeypatch, capsys):
    class Properties:
        total_memory = 4 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    gpus = World(world_size=2, local_world_size=2, device=torch.device("cuda", 0))
    with torch.device("meta"):
        small, large = nn.Linear(1000, 1000), nn.Linear(20_000, 20_000)
    assert pick_strategy(ParallelConfig(), small, gpus) == "ddp"
    assert pick_strategy(ParallelConfig(), large, gpus) == "fsdp"
    assert "(5.96 GiB) do not fit in half of the device's 4.0 GiB" in capsys.readouterr().out
    machines = replace(gpus, world_size=16, local_world_size=8)
    assert pick_strategy(ParallelConfig(), large, machines) == "hsdp"
    assert "but do when sharded over the 8 ranks of a machine" in capsys.readouterr().out
    assert pick_strategy(ParallelConfig(), large, replace(machines, local_world_size=2)) == "fsdp"


def test_auto_reduces_after_every_micro_batch_where_whole_gradients_take_a_quarter(capsys):
    gpus = World(world_size=8, local_world_size=8, device=torch.device("cuda", 0))
    with torch.device("meta"):
        model = nn.Linear(20_000, 20_000)
    for memory, expected in ((4, "every"), (80, "last")):
        config = pick_reduction(ParallelConfig(), model, gpus, memory * 2**30)
        assert config.accumulate_reduce == expected
    said = capsys.readouterr().out
    assert "accumulate_reduce=auto: every, because whole gradients (1.49 GiB) take more" in said


BF16_PARAMS, BF16_REDUCE = {"param_dtype": "bf16"}, {"reduce_dtype": "bf16"}
# strategy, settings of [parallel] and of [precision], what is said
REFUSED = [
    ("ddp", {"comm_dtype": "fp16"}, {}, "=fp16 needs precision.dtype=fp16"),
    ("ddp", {"comm_dtype": "bf16"}, {}, "comm_dtype=bf16 needs GPUs"),
    ("fsdp", {"comm_dtype": "bf16"}, {}, "has no effect under fsdp; use reduce_dtype"),
    ("fsdp", {"reduce_dtype": "fp16"}, {}, "=fp16 needs precision.dtype=fp16"),
    ("fsdp", BF16_PARAMS, {"use_amp": False}, "=bf16 needs use_amp=true"),
    ("fsdp", BF16_REDUCE, {"use_amp": False}, "=bf16 needs use_amp=true"),
    ("fsdp", BF16_REDUCE, {"cast_by": "autocast"}, "precision.cast_by=pol"),
    ("fsdp", {"cpu_offload": True}, {}, "cpu_offload=true needs a GPU"),
    ("hsdp", {"replicas": 3}, {}, "does not divide 2 ranks"),
]


@pytest.mark.parametrize(("strategy", "parallel", "precision", "said"), REFUSED)
def test_settings_that_do_not_go_together_are_refused(strategy, parallel, precision, said):
    module, config = nn.Identity(), ParallelConfig(**parallel)
    cast = pick_cast(PrecisionConfig(**precision), strategy, module, TWO)
    assert said in message_of(64, check_parallel, config, strategy, cast, module, TWO)


def test_single_with_several_processes_is_refused():
    said = "single is for one process, but there are 2; use auto, ddp, fsdp or hsdp"
    with pytest.raises(ConfigError, match=said):
        pick_strategy(ParallelConfig(strategy="single"), nn.Linear(4, 4), TWO)


@pytest.mark.bad_input("RANK, WORLD_SIZE missing or inconsistent")
@pytest.mark.bad_input("srun or mpirun, which start processes that don't know of each other")
@pytest.mark.bad_input("nccl without a GPU; more processes than GPUs")
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("", "run.device=cuda, but torch finds no GPU"),
        ("RANK=0", "WORLD_SIZE is not set"),
        ("WORLD_SIZE=2", "RANK is not set"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2 must be below WORLD_SIZE=2"),
        ("RANK=one WORLD_SIZE=2", "RANK='one'"),
        ("RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4", "4 processes .* than its 2 GPUs; "),
        (
            "SLURM_STEP_NUM_TASKS=2",
            "SLURM_STEP_NUM_TASKS=2, .* start one process per machine .srun",
        ),
        ("PMI_SIZE=2", "PMI_SIZE=2, .* torchrun --standalone --nproc_per_node=2 -m dist_amp.train"),
        ("SLURM_NTASKS=8 SLURM_PROCID=0", ""),  # a script of sbatch, a shell of salloc
        ("SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", ""),  # a shell inside a step
        ("PMI_SIZE=2 RANK=0 WORLD_SIZE=1", ""),  # separate runs
    ],
)
def test_an_environment_in_which_ranks_do_not_find_each_other_is_refused(
    monkeypatch, environment, words
):
    monkeypatch.setattr(os, "environ", dict(word.split("=") for word in environment.split()))
    has_gpus = "LOCAL_RANK" in environment
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * has_gpus)
    device = "auto" if environment else "cuda"
    if words:
        with pytest.raises(ConfigError, match=words):
            locate(RunConfig(device=device))
    else:
        assert locate(RunConfig(device=device)).world_size == 1


def compressed(world):
    words = ["--parallel.strategy", "ddp", "--precision.dtype", "fp16"]
    words += ["--precision.scaler.init_scale", 64]
    plain = make_run(world, Tiny(), *words)
    hooked = make_run(world, Tiny(), *words, "--parallel.comm_dtype", "fp16")
    take_steps(plain, 3)
    take_steps(hooked, 3)
    a, b = parameters_of(plain), parameters_of(hooked)
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_compressing_gradients_to_fp16_changes_them_by_its_rounding_only():
    # AdamW moves a parameter by lr = 3e-4 at most per step; fp16 keeps 11 bits of what decides how
    # far.
    for error in on_ranks(2, compressed):
        assert 0 < error < 3 * 3e-4 * 2**-5


class Normed(Tiny):
    """Batch statistics: the one thing that ranks see differently."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def test_gradients_under_ddp_lie_in_its_buckets_and_take_no_memory_of_their_own():
    assert on_ranks(2, storages_of_gradients) == [1, 1]


def storages_of_gradients(world):
    """How many blocks of memory hold the gradients that the optimizer gets."""
    run = make_run(world, Tiny(), "--parallel.strategy", "ddp")
    storages = set()

    def note(*_):
        storages.update(p.grad.untyped_storage().data_ptr() for p in run.model.parameters())

    run.optimizer.register_step_pre_hook(note)
    take_steps(run, 1)
    return len(storages)


def test_a_buffer_with_two_names_has_both_after_a_forward_without_side_effects():
    run = make_run(World(), Tiny())
    module = run.parallel.module
    shared = torch.zeros(())
    module.register_buffer("first", shared)
    module.register_buffer("second", shared)
    with run.parallel.no_side_effects():
        module.second = module.second + 1
        module.first += 1
    assert module.first is module.second is shared
    assert shared == 0


def steps_with_batch_norm(world):
    words = ["--precision.dtype", "bf16", "--precision.scaler.init_scale", 64]
    run = make_run(world, Normed(), "--parallel.strategy", "fsdp", *words)
    assert run.precision.cast_by == "autocast"
    assert all(report.applied for report in take_steps(run, 2))
    before = run.parallel.module[1].running_mean.clone()
    with run.parallel.evaluating():
        assert not run.model.training
    assert run.model.training
    return before, run.parallel.module[1].running_mean.clone()


def test_batch_norm_under_fsdp_is_cast_by_autocast_and_averaged_before_evaluation():
    before, after = map(torch.stack, zip(*on_ranks(2, steps_with_batch_norm), strict=True))
    assert not torch.equal(*before)
    assert torch.equal(*after)
    torch.testing.assert_close(after[0], before.mean(0))


def test_the_cast_that_auto_picks_is_said_with_the_reason(capsys):
    fsdp = {"strategy": "fsdp", "module": Normed().build_model(), "world": TWO}
    assert pick_cast(PrecisionConfig(), **fsdp).cast_by == "autocast"
    reason = "because the policy would not cast the batch statistics of 1\n"
    assert capsys.readouterr().out == f"precision.cast_by=auto: autocast, {reason}"
    assert pick_cast(PrecisionConfig(use_amp=False), **fsdp).cast_by == "auto"
    assert pick_cast(PrecisionConfig(), **{**fsdp, "strategy": "ddp"}).cast_by == "auto"
    for module, cast_by in (
        (spectral_norm(nn.Linear(8, 8)), "autocast"),
        (orthogonal(nn.Linear(8, 8)), "autocast"),
        (weight_norm(nn.Linear(8, 8)), "auto"),
        (nn.Linear(1, 1), "auto"),
    ):
        assert pick_cast(PrecisionConfig(), **{**fsdp, "module": module}).cast_by == cast_by
        assert bool(capsys.readouterr().out) == (cast_by == "autocast")


class DropsLayers(Tiny):
    """Random numbers choose its layers, and so the order in which gradients are ready."""

    def build_model(self):
        model = super().build_model()
        model.forward = partial(forward_with_some, model)
        return model


def forward_with_some(model, x):
    for layer in model[:-1]:
        if torch.rand(()) < 0.5:
            x = layer(x)
    return model[-1](x)


def first_differing_resume(world, folder, steps):
    """The resume point after which the next three steps differ from the undisturbed run's."""
    words = ["--parallel.strategy", "ddp", "--train.accumulation_steps", 2, "--run.dir", folder]
    words += ["--use_amp", "false", "--train.micro_batch_size", 2, "--checkpoint.keep", 100]
    task = DropsLayers(depth=5)
    run = make_run(world, task, *words)
    expected, checkpoints = [], []
    for _ in range(steps):
        take_steps(run, 1)
        expected.append([*parameters_of(run).values(), *moments_of(run)])
        checkpoints.append(save(run))
    for step, checkpoint in enumerate(checkpoints[:-1], start=1):
        resumed = make_run(world, task, *words)
        load(resumed, checkpoint)
        for undisturbed in expected[step : step + 3]:
            take_steps(resumed, 1)
            with resumed.parallel.no_side_effects():  # as a replay, which leaves no gradients
                pass
            now = [*parameters_of(resumed).values(), *moments_of(resumed)]
            if not all(map(torch.equal, now, undisturbed)):
                return step
    return None


SIXTY = [pytest.param(ranks, 61, marks=pytest.mark.slow) for ranks in (3, 5, 6, 7)]


@pytest.mark.parametrize(("ranks", "steps"), [(3, 4), *SIXTY])
def test_ranks_resume_bit_for_bit_whatever_order_gradients_were_ready_in(ranks, steps, tmp_path):
    """Not two, since DDP divides by the number of ranks in two ways, which differ unless it is a
    power of two.
    """
    words = (str(tmp_path), steps)
    different = on_ranks(ranks, first_differing_resume, *words, timeout_seconds=900)
    assert different == [None] * ranks


def main():
    """A run built in a script under torchrun, where nobody has made a process group."""
    run = make_run(None, Tiny(), "--parallel.strategy", "fsdp", "--use_amp", "false")
    take_steps(run, 2)
    torch.save(parameters_of(run), f"rank{run.world.rank}.pt")


def test_a_script_under_torchrun_joins_the_ranks_by_itself(launch, tmp_path):
    assert [rank.returncode for rank in launch.each(2, module="test_parallel")] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert all(value.isfinite().all() for value in second.values())


def test_a_script_whose_other_ranks_are_gone_ends_without_an_error_of_its_own(monkeypatch):
    @contextmanager
    def ranks_that_die(config):
        yield TWO
        raise RuntimeError("connection closed by peer")

    at_exit = []
    monkeypatch.setattr(worlds, "joined", ranks_that_die)
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(partial(*call)))
    assert locate(RunConfig()) is TWO
    at_exit[0]()


@pytest.mark.parametrize("remove", [False, True])
def test_process_groups_are_aborted_also_without_the_private_function(remove, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if remove:
        monkeypatch.delattr(dist.distributed_c10d, "_abort_process_group")
    abort_process_groups()
    assert dist.is_initialized() is remove
    if remove:
        dist.destroy_process_group()


def norm_without_a_gradient(world, strategy):
    run = make_run(world, Tiny(), "--parallel.strategy", strategy)
    *parameters, last = run.parallel.parameters
    for p in parameters:
        p.grad = torch.ones_like(p)
    return run.parallel.global_grad_norm().item(), whole(last.grad).tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_missing_gradient_counts_as_zero(strategy):
    others = sum(p.numel() for p in Tiny().build_model().parameters()) - 1
    for norm, missing in on_ranks(2, norm_without_a_gradient, strategy):
        assert norm == pytest.approx(others**0.5)
        assert missing == [0.0], "which its optimizer decays"


class Widest(Tiny):
    """32 MiB of parameters, in shapes of their own."""

    def build_model(self):
        wide = [nn.Linear(1040, 1040, bias=False) for _ in range(8)]
        return nn.Sequential(nn.Linear(8, 1040), *wide, nn.Linear(1040, 1))

    def blocks(self, model):
        return list(model)[1:-1]


def memory_of_the_first_update(world):
    """Bytes by which the process's peak rises in the first update."""
    run = make_run(world, Widest(), "--parallel.strategy", "fsdp", "--use_amp", "false")
    run.model(torch.zeros(2, 8)).sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = resident()
    run.optimizer.step()
    return resident() - before


def resident():
    return 2**10 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_the_first_sharded_update_takes_no_memory_of_the_whole_models_size():
    # Zeros of parameters, gradients and two moments would be 132 MiB; a rank's moments are 33.
    for risen in on_ranks(2, memory_of_the_first_update):
        assert risen < 66 * 2**20
