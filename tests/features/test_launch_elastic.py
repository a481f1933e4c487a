"""dist_amp launch --nnodes MIN:MAX: nodes are lost and come back. A node is a launcher on this
machine; the rendezvous' store is in the test's process, so that any node may be lost.
"""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from chaos import Chaos, as_options, children, differences, is_there
from conftest import ROOT
from forked import TESTS, Forked
from test_train import wait_for

WORDS = {
    "task.target": "restless:Recording",
    "task.args.batch_norm": "false",
    "train.micro_batch_size": 2,
    "train.accumulation_steps": "auto",
    "run.timeout_seconds": 20,
    "precision.use_amp": "false",
    "parallel.bit_exact": "true",
    "train.global_batch_size": 16,
    "train.steps": 200,
}


def records(run: Path) -> list[SimpleNamespace]:
    """What the ranks have recorded of their steps, in the order of time."""
    found = []
    for path in run.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # not half written
                found.append(SimpleNamespace(**json.loads(line)))
    return sorted(found, key=lambda record: record.time)


class Cluster:
    """Two nodes of one rank each that train one run; `nodes` are the ones that are there."""

    def __init__(self, folder: Path, words: list[str]):
        self.folder = folder
        self.run = folder / "run"
        self.words = words
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        self.options += ["--rdzv-endpoint", f"127.0.0.1:{self.store.port}", "--rdzv-id", "elastic"]
        conf = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
        self.options += ["--rdzv-conf", conf]
        self.environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{TESTS}"}
        self.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.nodes: dict[int, Forked] = {}
        for number in (0, 1):
            self.join(number)

    def join(self, number: int) -> None:
        """Another node has another address: it decides which one has rank 0."""
        words = ["--local-addr", f"127.0.0.{10 + number}", *self.options, *self.words]
        environ = self.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        self.nodes[number] = Forked(words, self.folder, environ, "dist_amp.commands.launch")

    def lose(self, number: int) -> None:
        """Kill a launcher with its ranks, none of which gets to notice the others' end."""
        launcher = self.nodes.pop(number)
        launcher.send_signal(signal.SIGSTOP)
        ranks = children(launcher.pid)
        for pid in (*ranks, launcher.pid):
            os.kill(pid, signal.SIGKILL)
        launcher.wait(60)
        while any(map(is_there, ranks)):
            time.sleep(0.01)

    def wait_for_steps(self, count: int = 1) -> None:
        """Until all nodes that are there have taken so many steps together."""
        begun = time.time()

        def have_stepped() -> bool:
            for node in self.nodes.values():
                assert node.poll() is None, self.output()
            new = [record for record in records(self.run) if record.time > begun]
            return len({one.step for one in new if one.ranks == len(self.nodes)}) >= count

        wait_for(have_stepped, f"a step of {len(self.nodes)} nodes")

    def output(self) -> str:
        return "\n".join(text[-3000:] for node in self.nodes.values() for text in node.written())

    def end(self) -> list[int]:
        """Let the steps be fast, and wait for the nodes' exit statuses."""
        (self.folder / "hurry").touch()
        return [node.wait(300) for node in self.nodes.values()]

    def close(self) -> None:
        for number in list(self.nodes):
            if self.nodes[number].poll() is None:
                self.lose(number)


@pytest.fixture
def cluster(request):
    """cluster(folder, words): a Cluster, which is killed at the test's end."""

    def make(folder: Path, words: list[str]) -> Cluster:
        made = Cluster(folder, words)
        request.addfinalizer(made.close)
        return made

    return make


def steps_by_attempt(run: Path) -> list[set[int]]:
    """The steps that the ranks took between two changes of their number."""
    steps: dict[str, set[int]] = {}
    for record in records(run):
        steps.setdefault(record.attempt, set()).add(record.step)
    return list(steps.values())


# In place of a rank of the main job, which takes seconds to start.
NODE = """
import json, os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
Path(f"rank-{os.getpid()}").write_text(os.environ["WORLD_SIZE"])
while not Path("end").exists():
    time.sleep(0.05)
    if Path("lost").exists():  # as if the connection to the other rank were closed
        facts = {"timestamp": str(int(time.time())), "step": 6, "transient": True}
        message = {"message": "error: a rank died", "extraInfo": facts}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))
        Path("lost").unlink()
        sys.exit(1)
"""


def test_a_lost_node_and_one_that_joins_restart_the_ranks_at_the_new_size(tmp_path, cluster):
    def sizes():
        """The WORLD_SIZE of each rank that runs."""
        ranks = [path for path in tmp_path.glob("rank-*") if is_there(int(path.name[5:]))]
        return sorted(path.read_text() for path in ranks)

    (tmp_path / "nodes.py").write_text(NODE)
    nodes = cluster(tmp_path, ["-m", "nodes"])
    wait_for(lambda: sizes() == ["2", "2"], "the start of both", 60)
    nodes.lose(0)
    (tmp_path / "lost").touch()
    wait_for(lambda: sizes() == ["1"], "the restart without the lost node", 60)
    nodes.join(0)
    wait_for(lambda: sizes() == ["2", "2"], "the restart with the node that joins", 60)
    (tmp_path / "end").touch()
    assert [node.wait(60) for node in nodes.nodes.values()] == [0, 0], nodes.output()
    _, said = nodes.nodes[1].written()
    assert said.count("restart 1 of 100") == 1, "of the loss"
    assert "restart 2" not in said, "a node that joins uses up none"


@pytest.mark.slow
def test_nodes_that_are_lost_that_join_and_that_leave_at_a_signal_leave_every_bit_as_it_was(
    tmp_path, cluster
):
    chaos = Chaos(tmp_path, 0, **WORDS)
    nodes = cluster(chaos.new_folder(), as_options(chaos.words))
    nodes.wait_for_steps(3)
    nodes.lose(0)  # it has rank 0
    nodes.wait_for_steps(2)
    nodes.join(0)
    nodes.wait_for_steps()
    leaves = nodes.nodes.pop(0)
    leaves.terminate()
    nodes.wait_for_steps(2)
    assert leaves.wait(300) == 75
    nodes.join(0)
    nodes.wait_for_steps(2)
    assert nodes.end() == [0, 0], nodes.output()
    assert differences(nodes.run, chaos.through(2, **{"task.args.pause": 0})) == []
    assert "restart 1 of 100" in nodes.output(), "of the loss"
    # But for the loss no step is taken twice: the ranks had saved.
    _, *attempts = steps_by_attempt(nodes.run)
    steps = [step for steps in attempts for step in sorted(steps)]
    assert steps == list(range(steps[0], 201))
