"""A rank that hangs anywhere, from the start to the end: it is named, and all ranks end."""

import json
import re
import signal
from dataclasses import dataclass

import pytest
from forked import TESTS, Launch, finish
from test_train import TINY, wait_for

TIMEOUT = 6
METRICS = "dist_amp.telemetry.metrics:Metrics"
SNAPSHOT = "dist_amp.checkpoint.saver:take_snapshot"
KEEPS = "keeps_the_interpreter"
SAVES_NOTHING = "--checkpoint.every off"


@dataclass(frozen=True)
class Hang:
    where: str  # module:name, as in hanging.py
    rank: int = 0
    words: str = ""
    what: str = "hangs"
    place: str = "in hangs"
    ranks: int = 2
    resumes: bool = False


def rows(*quick, slow=()):
    return [*quick, *(pytest.param(row, marks=pytest.mark.slow) for row in slow)]


def words_of(words=""):
    run = "--task.target hanging:Hanging --train.steps 4 --checkpoint.every 2 --run.dir run"
    run += f" --optim.schedule constant --run.timeout_seconds {TIMEOUT} {words}"
    return [*TINY, *run.split()]


class Ended:
    """How a run has ended: its ranks, and its summary."""

    def __init__(self, launch, processes):
        self.ranks = [finish(process, 120) for process in processes]
        self.statuses = [rank.returncode for rank in self.ranks]
        self.said = "".join(rank.stderr for rank in self.ranks)
        self.summary = launch.folder / "run/summary.json"

    def check_summary(self, cause):
        summary = json.loads(self.summary.read_text())
        assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
        assert re.match(cause, summary["cause"])


def start(hang, launch):
    """The ranks of a run; what is planted has begun."""
    script = {"module": str(TESTS / "hanging.py")}
    words = words_of(hang.words)
    if hang.resumes:
        first = launch.each(hang.ranks, *words, **script, PLANT="")
        assert [rank.returncode for rank in first] == [0, 0], first[0].stderr
        (launch.folder / "run/summary.json").unlink()
        words += ["--train.steps", "6"]
    plant = f"{hang.where}:{hang.rank}:{hang.what}"
    if hang.what == "dies":
        plant += f" {hang.where}:{1 - hang.rank}:hangs"
    ranks = launch.start_each(hang.ranks, *words, **script, PLANT=plant)
    reached = launch.folder / "reached"
    wait_for(lambda: reached.exists() or any(rank.poll() for rank in ranks), plant)
    return ranks


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory):
    """{hang: how its run ended} of the tests that are selected. The runs wait at the same time."""
    items = [item for item in request.session.items if item.path == request.path]
    hangs = [item.callspec.params["hang"] for item in items if "hang" in item.fixturenames]
    launches = [Launch(tmp_path_factory.mktemp("hang")) for _ in hangs]
    started = [start(*pair) for pair in zip(hangs, launches, strict=True)]
    return {hang: Ended(*run) for hang, *run in zip(hangs, launches, started, strict=True)}


@pytest.mark.bad_input("a rank that hangs, also while it starts, saves or ends")
@pytest.mark.bad_input("a hang of the only rank, with a signal to stop, or in a loader worker")
@pytest.mark.parametrize(
    "hang",
    rows(
        Hang("hanging:loss_sum", 1),
        Hang(SNAPSHOT, 0),
        Hang("hanging:build_dataset", 0, place="at the start, in hangs"),
        Hang(f"{METRICS}.close_files", 1),
        Hang("hanging:loss_sum", what="hangs_once_it_is_told_to_stop", ranks=1),
        slow=[
            Hang("hanging:on_evaluation", 0, "--eval.every 2", place="in step 3, in hangs"),
            Hang("dist_amp.telemetry.writers:TensorBoardWriter.write", 1),
            Hang("dist_amp.supervise.preflight:only_process", 0),
            Hang("dist_amp.checkpoint.background:Staging.copy", 1),
            Hang("hanging:build_dataset", 1),
            Hang("hanging:at_last_step", 1, SAVES_NOTHING),
            Hang("dist_amp.loading.workers:_shut_down", 0, "--data.workers 1"),
            Hang(f"{METRICS}.close_files", 0, SAVES_NOTHING),
            Hang("dist_amp.supervise.lifecycle:write_summary", 0),
            Hang("torch.distributed:destroy_process_group", 0),
            Hang("torch.distributed:destroy_process_group", 1),
            Hang("dist_amp.checkpoint.resume:integrity_error", 0, resumes=True),
            Hang("dist_amp.checkpoint.format:read_tensors", 1, resumes=True),
            Hang("hanging:load_state_dict", 1, resumes=True),
            Hang("hanging:collate", 0, "--data.workers 1", place="in _receive", ranks=1),
            Hang("hanging:build_dataset", place="at the start, in hangs", ranks=1),
            Hang(f"{METRICS}.close_files", place="in step 5, in hangs", ranks=1),
        ],
    ),
)
def test_a_rank_that_hangs_is_named_with_its_line_and_all_ranks_end(ends, hang):
    end = ends[hang]
    statuses = [1] * hang.ranks
    if "destroy_process_group" in hang.where:
        statuses[1 - hang.rank] = 0
    assert end.statuses == statuses, end.said[-3000:]
    stacks = end.ranks[hang.rank].stderr
    assert f"error: rank {hang.rank} hangs; its stacks:" in stacks
    assert re.search(rf'hanging.py", line \d+ in {hang.what}', stacks)
    # Two where the second rank is slow: the store, by which only one reports, ends with rank 0.
    lines = re.findall(r"^error: (rank \d+ \(.*)", end.said, re.MULTILINE)
    assert lines
    for line in lines:
        assert line.startswith(f"rank {hang.rank} (process")
        assert re.search(rf"{hang.place}\w* \(\w+.py, line \d+\)", line), line
        assert hang.ranks == 1 or "loss_sum" not in hang.where or " s in gloo:all_reduce" in line
        idle = f") hangs: it has used no CPU time for run.timeout_seconds={TIMEOUT}; "
        assert hang.ranks > 1 or idle in line
    end.check_summary(rf"rank {hang.rank} \(process")


