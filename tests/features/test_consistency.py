"""What must be equal on all ranks: code and settings, samples, gradients and what a model keeps."""

import math
import platform
import re
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import RankFailed, on_ranks
from tiny import Tiny, log, make_run, take_steps, variant

from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.diagnostics import consistency
from dist_amp.diagnostics.consistency import Consistency, check_ranks_agree
from dist_amp.errors import ConfigError, NumericsError
from dist_amp.world import local


def difference_of_ranks(world, words, files, torch_of_rank_1):
    """The error of check_ranks_agree if rank 1 has these settings, files and torch; "" for none."""
    mine = [] if world.rank == 0 else words.split()
    text = to_toml(load_config(mine or ["--data.path", "/disk"], environ={}))
    hashes = consistency.code_hashes("tiny:Tiny") | (files if world.rank == 1 else {})
    version = torch_of_rank_1 if world.rank == 1 else "2.10.0"
    known = patch.object(consistency, "code_hashes", lambda target: hashes)
    with known, patch.object(torch, "__version__", version):
        try:
            check_ranks_agree("tiny:Tiny", text, world)
        except ConfigError as error:
            return str(error)
    return ""


FILES = {"dist_amp/step.py": "0123abcd", "own.py": "89abcdef"}
OTHER_FILES = "dist_amp/step.py is 0123abcd, but MINE on rank 0; own.py is 89abcdef, but absent on "


@pytest.mark.bad_input("nodes with different code, config or versions")
@pytest.mark.parametrize(
    ("words", "files", "version", "what"),
    [
        ("--data.path /scratch --data.workers 2", {}, "2.10.0", ""),  # settings of a machine
        ("--optim.lr 0.1", {}, "2.10.0", "data.path is off, but set on rank 0; optim.lr is 0.1"),
        ("", FILES, "2.10.0", OTHER_FILES),
        ("", {}, "2.11.0", "torch is 2.11.0, but 2.10.0 on rank 0; start all"),
    ],
)
def test_ranks_with_other_code_settings_or_torch_get_each_difference_with_both_values(
    words, files, version, what
):
    what = what.replace("MINE", consistency.code_hashes("tiny:Tiny")["dist_amp/step.py"])
    for error in on_ranks(2, difference_of_ranks, words, files, version):
        said = f"the ranks differ: on rank 1 ({platform.node()}): {what}"
        assert error.startswith(said) if what else not error


def test_the_users_file_is_compared_and_hidden_files_are_not(tmp_path, monkeypatch):
    for name in ("step.py", ".step.py", "tasks/own.py", ".ipynb_checkpoints/step-checkpoint.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(consistency, "__file__", str(tmp_path / "diagnostics" / "consistency.py"))
    expected = {"dist_amp/step.py", "dist_amp/tasks/own.py", "tiny.py"}
    assert set(consistency.code_hashes("tiny:Tiny")) == expected


def one_rank_corrupts_its_gradient_after_the_reduction(world, strategy):
    """(whether the step was applied, the scale after it, the consistency check's message)."""
    words = ["--parallel.strategy", strategy, "--train.micro_batch_size", 2]
    run = make_run(world, Tiny(), *words, "--precision.dtype", "fp16")
    checks = Consistency(run)
    global_grad_norm = run.parallel.global_grad_norm

    def corrupted():
        if world.rank == 1:
            local(run.parallel.parameters[0].grad)[0] = math.inf
        return global_grad_norm()

    run.parallel.global_grad_norm = corrupted
    (report,) = take_steps(run, 1)
    run.metrics.after_step(report)
    message = ""
    try:
        checks.on_log(log(run))
    except NumericsError as error:
        message = str(error)
    return report.applied.item(), run.scaler.get_scale(), message


def test_inf_on_one_rank_after_the_reduction_skips_under_fsdp_and_is_named_under_ddp():
    results = on_ranks(2, one_rank_corrupts_its_gradient_after_the_reduction, "fsdp")
    assert results == [(False, 32768.0, "")] * 2
    results = on_ranks(2, one_rank_corrupts_its_gradient_after_the_reduction, "ddp")
    assert [applied for applied, *_ in results] == [True, False], "DDP's norm is not summed"
    for *_, message in results:
        assert re.search("on rank 1 and .* on rank 0", message)


def kept_unequal(world):
    Consistency(make_run(world, variant(target=np.random.default_rng().random(3))))


@pytest.mark.bad_input("a tensor that the task keeps and that differs between ranks")
def test_a_kept_tensor_that_differs_between_ranks_is_refused_by_name():
    said = "attribute target is not the same on rank 1 as on rank 0; b"
    with pytest.raises(RankFailed, match=said):
        on_ranks(2, kept_unequal)
