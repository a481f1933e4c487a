"""What TensorBoard gets: tags with units, an overview, where the run started; and nothing of it can
end a run.
"""

import errno
import json
import os
import re
import subprocess
import time
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from conftest import ROOT
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer.record_writer import RecordWriter
from tiny import Tiny, make_run, take_steps

from dist_amp.diagnostics.numerics import Numerics
from dist_amp.step import evaluate
from dist_amp.supervise.banner import (
    code_folder,
    environment,
    git_state,
    this_rank,
    variables,
)
from dist_amp.supervise.callbacks import train_metrics
from dist_amp.supervise.lifecycle import open_run
from dist_amp.telemetry import writers
from dist_amp.telemetry.tensorboard_view import (
    TAGS,
    add_overview,
    describe,
    main_tags,
    pinned_url,
    watch_line,
)
from dist_amp.telemetry.writers import TensorBoardWriter
from dist_amp.world import World


class Complete(Tiny):
    """Has every optional method that leads to a tag."""

    def tokens(self, batch):
        return batch["x"].numel()

    def flops_per_item(self, model):
        return 1e6

    def metrics(self, model, batch):
        return {"error": batch["y"].abs().sum()}

    def train_metrics(self, run, report):
        return {"norm_squared": report.norm**2}


def everything(world, folder):
    """Write all that a run may write to TensorBoard."""
    words = ["--run.dir", folder, "--precision.dtype", "fp16", "--debug.numerics", "true"]
    words += ["--eval.every", 2, "--metrics.log_every", 2, "--train.steps", 4]
    words += ["--precision.scaler.init_scale", 2.0**40, "--metrics.peak_flops", 1e12]
    run = make_run(world, Complete(), *words)
    open_run(run)
    numerics = Numerics(run)
    for _ in range(2):
        for report in take_steps(run, 2):
            run.metrics.record(report)
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data, train_metrics(run, report))
        run.metrics.write(run.metrics.read())
        run.metrics.write_evaluation(run.step, evaluate(run))
    batch = next(run.data)
    run.step = 3
    numerics.before_step(batch)
    run.step = 4
    numerics.after_step(report, batch)
    run.metrics.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    on_ranks(2, everything, str(folder))
    return folder


def events_of(folder, rank=0):
    return EventAccumulator(str(folder / "tensorboard" / f"rank{rank:05d}")).Reload()


