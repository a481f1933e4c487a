"""Where a run started: variables, command line, commit, hosts."""

import subprocess

import torch
from tiny import Tiny, make_run

from dist_amp.supervise.environment import (
    command_line,
    environment,
    git_state,
    this_rank,
    variables,
)
from dist_amp.world import World


def test_variables_that_matter_are_reported_and_none_that_holds_a_secret():
    kept = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "HF_HOME": "/x", "SLURM_JOB_ID": "7"}
    kept["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    left_out = "HOME PATH HF_TOKEN HUGGING_FACE_HUB_TOKEN DIST_AMP_TASK__ARGS__API_KEY"
    left_out += " WANDB_API_KEY TORCHELASTIC_PASSWORD SLURM_JWT HF_HUB_X MASTER_PWD LOCAL_DSN"
    environ = kept | dict.fromkeys(left_out.split(), "1")
    environ["HF_ENDPOINT"] = "https://me:pw@hub.example/a"
    assert variables(environ) == kept | {"HF_ENDPOINT": "https://***@hub.example/a"}


def test_the_command_line_is_reported_without_the_values_of_secret_settings():
    words = ["python", "-m", "dist_amp.train", "--task.args.api_key", "abc", "--run.dir=a b"]
    words += ["--data.path=https://me:pw@host/x", "--task.args.token=xyz"]
    line = command_line(words)
    assert line == (
        "python -m dist_amp.train --task.args.api_key '***' '--run.dir=a b' "
        "'--data.path=https://***@host/x' '--task.args.token=***'"
    )


def test_the_commit_is_that_of_the_tasks_repository(tmp_path, monkeypatch):
    def git(*words):
        who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        return subprocess.check_output(["git", *who, *words], cwd=tmp_path, text=True).strip()

    assert git_state(tmp_path) == {}, "no repository"
    git("init", "-q", "-b", "trunk")
    assert git_state(tmp_path) == {}, "no commit"
    task = tmp_path / "task.py"
    task.write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "v1")
    (tmp_path / "output.txt").write_text("not tracked")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    task.write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == {}, "no git"


def test_hosts_are_grouped_by_what_their_ranks_see():
    seen = this_rank(torch.device("cpu"))
    host_a, host_b = (seen | {"host": name} for name in "ab")
    found = environment(make_run(World(), Tiny()), [host_a, host_a, host_b, host_a])
    hosts = [(host["host"], host["ranks"]) for host in found["hosts"]]
    assert hosts == [("a", "0, 1, 3"), ("b", "2")]
    assert found["versions"]["torch"] == torch.__version__