@pytest.mark.bad_input("a rank that hangs between the rendezvous and the process groups")
@pytest.mark.parametrize(
    "hang",
    rows(
        Hang("torch.distributed:init_process_group", 1),
        slow=[
            Hang("torch.distributed:init_process_group", 0),
            Hang("torch.distributed:new_group", 0),
        ],
    ),
)
def test_a_rank_that_hangs_before_it_connects_is_named_and_all_ranks_end(ends, hang):
    end = ends[hang]
    assert end.statuses == [1, 1]
    assert re.search(r'hanging.py", line \d+ in hangs', end.ranks[hang.rank].stderr)
    other = end.ranks[1 - hang.rank].stderr
    said = rf"error: rank {hang.rank} of 2 has joined \(process \d+ on .*\), but not connected "
    said += rf"within run.timeout_seconds={TIMEOUT}: it hangs, .* \(rank {1 - hang.rank} got: wait "
    assert re.match(said, other.splitlines()[-1]), other
    assert "Traceback" not in other


@pytest.mark.bad_input("a rank that dies while another is blocked in a call that never returns")
@pytest.mark.bad_input("a call that never returns and keeps Python's interpreter lock")
@pytest.mark.parametrize(
    ("hang", "cause"),
    [
        (Hang("hanging:loss_sum", 1, what="dies"), "died without an error: it was killed"),
        (Hang("hanging:loss_sum", 1, what="is_stopped"), "gave no sign of life: it is stopped"),
        pytest.param(Hang("hanging:build_dataset", 1, what=KEEPS), "", marks=pytest.mark.slow),
        pytest.param(Hang("hanging:at_last_step", 0, what=KEEPS), "", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_stopped_or_keeps_the_interpreter_is_named_by_the_other_one(
    ends, hang, cause
):
    end = ends[hang]
    assert end.statuses[hang.rank] == -signal.SIGKILL
    assert end.statuses[1 - hang.rank] == 1, end.said
    stack = rf'hanging.py", line \d+ in {KEEPS}'
    assert re.search(stack, end.ranks[hang.rank].stderr) or hang.what != KEEPS
    end.check_summary(rf"rank {hang.rank} \(process .*{cause}")


@pytest.mark.slow
def test_a_start_that_works_for_longer_than_the_timeout_says_what_it_waits_for_and_continues(
    launch,
):
    ends = launch.each(2, *words_of(), PLANT="hanging:build_dataset:0:works")
    assert [rank.returncode for rank in ends] == [0, 0], ends[0].stderr
    said = ends[0].stderr + ends[1].stderr
    assert "; not arrived (entered " in said
    assert ", at the start, in works (hanging.py, line " in said
    end = f"; the run ends if a missing rank does nothing for run.timeout_seconds={TIMEOUT}"
    assert end in said


@pytest.mark.slow
def test_the_launcher_ends_with_the_verdict_on_a_rank_that_hangs(launch):
    words = ["--max-restarts", "0", "--nproc-per-node", "2", *words_of()]
    where = "hanging:at_last_step:1:hangs"
    done = launch.module("dist_amp.commands.launch", *words, PLANT=where, RANK="9")
    assert done.returncode == 1
    assert "reported nothing" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert re.match(r"error: rank 1 \(process .*in hangs \(hanging.py, line ", line), line
