"""Strategies: what is picked, what is refused, and what makes replicas equal."""

import atexit
import os
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from messages import message_of
from ranks import on_ranks
from tiny import Tiny, make_run, parameters_of, take_steps
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from dist_amp import world as worlds
from dist_amp.config.auto import pick_cast, pick_reduction, pick_strategy
from dist_amp.config.validate import check_parallel
from dist_amp.distributed.process_group import abort_process_groups
from dist_amp.errors import ConfigError
from dist_amp.settings import ParallelConfig, PrecisionConfig, RunConfig
from dist_amp.world import World, locate

TWO = World(world_size=2, local_world_size=2)


def linear(width):
    """A layer without memory: of 5.96 GiB with gradients and moments, if it is 20,000 wide."""
    with torch.device("meta"):
        return nn.Linear(width, width)


def gpus(ranks, per_machine):
    device = torch.device("cuda", 0)
    return World(world_size=ranks, local_world_size=per_machine, device=device)


AUTO, ONE = "parallel.strategy=auto: ", "=ddp needs more than one process; running as single"
PICKED = [  # (strategy, model's width, world, what is picked, what is said)
    ("auto", 4, TWO, "ddp", f"{AUTO}ddp, because weights, gradients and moments"),
    ("auto", 4, World(), "single", ""),
    ("ddp", 4, World(), "single", ONE),
    ("auto", 1000, gpus(2, 2), "ddp", "fit in half of the device's 4.0 GiB"),
    ("auto", 20_000, gpus(2, 2), "fsdp", "(5.96 GiB) do not fit in half of the device's 4.0 GiB"),
    ("auto", 20_000, gpus(16, 8), "hsdp", "but do when sharded over the 8 ranks of a machine"),
    ("auto", 20_000, gpus(16, 2), "fsdp", "4.0 GiB\n"),
]


@pytest.mark.parametrize(("strategy", "width", "world", "picked", "said"), PICKED)
def test_the_strategy_that_auto_picks_is_said_with_the_reason(
    monkeypatch, capsys, strategy, width, world, picked, said
):
    gpu = SimpleNamespace(total_memory=4 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert pick_strategy(ParallelConfig(strategy=strategy), linear(width), world) == picked
    out, err = capsys.readouterr()
    assert said in out + err
    assert bool(out + err) == bool(said)


def test_auto_reduces_after_every_micro_batch_where_whole_gradients_take_a_quarter(capsys):
    for memory, expected in ((4, "every"), (80, "last")):
        config = pick_reduction(ParallelConfig(), linear(20_000), gpus(8, 8), memory * 2**30)
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


def test_the_cast_that_auto_picks_is_said_with_the_reason(capsys):
    fsdp = {"strategy": "fsdp", "module": nn.Sequential(nn.BatchNorm1d(8)), "world": TWO}
    assert pick_cast(PrecisionConfig(), **fsdp).cast_by == "autocast"
    reason = "because the policy would not cast the batch statistics of 0\n"
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