def scalars(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_every_tag_that_a_run_writes_is_in_the_table_with_its_unit_and_meaning(folder):
    written = {tag for rank in (0, 1) for tag in events_of(folder, rank).Tags()["scalars"]}
    assert [tag for tag in sorted(written) if not describe(tag)] == []
    unused = [pattern for pattern in TAGS if not any(fnmatchcase(tag, pattern) for tag in written)]
    on_a_gpu = [pattern for pattern in TAGS if pattern.startswith("gpu/")]
    on_a_gpu += ["memory/allocator_retries", "memory/reserved_bytes"]
    elsewhere = [
        "memory/host_rss_GiB",
        "host/memory_used_GiB",
        "host/available_GiB",
        "train/lr_*",
        "ranks/slowest_rank",
        *(
            "train/padding_pct",
            "train/counted_pct",
            "train/counted_pct_*",
            "eval/loss_*",
        ),  # of tasks that read tokens
    ]
    lost = [
        "numerics/lost_update_share/*"
    ]  # needs a step that is taken by the optimizer that is hooked
    assert set(unused) <= {*on_a_gpu, *elsewhere, *lost, "sample"}
    assert describe("loss/fp16") == ""


def test_a_tag_has_its_unit_and_meaning_in_the_file_and_all_its_points_as_plain_values(folder):
    events = events_of(folder, 1)
    assert events.SummaryMetadata("memory/peak_GiB").summary_description.startswith(
        "GiB: highest since the start"
    )
    for tag in events.Tags()["scalars"]:
        assert [step for step, _ in scalars(events, tag)] == [2, 4], "the first one too"


def test_readable_units_are_those_of_the_other_tags(folder):
    events = events_of(folder)
    for readable, plain, factor in [
        ("memory/peak_GiB", "memory/peak_bytes", 2**-30),
        ("perf/mfu_pct", "throughput/mfu", 100),
    ]:
        for (_, one), (_, other) in zip(
            scalars(events, readable), scalars(events, plain), strict=True
        ):
            assert one == pytest.approx(other * factor, rel=1e-6), "both are rounded to float32"
    assert [value for _, value in scalars(events, "amp/loss_scale_log2")] == [38, 36], (
        "each step overflows"
    )
    assert [value for _, value in scalars(events, "amp/skipped_steps")] == [2, 4]
    assert [value for _, value in scalars(events, "amp/skipped_in_interval")] == [2, 2]


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_address_pins_six_charts_that_a_run_has(folder, has_tokens):
    url = urlsplit(pinned_url(has_tokens))
    assert (url.hostname, url.port, url.fragment) == ("localhost", 6006, "timeseries")
    assert not set(url.query) & set(' "{}[]()|<>'), "a terminal makes a link of all of it"
    cards = json.loads(parse_qs(url.query)["pinnedCards"][0])
    assert len(cards) == len({card["tag"] for card in cards}) == 6
    assert {card["plugin"] for card in cards} == {"scalars"}
    assert {card["tag"] for card in cards} <= set(events_of(folder).Tags()["scalars"])
    assert ("throughput/tokens_per_second" in {card["tag"] for card in cards}) == has_tokens
    (colours,) = parse_qs(url.query)["runColorGroup"]
    groups = [re.search(colours.removeprefix("regex:"), name).groups() for name in
              ("rank00000", "rank00001", "run1/tensorboard/rank00000", "run1/tensorboard/rank00001",
               "run2/tensorboard/rank00000")]  # fmt: skip
    assert len(set(groups[:2])) == 2, "one run: a colour per rank"
    assert groups[2] == groups[3] != groups[4], "several runs: a colour per run"


def test_the_watch_line_names_the_folder_and_how_to_compare(tmp_path):
    line = watch_line(Path("runs/mine"), True)
    assert line.startswith(
        "watch  tensorboard --logdir runs/mine/tensorboard; beside other runs: --logdir runs\n"
    )
    assert "; beside" not in watch_line(Path("mine"), True)


def test_the_overview_is_a_layout_of_the_six_charts_whose_patterns_match_what_is_written(
    tmp_path, folder
):
    writer = TensorBoardWriter(tmp_path / "tensorboard/rank00000", 1)
    writer.write_first(add_overview(True))
    writer.close()
    (event,) = events_of(tmp_path).Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    assert category.title == "Overview"
    assert [chart.title for chart in category.chart] == list(main_tags(True))
    written = events_of(folder).Tags()["scalars"]
    for chart in category.chart:
        for pattern in chart.multiline.tag:
            assert [tag for tag in written if re.match(pattern, tag)], pattern


def begun(folder, warnings):
    writer = TensorBoardWriter(folder / "tensorboard/rank00000", 1, warnings.append)
    writer.write_first(lambda to: to.add_text("config", "first", 0))
    writer.write_first(add_overview(False))
    return writer


def write_all(writer, step):
    writer.write_scalars({"train/loss": 1.0 * step}, step)


@pytest.mark.bad_input("a TensorBoard folder that can't be made")
def test_a_folder_that_can_not_be_made_is_one_warning_and_nothing_else(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    warnings = []
    writer = begun(tmp_path, warnings)
    for step in (1, 2):
        write_all(writer, step)
    writer.close()
    (warning,) = warnings
    assert "rank00000 can't be written (" in warning


@pytest.mark.bad_input("a disk that is full for a while")
def test_after_a_full_disk_a_new_file_begins_with_the_config_the_overview_and_the_descriptions(
    tmp_path, monkeypatch
):
    warnings = []
    monkeypatch.setattr(writers, "RETRY_SECONDS", 0.0)

    def no_space(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "write", no_space)
    writer = begun(tmp_path, warnings)
    deadline = time.monotonic() + 30
    while (
        not warnings and time.monotonic() < deadline
    ):  # the writer's thread passes its error on to a later write
        write_all(writer, 1)
        time.sleep(0.01)
    monkeypatch.undo()
    writer._writer = None  # as the next error makes it
    write_all(writer, 2)
    writer.close()
    assert len(warnings) == 1
    events = events_of(tmp_path)
    assert {"config/text_summary", "custom_scalars__config__"} <= set(events.Tags()["tensors"])
    assert events.SummaryMetadata("train/loss").summary_description
    assert scalars(events, "train/loss")[-1] == (2, 2.0)


def test_scalars_of_a_step_are_one_event_after_the_descriptions_of_new_tags(tmp_path):
    writer, events = TensorBoardWriter(tmp_path, 1), []
    to = writer._open()
    to.file_writer.add_summary = lambda summary, step: events.append(
        (step, [value.tag for value in summary.value])
    )
    for step in (1, 2):
        writer.write_scalars({"train/loss": 1.0, "loss/unknown": 2.0}, step)
    writer.close()
    both = ["train/loss", "loss/unknown"]
    assert events == [(1, ["train/loss"]), (1, both), (2, both)]


def test_the_documented_table_has_every_tag_with_its_unit_and_meaning():
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == {tag: f"{unit} | {meaning}" for tag, (unit, meaning) in TAGS.items()}


# ---- where the run started ----


def test_variables_that_matter_are_reported_and_none_that_holds_a_secret():
    environ = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": "/x",
        "HF_ENDPOINT": "https://me:pw@hub.example/a",
        "SLURM_JOB_ID": "7",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HOME": "/root",
        "PATH": "/bin",
    }
    secret = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "DIST_AMP_TASK__ARGS__API_KEY", "WANDB_API_KEY")
    environ |= dict.fromkeys((*secret, "TORCHELASTIC_PASSWORD", "SLURM_JWT"), "1")
    assert variables(environ) == {
        "HF_ENDPOINT": "https://***@hub.example/a",
        "HF_HOME": "/x",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "SLURM_JOB_ID": "7",
    }


def test_the_commit_and_the_changed_files_are_those_of_the_tasks_repository(tmp_path, monkeypatch):
    assert git_state(tmp_path) == {}, "no repository"

    def git(*words):
        who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "trunk")
    assert git_state(tmp_path) == {}, "no commit"
    (tmp_path / "task.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = git_state(tmp_path)
    assert clean["commit"] == git("rev-parse", "HEAD").strip()
    assert (clean["branch"], clean["dirty"], clean["changed_files"]) == ("trunk", False, [])
    (tmp_path / "task.py").write_text("2")
    (tmp_path / "output.txt").write_text("not tracked")
    changed = git_state(tmp_path)
    assert (changed["dirty"], changed["changed_files"]) == (True, ["task.py"])
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == {}, "no git"


def test_the_code_of_a_task_is_in_its_files_folder_or_the_current_one_if_ours_or_a_notebooks():
    from dist_amp.tasks.sinusoid import Sinusoid

    assert code_folder(Tiny()) == Path(__file__).parent
    assert code_folder(Sinusoid()) == Path.cwd()
    assert code_folder(type("Defined", (), {"__module__": "__main__"})()) in {
        Path.cwd(),
        Path(__file__).parent,
    }


def test_hosts_are_grouped_by_what_their_ranks_see():
    run = make_run(World(), Tiny())
    one, other = (
        this_rank(torch.device("cpu")) | {"host": "a"},
        this_rank(torch.device("cpu")) | {"host": "b"},
    )
    found = environment(run, [one, one, other, one])
    assert [(host["host"], host["ranks"]) for host in found["hosts"]] == [
        ("a", "0, 1, 3"),
        ("b", "2"),
    ]
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.bad_input("an `environment.json` that can't be written")
def test_an_environment_that_can_not_be_written_is_a_warning(launch, tmp_path):
    (tmp_path / "run/environment.json").mkdir(parents=True)  # a folder can't be replaced by a file
    done = launch(0, "--task.target", "tiny:Tiny", "--train.steps", "2", "--run.dir", "run")
    assert done.returncode == 0, done.stderr
    assert (
        "run/environment.json can't be written (Is a directory); TensorBoard's text `environment`"
        in done.stderr
    )
    texts = events_of(tmp_path / "run").Tags()["tensors"]
    assert {"config/text_summary", "environment/text_summary", "custom_scalars__config__"} <= set(
        texts
    )


def test_what_starts_tensorboard_here_listens_on_this_machine_alone():
    files = [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "docker-compose.yml"]
    files += [*ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.*"), *ROOT.glob("dist_amp/**/*.py")]
    lines = [(path, line) for path in files for line in path.read_text().splitlines()]
    starts = [found for found in lines if re.search("tensorboard,? --", found[1])]
    assert len(starts) > 3
    assert not [line for _, line in starts if "bind_all" in line]
    opened = {path.name: path.read_text() for path, line in starts if "--host" in line}
    assert set(opened) == {"Dockerfile", "docker-compose.yml"}, (
        "in a container, whose port they publish"
    )
    for text in opened.values():
        assert "127.0.0.1:6006:6006" in text
        assert not re.search(r"(?<!127\.0\.0\.1:)\b6006:6006", text)
