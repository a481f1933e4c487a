"""A run at an address: complete or absent there, continued on any machine, by one writer.

The address is a folder by fsspec's file://, or an S3 server (moto; needs the extra `engines`).
"""

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import PATHS, Launch, finish
from messages import message_of
from ranks import on_ranks
from s3_server import s3_server
from tiny import Tiny, make_run

from dist_amp.distributed.process import LAUNCHER, in_time
from dist_amp.errors import CheckpointRejected, ConfigError, Failure
from dist_amp.files import only_process, run_dir
from dist_amp.storage import lease as leases
from dist_amp.storage import mirror
from dist_amp.storage import uploader as uploading
from dist_amp.storage.lease import Lost, take
from dist_amp.storage.mirror import Follower, fetch, local_folder, pull, pull_since
from dist_amp.storage.reading import fetched
from dist_amp.storage.store import Store, checksum_of, hashes
from dist_amp.storage.uploader import UNFINISHED, Uploader
from dist_amp.world import World

needs_s3 = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("s3fs", "moto", "flask"))),
    reason="needs s3fs and moto: bash tests/engines.sh",
)
KILLS = int(os.environ.get("DIST_AMP_KILLS", 6))  # of each seed
STEPS = 8
WORDS = ["--task.target", "tiny:Tiny", "--use_amp", "false", "--eval.every", "off"]
WORDS += ["--train.steps", STEPS, "--checkpoint.every", 2, "--metrics.log_every", 1]
WORDS += ["--checkpoint.keep", 3, "--run.timeout_seconds", 60]
SINGLE = ["--parallel.strategy", "single"]
STOPS = """
import os
import signal
import time
from tiny import Tiny

class Stops(Tiny):
    def loss_sum(self, model, batch):
        self.calls = getattr(self, "calls", 0) + model.training
        time.sleep(float(os.environ.get("SLEEP", 0)))
        if self.calls == int(os.environ.get("AT", 0)):
            if "RAISES" in os.environ:
                raise RuntimeError("of the task")
            os.kill(os.getpid(), int(os.environ.get("NUMBER", signal.SIGTERM)))
        return super().loss_sum(model, batch)

    def on_step(self, run, report):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
"""


def address_of(folder):
    return f"file://{folder}/bucket/run"


def complete(bucket):
    """{name of a checkpoint: its manifest}, of those at the address that are complete."""
    found = {}
    for path in sorted(bucket.glob("checkpoints/*/manifest.json")):
        files = json.loads(path.read_text())["files"]
        for name, entry in files.items():
            key = path.parent / f"{name}.{entry['xxh3']}"
            assert key.stat().st_size == entry["bytes"]
            assert hashes(key, 1 << 20)[0] == entry["xxh3"]
        found[path.parent.name] = files
    return found


def shards(files):
    return {name: entry["xxh3"] for name, entry in files.items() if name.endswith(".distcp")}


@pytest.fixture
def bucket(tmp_path):
    return tmp_path / "bucket/run"


def run(launch, cache, *words, ranks=2, **environment):
    words = [*WORDS, "--run.dir", address_of(launch.folder), *words]
    return launch.each(ranks, *words, DIST_AMP_CACHE=str(cache), **environment)


# ---- a whole run ----


def on_nodes(folder, nodes, *words, **environment):
    """A run of two ranks on nodes with empty disks, where their local folders have one name."""
    ranks_of_node = 2 // nodes
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(ranks_of_node), "DIST_AMP_CACHE": "cache"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for number in range(nodes):
        shutil.rmtree(folder / f"node{number}", ignore_errors=True)
        (folder / f"node{number}").mkdir()
    ranks = []
    for rank in range(2):
        node, local_rank = divmod(rank, ranks_of_node)
        place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), **world}
        launch = Launch(folder / f"node{node}")
        ranks.append(launch.start(0, *WORDS, *words, **place, **environment))
    return [finish(rank, 300) for rank in ranks]


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [
        (2, "fsdp"),
        pytest.param(1, "fsdp", marks=pytest.mark.slow),
        pytest.param(1, "ddp", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_on_empty_disks_and_ends_as_one_that_was_not_stopped(
    nodes, strategy, launch, tmp_path, bucket
):
    (tmp_path / "stops.py").write_text(STOPS)
    address = address_of(tmp_path)
    layout = ["--parallel.strategy", strategy, "--task.target", f"{tmp_path}/stops.py:Stops"]
    whole = launch.each(2, *WORDS, *layout, "--run.dir", "whole")
    assert [one.returncode for one in whole] == [0, 0], whole[0].stderr
    stopped = on_nodes(tmp_path, nodes, *layout, "--run.dir", address, AT="5")
    assert [one.returncode for one in stopped] == [75, 75], stopped[0].stderr
    assert f"run    {address}, from step 0" in stopped[0].stdout
    (name,) = [path.name for path in (tmp_path / "node0/cache").iterdir()]
    assert f"local  cache/{name}, uploaded to {address}" in stopped[0].stdout
    assert f"start the same job again with --run.dir {address}\n" in stopped[0].stdout
    assert json.loads((bucket / "summary.json").read_text())["stopped_by"] == "preempted"
    assert max(complete(bucket)) >= "step_00000005"
    ended = on_nodes(tmp_path, nodes, *layout, "--run.dir", address)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
    assert "resumed from step" in ended[0].stdout
    manifest = json.loads((tmp_path / "whole/checkpoints/step_00000008/manifest.json").read_text())
    checkpoints = complete(bucket)
    assert shards(checkpoints["step_00000008"]) == shards(manifest["files"])
    assert len(checkpoints) == 3, "checkpoint.keep"
    settings = tomllib.loads((bucket / "config.toml").read_text())
    assert settings["run"]["dir"] == address
    assert not list(bucket.glob("config_until_*")), "the local folder is no setting"
    logged = [json.loads(line) for line in (bucket / "metrics.jsonl").read_text().splitlines()]
    expected = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train/loss"] for line in expected]
    assert [row["train/loss"] for row in logged] == losses
    assert json.loads((bucket / "summary.json").read_text())["stopped_by"] == "completed"
    events = list((bucket / "tensorboard").glob("rank0000[01]/events*"))
    assert len(events) == 4
    if nodes == 2:
        here = list((tmp_path / "node1").glob("cache/*/checkpoints/step_00000008/*.distcp"))
        assert [path.name for path in here] == ["__1_0.distcp"], "each node keeps its part"


def test_a_killed_runs_uploads_are_finished_and_its_restart_there_fetches_nothing(
    launch, tmp_path, bucket
):
    (tmp_path / "stops.py").write_text(STOPS)
    words = ["--task.target", "stops.py:Stops", "--parallel.strategy", "fsdp"]
    killed = run(launch, "cache", *words, AT="6", NUMBER=str(int(signal.SIGKILL)))
    assert killed[0].returncode == -signal.SIGKILL
    wait_until(lambda: is_released(bucket))
    saved = sorted(path.parent.name for path in (tmp_path / "cache").rglob("manifest.json"))
    assert list(complete(bucket)) == saved
    needed = list(bucket.glob(f"checkpoints/{saved[-1]}/*.distcp.*"))
    assert len(needed) == 2
    for shard in needed:
        shard.unlink()  # so that it can't be fetched
    ended = run(launch, "cache", *words)
    assert [one.returncode for one in ended] == [0, 0], ended
    assert f"resumed from step {int(saved[-1][5:])}" in ended[0].stdout
    assert max(complete(bucket)) == "step_00000008"


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_released(bucket, number=1):
    return json.loads((bucket / f"leases/{number:08d}").read_text()).get("released", False)


def test_a_run_that_fails_waits_for_its_uploads_and_keeps_its_exit_status(launch, tmp_path, bucket):
    (tmp_path / "stops.py").write_text(STOPS)
    words = ["--task.target", "stops.py:Stops", *SINGLE]
    (failed,) = run(launch, "cache", *words, ranks=1, AT="6", RAISES="1")
    assert failed.returncode == 1, failed
    assert "RuntimeError: of the task" in failed.stderr
    assert max(complete(bucket)) == "step_00000004"
    assert is_released(bucket)


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory):
    """The folder of a finished run of one rank, and a copy of it."""
    folder = tmp_path_factory.mktemp("finished")
    (done,) = run(Launch(folder), "first", *SINGLE, ranks=1)
    assert done.returncode == 0, done.stderr
    return folder, shutil.copytree(folder, tmp_path_factory.mktemp("kept") / "finished")


@pytest.fixture
def finished(finished_once, monkeypatch):
    """The folder of a run that has just finished; this process is on another machine."""
    folder, kept = finished_once
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    monkeypatch.setenv("DIST_AMP_CACHE", str(folder / "second"))
    return folder


@pytest.mark.bad_input("a wrong setting that is found after a run has taken its address")
def test_a_start_that_fails_gives_its_address_to_the_corrected_command(finished, tmp_path):
    (refused,) = run(Launch(finished), "first", *SINGLE, "--run.seed", 5, ranks=1)
    assert refused.returncode == 65, refused
    assert is_released(finished / "bucket/run", 2)
    corrected = take(Store(address_of(finished)), tmp_path, pytest.fail)  # it does not wait
    assert corrected.name == "leases/00000003"


def test_a_start_whose_pull_fails_releases_its_lease(tmp_path, store, bucket, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    job = SimpleNamespace(folder=local_folder(address_of(tmp_path)), world=World())

    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(mirror, "pull_since", fail)
    with pytest.raises(Failure, match="can't be used: OSError: no space left"):
        mirror.mirrored(SimpleNamespace(resume="auto"), job).__enter__()
    assert is_released(bucket)


@pytest.mark.slow
def test_the_launcher_waits_for_the_uploads_of_ranks_that_were_killed(tmp_path, bucket):
    (tmp_path / "stops.py").write_text(STOPS)
    words = ["--nproc-per-node", 1, "--max-restarts", 0, *WORDS, "--run.dir", address_of(tmp_path)]
    words += ["--run.device", "cpu", "--task.target", "stops.py:Stops"]
    environ = os.environ | {"AT": "6", "NUMBER": "9", "DIST_AMP_CACHE": "cache"}
    environ |= {"PYTHONPATH": PATHS}
    command = [sys.executable, "-m", "dist_amp.launch", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "was killed by SIGKILL" in done.stderr
    saved = sorted(path.parent.name for path in (tmp_path / "cache").rglob("manifest.json"))
    assert list(complete(bucket)) == saved
    assert is_released(bucket)


@pytest.mark.bad_input("`dist_amp launch` at an address whose run on the same machine is live")
def test_the_launcher_of_a_refused_run_does_not_wait_for_the_uploads_of_the_live_one(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path))
    lock = local_folder("s3://bucket/run") / ".uploader.lock"
    text = "import sys, time; from pathlib import Path; from dist_amp.files import only_process\n"
    text += "with only_process(Path(sys.argv[1])): "
    text += "print(flush=True); time.sleep(float(sys.argv[2]))"
    for launcher, seconds, waits in ((os.getpid() + 1, 600, False), (os.getpid(), 1, True)):
        uploader = subprocess.Popen(
            [sys.executable, "-c", text, str(lock), f"{seconds}"],
            env={**os.environ, LAUNCHER: f"{launcher}"},
            stdout=subprocess.PIPE,
        )
        assert uploader.stdout.readline()
        in_time(60, lambda: mirror.wait_for_uploads("s3://bucket/run"))
        assert ("waiting for the uploads to s3://bucket/run" in capfd.readouterr().err) == waits
        if not waits:
            assert uploader.poll() is None
        uploader.kill()
        uploader.wait()


def test_a_signal_during_the_last_upload_does_not_cut_it(launch, tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    folder = local_folder(address_of(tmp_path))
    words = [*WORDS, "--run.dir", address_of(tmp_path), *SINGLE]
    with only_process(folder / ".uploader.lock"):  # the uploader waits for it
        started = launch.start(0, *words)
        expected = "waiting up to 60 s for the uploads to"
        wait_until((folder / "summary.json").exists)
        wait_until(lambda: expected in started.written()[1])
        started.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert started.poll() is None
    done = finish(started, 60)
    assert done.returncode == 0, done
    assert max(complete(bucket)) == "step_00000008"


@pytest.mark.bad_input("uploads that are not complete when a run at an address has waited for them")
def test_a_run_whose_uploads_are_not_complete_ends_with_75_and_the_same_command_completes_them(
    launch, tmp_path, bucket, monkeypatch
):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    folder = local_folder(address_of(tmp_path))
    words = [*WORDS, "--run.dir", address_of(tmp_path), *SINGLE, "--run.timeout_seconds", 3]
    with only_process(folder / ".uploader.lock"):  # the uploader waits for it
        done = launch(0, *words)
        assert done.returncode == 75, done
        assert "waiting up to 3 s for the uploads to" in done.stderr
        assert "continues on any machine" not in done.stdout
    done = launch(0, *words, "--run.timeout_seconds", 60)
    assert done.returncode == 0, done
    assert f"uploaded: --run.dir {address_of(tmp_path)} continues on any machine" in done.stdout
    assert max(complete(bucket)) == "step_00000008"


def test_what_a_command_shows_follows_the_address(tmp_path, store, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    first = uploader(local_run(tmp_path), store)
    first.pass_once(is_last=True)
    shown = fetched(store.address)
    add_checkpoint(tmp_path / "local", 6)
    first.pass_once(is_last=True)
    fetched(store.address)
    assert len(list(shown.glob("checkpoints/step_*"))) == 2
    first.lease.release()
    shutil.rmtree(tmp_path / "bucket/run/checkpoints/step_00000006")
    take(store, tmp_path, print)
    fetched(store.address)
    assert [path.name for path in shown.glob("checkpoints/*")] == ["step_00000004"]


# ---- uploads ----


def local_run(tmp_path, step=4, content=b"shard"):
    """A local folder with a checkpoint of two files."""
    folder = tmp_path / "local"
    add_checkpoint(folder, step, content)
    return folder


def add_checkpoint(folder, step, content=b"shard"):
    path = folder / f"checkpoints/step_{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for number in range(2):
        name = f"__{number}_0.distcp"
        (path / name).write_bytes(content * (number + 1))
        xxh3, _ = hashes(path / name, 1 << 20)
        files[name] = {"bytes": len(content) * (number + 1), "xxh3": xxh3}
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": files}))
    return path


class Recording(Store):
    """A store that records what is done to it, and fails as it is told."""

    def __init__(self, address):
        super().__init__(address)
        self.done = []
        self.fails = lambda action, name: None

    def write(self, name, content):
        self.record("write", name)
        super().write(name, content)

    def create(self, name, content):
        self.record("create", name)
        return super().create(name, content)

    def upload(self, local, name, xxh3=""):
        self.record("upload", name)
        super().upload(local, name, xxh3)

    def remove(self, name):
        self.record("remove", name)
        super().remove(name)

    def record(self, action, name):
        self.fails(action, name)
        self.done.append((action, name))


@pytest.fixture
def store(tmp_path):
    return Recording(address_of(tmp_path))


def uploader(folder, store):
    return Uploader(folder, store, take(store, folder, print))


def test_the_manifest_comes_last_after_the_shards_and_the_logs(tmp_path, store, bucket):
    folder = local_run(tmp_path)
    (folder / "metrics.jsonl").write_text("{}\n")
    uploader(folder, store).pass_once(is_last=False)
    names = [name.rpartition("/")[2].partition(".")[0] for _, name in store.done[2:]]
    assert sorted(names[:2]) == ["__0_0", "__1_0"]
    assert names[2:] == ["metrics", "manifest"]
    assert list(complete(bucket)) == ["step_00000004"]


@pytest.mark.parametrize("at", range(2, 6))
def test_an_upload_that_fails_anywhere_leaves_no_checkpoint_and_is_tried_again(
    at, tmp_path, store, bucket
):
    folder = local_run(tmp_path)
    (folder / "metrics.jsonl").write_text("{}\n")
    once = uploader(folder, store)

    def fail(action, name):
        if len(store.done) == at:
            raise OSError("the store is away")

    store.fails = fail
    with pytest.raises(OSError, match="the store is away"):
        once.pass_once(is_last=True)
    assert complete(bucket) == {}
    store.fails = lambda action, name: None
    once.pass_once(is_last=True)
    assert list(complete(bucket)) == ["step_00000004"]


def test_files_that_are_up_are_not_put_again(tmp_path, store):
    folder = local_run(tmp_path)
    uploader(folder, store).pass_once(is_last=False)
    before = len(store.done)
    store.remove("checkpoints/step_00000004/manifest.json")
    uploader(folder, store).pass_once(is_last=False)
    assert not [name for action, name in store.done[before:] if action == "upload"]


def test_checkpoints_that_the_run_removed_are_removed_manifests_first_never_the_newest(
    tmp_path, store, bucket
):
    folder = local_run(tmp_path)
    once = uploader(folder, store)
    once.pass_once(is_last=False)
    cut = bucket / "checkpoints/step_00000002/__0_0.distcp.0123"
    cut.parent.mkdir()
    cut.write_text("left by a save that was killed")
    shutil.rmtree(folder / "checkpoints/step_00000004")
    once.pass_once(is_last=False)
    assert list(complete(bucket)) == ["step_00000004"], "the only one"
    add_checkpoint(folder, 6)
    once.pass_once(is_last=False)
    removed = [name for action, name in store.done if action == "remove"]
    assert removed[0] == "checkpoints/step_00000002/__0_0.distcp.0123"
    assert removed[1] == "checkpoints/step_00000004/manifest.json"
    assert list(complete(bucket)) == ["step_00000006"]
    assert not [path for path in bucket.rglob("*distcp*") if "00000006" not in str(path)]


def test_what_the_run_removes_after_its_last_checkpoint_is_put_is_removed_at_its_end(
    tmp_path, store, bucket
):
    folder = local_run(tmp_path)
    add_checkpoint(folder, 6)
    once = uploader(folder, store)
    once.pass_once(is_last=False)
    shutil.rmtree(folder / "checkpoints/step_00000004")
    once.pass_once(is_last=True)
    assert list(complete(bucket)) == ["step_00000006"]


def test_a_checkpoint_that_the_run_removes_while_it_is_put_is_put_whole(tmp_path, store, bucket):
    folder = local_run(tmp_path)

    def remove(action, name):
        shutil.rmtree(folder / "checkpoints/step_00000004", ignore_errors=True)

    once = uploader(folder, store)
    store.fails = remove
    once.pass_once(is_last=False)
    assert list(complete(bucket)) == ["step_00000004"]


def test_the_manifest_of_a_run_that_was_thought_dead_is_replaced_and_shards_never_mix(
    tmp_path, store, bucket
):
    dead = uploader(local_run(tmp_path / "dead", content=b"dead!"), store)
    leases_of = dead.lease
    dead.lease = None  # it does not notice that it is dead
    live = uploader(local_run(tmp_path / "live", content=b"live!"), store)
    dead.pass_once(is_last=False)
    dead.lease = leases_of
    with pytest.raises(Lost, match="has taken over"):
        dead.publish("step_00000004", dead.uploaded["step_00000004"])
    store.create("checkpoints/step_00000004/manifest.json", b'{"files": {}}')
    live.pass_once(is_last=False)
    (files,) = complete(bucket).values()
    assert shards(files) == shards(live.uploaded["step_00000004"].files)
    assert len(list(bucket.rglob("*distcp*"))) == 2, "those of the dead one are removed"


@pytest.mark.bad_input("a file of a checkpoint on the local disk that is damaged before its upload")
def test_a_file_that_is_not_what_its_manifest_says_is_not_put(tmp_path, store, bucket):
    folder = local_run(tmp_path)
    (folder / "checkpoints/step_00000004/__0_0.distcp").write_bytes(b"shatd")
    with pytest.raises(Exception, match="is not what its manifest says"):
        uploader(folder, store).pass_once(is_last=False)
    assert complete(bucket) == {}


def test_hashes_are_those_that_stores_have(tmp_path):
    (tmp_path / "file").write_bytes(b"hello")
    _, checksums = hashes(tmp_path / "file", 2)
    assert checksum_of({"ETag": '"5d41402abc4b2a76b9719d911017c592"'}) in checksums
    assert checksum_of({"md5Hash": "XUFAKrxLKna5cZ2REBfFkg=="}) in checksums
    of_azure = bytearray.fromhex("5d41402abc4b2a76b9719d911017c592")
    assert checksum_of({"content_settings": {"content_md5": of_azure}}) in checksums
    assert checksum_of({"content_settings": {"content_md5": None}}) not in checksums
    assert {len(text) for text in checksums} == {32, 34}, "of three parts"
    assert checksum_of({}) not in checksums


# ---- downloads ----


def damage(kind, path):
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes({"flipped": flipped, "cut": content[:-1], "longer": content + b"0"}[kind])


FILES = ["__0_0.distcp", ".metadata", "manifest.json"]
DAMAGED = [(name, kind) for name in FILES for kind in ("flipped", "cut", "longer")]


@pytest.mark.bad_input("a checkpoint on object storage that is damaged or forged")
@pytest.mark.parametrize(("name", "kind"), DAMAGED)
def test_a_damaged_checkpoint_at_the_address_gives_way_to_the_one_before(
    name, kind, finished, monkeypatch, capsys
):
    monkeypatch.setattr(mirror, "ATTEMPTS", 1)
    (path,) = finished.glob(f"bucket/run/checkpoints/step_00000008/{name}*")
    damage(kind, path)
    address = address_of(finished)
    pull(Store(address), local_folder(address), is_current=False, with_logs=True)
    words = [*WORDS, *SINGLE, "--run.dir", address, "--run.resume", "auto"]
    assert make_run(World(), None, *words).step == 6
    assert "using step_00000006 instead" in capsys.readouterr().err


@pytest.mark.bad_input("a checkpoint on object storage that is damaged or forged")
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in FILES[:2]), FILES[2]]
)
def test_a_run_that_continues_from_before_a_damaged_checkpoint_replaces_it(name, finished):
    (path,) = finished.glob(f"bucket/run/checkpoints/step_00000008/{name}*")
    damage("flipped", path)
    (ended,) = run(Launch(finished), "second", "--train.steps", 10, *FREE, ranks=1)
    assert ended.returncode == 0, ended.stderr
    assert "resumed from step 6" in ended.stdout
    assert "using step_00000006 instead" in ended.stderr
    assert max(complete(finished / "bucket/run")) == "step_00000010"


FREE = ["--run.allow_config_change", "true", *SINGLE]


def test_a_file_that_arrives_damaged_is_fetched_again(tmp_path, store, monkeypatch):
    folder = local_run(tmp_path)
    uploader(folder, store).pass_once(is_last=False)
    path = folder / "checkpoints/step_00000004"
    (path / "__0_0.distcp").unlink()
    (folder / ".address").write_text(address_of(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    fetched = []
    original = type(store.fs).get_file

    def truncate(self, remote, local, **options):
        original(self, remote, local, **options)
        fetched.append(remote)
        if len(fetched) < 3:
            Path(local).write_bytes(b"x")

    monkeypatch.setattr(type(store.fs), "get_file", truncate)
    fetch(path, ["__0_0.distcp", "__1_0.distcp"])
    assert (path / "__0_0.distcp").read_bytes() == b"shard"
    assert len(fetched) == 3, "only what was missing"
    assert sorted(file.name for file in path.iterdir() if "fetching" in file.name) == []


def test_a_file_that_is_gone_is_named(tmp_path, store, bucket):
    folder = local_run(tmp_path)
    uploader(folder, store).pass_once(is_last=False)
    path = folder / "checkpoints/step_00000004"
    (path / "__1_0.distcp").unlink()
    (folder / ".address").write_text(address_of(tmp_path))
    for file in bucket.rglob("*__1_0*"):
        file.unlink()
    with pytest.raises(CheckpointRejected, match=r"__1_0.distcp is not at file://"):
        fetch(path, ["__1_0.distcp"])


def test_what_another_machine_wrote_since_replaces_what_is_here(tmp_path, store):
    here = local_run(tmp_path / "here", content=b"older")
    add_checkpoint(here, 9)
    there = local_run(tmp_path / "there", content=b"newer")
    (there / "metrics.jsonl").write_text("newer")
    (here / "metrics.jsonl").write_text("older")
    uploader(there, store).pass_once(is_last=True)
    pull(store, here, is_current=True, with_logs=True)
    assert (here / "metrics.jsonl").read_text() == "older"
    assert (here / "checkpoints/step_00000009").exists()
    pull(store, here, is_current="", with_logs=True)
    assert (here / "metrics.jsonl").read_text() == "newer"
    assert [path.name for path in here.glob("checkpoints/step*")] == ["step_00000004"]
    assert [path.name for path in here.glob("checkpoints/step*/*")] == ["manifest.json"]


def test_a_checkpoint_that_is_only_here_is_kept_when_another_machine_wrote_since(tmp_path, store):
    here = local_run(tmp_path / "here")
    there = local_run(tmp_path / "there")
    uploader(there, store).pass_once(is_last=True)
    add_checkpoint(here, 9)
    pull(store, here, is_current="", with_logs=True)
    (kept,) = here.glob("checkpoints/not_put_step_00000009_*")
    assert len(list(kept.iterdir())) == 3


@pytest.mark.bad_input("run.resume=never at an address that holds a run, on an empty disk")
def test_a_run_that_may_not_resume_is_refused_where_another_is(finished):
    address = address_of(finished)
    before = complete(finished / "bucket/run")
    assert len(before) == 3
    job = SimpleNamespace(folder=local_folder(address), world=World())
    with pytest.raises(Failure, match=f"run.dir={address} holds a run already"):
        mirror.mirrored(SimpleNamespace(resume="never"), job).__enter__()
    assert complete(finished / "bucket/run") == before


UPLOADER = "dist_amp.storage.uploader"


def test_an_uploader_waits_for_the_one_that_a_killed_run_has_left(launch, tmp_path, bucket):
    folder = local_run(tmp_path)
    with only_process(folder / ".uploader.lock"):
        second = launch.start(0, folder, address_of(tmp_path), 60, module=UPLOADER)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        assert not list(bucket.rglob("*distcp*"))
    assert second.wait(60) == 0
    assert len(list(bucket.rglob("*distcp*"))) == 2


@pytest.mark.bad_input("an object store that is away when a run has been killed")
def test_an_uploader_whose_run_has_ended_gives_up_after_a_while(launch, tmp_path):
    folder = local_run(tmp_path)
    (tmp_path / "bucket").write_text("no folder")
    done = launch.module(UPLOADER, folder, address_of(tmp_path), 0.5)
    assert done.returncode == UNFINISHED, done
    (line,) = done.stderr.splitlines()
    assert f"{address_of(tmp_path)} is not complete after 0.5 s ([Errno" in line
    assert f"the rest is in {folder}: the same command on this machine" in line


@pytest.mark.bad_input("an object store that takes requests and does not answer")
def test_a_store_that_does_not_answer_is_warned_of(tmp_path, store, monkeypatch, capsys):
    monkeypatch.setattr(uploading, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(uploading, "WARN_AFTER_SECONDS", 0.5)
    one = uploader(local_run(tmp_path), store)
    answers = threading.Event()
    monkeypatch.setattr(one.lease, "renew", answers.wait)
    renewing = threading.Thread(target=one._renew)
    renewing.start()
    said = ""
    while "has not been up to date for" not in said:
        time.sleep(0.1)
        said += capsys.readouterr().err
    assert "(it does not answer)" in said
    assert one.error == "it does not answer"
    answers.set()
    one.ended.set()
    renewing.join()


@pytest.mark.bad_input("a full local disk, in a run at an address")
def test_an_uploader_on_a_full_disk_tries_again_later_and_says_so(
    tmp_path, store, monkeypatch, capsys
):
    once = uploader(local_run(tmp_path), store)
    once.run_ended.set()
    pauses = []
    link = os.link

    def full(*args):
        if len(pauses) < 8:
            raise OSError(28, "No space left on device")
        link(*args)

    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def sleep(seconds):
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(os, "link", full)
    once.succeeded = 0.0
    once.run()
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    said = capsys.readouterr().err.splitlines()
    assert ["No space left on device" in line for line in said] == [True, True, False]
    assert f"{store.address} is up to date again" in said[-1]
    assert is_released(tmp_path / "bucket/run")


def test_an_uploader_that_dies_is_started_again_with_a_growing_pause(tmp_path, monkeypatch, capsys):
    pauses = []
    monkeypatch.setattr(mirror.time, "sleep", pauses.append)
    monkeypatch.setattr(Follower, "start", start_of([1, 1, -9, 0]))
    follower = Follower(address_of(tmp_path), tmp_path, 1.0, None)
    follower.watcher.join()
    assert pauses == [1, 2, 4]
    assert "the uploader has ended with status -9" in capsys.readouterr().err


def start_of(statuses):
    def start(self):
        return subprocess.Popen(
            [sys.executable, "-c", f"import os; os._exit({statuses.pop(0)} % 256)"]
            if statuses[0] >= 0
            else ["sh", "-c", f"kill {statuses.pop(0)} $$"],
            stdin=subprocess.PIPE,
        )

    return start


def test_an_uploader_yields_to_training_and_keeps_no_pipe_open(tmp_path):
    follower = Follower(address_of(tmp_path), local_run(tmp_path), 60.0, None)
    pid = follower.process.pid
    assert Path(f"/proc/{pid}/fd/1").readlink() == Path(os.devnull)
    assert os.getpgid(pid) == pid
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0))
    follower.end()
    follower.wait()
    assert follower.process.returncode == 0


def test_a_run_that_has_lost_its_lease_does_not_replace_the_logs(tmp_path, store, bucket):
    dead = uploader(local_run(tmp_path / "dead"), store)
    (tmp_path / "dead/local/metrics.jsonl").write_text("old")
    live = uploader(local_run(tmp_path / "live"), store)
    (tmp_path / "live/local/metrics.jsonl").write_text("new")
    live.pass_once(is_last=True)
    with pytest.raises(Lost):
        dead.pass_once(is_last=True)
    assert (bucket / "metrics.jsonl").read_text() == "new"


@pytest.mark.parametrize("before", ["another", "this"])
def test_a_start_that_fails_leaves_a_stale_folder_stale_and_a_current_one_current(
    before, tmp_path, store, monkeypatch
):
    folder = local_run(tmp_path)
    first = take(store, tmp_path / "there", print)
    first.release()
    record = first.record if before == "this" else {"id": "of an earlier run here"}
    (folder / ".lease.json").write_text(json.dumps(record))
    for failing in (True, True, False):
        lease = take(store, folder, print)
        lease.release()
        found = []

        def pulled(store, folder, is_current, with_logs, found=found, failing=failing):
            found.append(is_current)
            if failing:
                raise OSError("the store is away")

        monkeypatch.setattr(mirror, "pull", pulled)
        with suppress(OSError):
            pull_since(store, folder, lease.record, lease.before["id"], is_main=True)
        assert found == [before == "this"]
    assert json.loads((folder / ".lease.json").read_text())["id"] == lease.record["id"]


def test_ranks_that_move_between_nodes_keep_what_is_not_up_yet(tmp_path, store):
    """Rank 0 was on another node before: this one's parts are as new as its."""
    here = local_run(tmp_path)
    lease = take(store, tmp_path / "there", print)
    lease.release()
    (here / ".lease.json").write_text(json.dumps({**lease.record, "is_main": False}))
    moved = take(store, here, print)
    pull_since(store, here, moved.record, moved.before["id"], is_main=True)
    assert [path.name for path in here.glob("checkpoints/*")] == ["step_00000004"]


@pytest.mark.bad_input("a second run at an address, on a node where the live run's rank 0 is not")
def test_a_node_without_the_leases_holder_waits_for_a_sign_of_its_life(
    tmp_path, store, monkeypatch
):
    lease = take(store, tmp_path / "there", print)
    (tmp_path / ".lease.json").write_text(json.dumps({**lease.record, "is_main": False}))
    monkeypatch.setattr(time, "sleep", lambda seconds: lease.renew())
    with pytest.raises(Failure, match="is in use by a live run"):
        take(store, tmp_path, print)


def test_a_folders_file_is_created_by_one_of_two_that_looked_at_once(tmp_path, monkeypatch):
    store = Store(address_of(tmp_path))
    assert store.create("leases/1", b"first")
    monkeypatch.setattr(type(store.fs), "exists", lambda *args, **options: False)
    assert not store.create("leases/1", b"second")
    assert store.read("leases/1") == b"first"


def test_a_store_that_forbids_removals_is_used(tmp_path, store):
    def forbid(action, name):
        if action == "remove":
            raise PermissionError("AccessDenied")

    store.fails = forbid
    for number in range(1, 4):
        lease = take(store, tmp_path, print)
        lease.release()
        assert lease.name == f"leases/{number:08d}"


# ---- the lease ----


@pytest.mark.bad_input("a run at an address that another live run writes, also on another machine")
def test_a_live_runs_address_is_refused_by_its_holders_name(tmp_path, store, monkeypatch):
    monkeypatch.setattr(leases, "DEAD_SECONDS", 5.0)
    lease = take(store, tmp_path / "there", print)
    ended = threading.Event()

    def renew():
        while not ended.wait(0.2):
            lease.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(Failure, match=rf"is in use by a live run \(process {os.getpid()} on "):
        take(store, tmp_path / "here", print)
    ended.set()
    thread.join()


def test_a_dead_runs_lease_is_taken_after_a_while_and_it_notices_if_it_lives_after_all(
    tmp_path, store, monkeypatch
):
    monkeypatch.setattr(leases, "DEAD_SECONDS", 1.0)
    said = []
    dead = take(store, tmp_path / "there", said.append)
    start = time.monotonic()
    take(store, tmp_path / "here", said.append)
    assert time.monotonic() - start >= 1.0
    assert "waiting up to 1 s for a sign of life" in said[0]
    with pytest.raises(Lost, match="has taken over"):
        dead.renew()


@pytest.mark.parametrize("how", ["released", "same folder"])
def test_a_run_that_ended_or_was_of_the_same_folder_is_not_waited_for(how, tmp_path, store):
    lease = take(store, tmp_path, print)
    (tmp_path / ".lease.json").write_text(json.dumps({**lease.record, "is_main": True}))
    if how == "released":
        lease.release()
        assert take(store, tmp_path / "here", pytest.fail).name == "leases/00000002"
    else:
        assert take(store, tmp_path, pytest.fail).name == "leases/00000002"


@pytest.mark.bad_input("a second container of the same host name, with the same path to its folder")
def test_a_container_of_the_same_name_is_refused_while_the_first_lives(
    tmp_path, store, monkeypatch
):
    lease = take(store, tmp_path / "cache", print)
    monkeypatch.setattr(time, "sleep", lambda seconds: lease.renew())
    with pytest.raises(Failure, match="is in use by a live run"):
        take(store, tmp_path / "cache", print)


@pytest.mark.bad_input("a store that lets two writers create one file")
def test_a_store_that_can_not_tell_two_writers_apart_is_refused(tmp_path, store, monkeypatch):
    def overwrite(self, name, content):
        self.write(name, content)
        return True

    monkeypatch.setattr(Store, "create", overwrite)
    with pytest.raises(Failure, match="lets two writers create one file"):
        take(store, tmp_path, print)


def test_of_two_that_take_a_dead_runs_lease_one_gets_it(tmp_path, store):
    take(store, tmp_path, print).release()
    taken = []
    refused = []

    def try_it(number):
        try:
            taken.append(take(Store(store.address), tmp_path / str(number), print))
        except Failure as error:
            refused.append(str(error))

    original = Store.create
    both = threading.Barrier(2)

    def together(self, name, content):
        if b"released" not in content:  # else the winner's question to the store
            both.wait(timeout=30)
        return original(self, name, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "create", together)
        threads = [threading.Thread(target=try_it, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(taken) == len(refused) == 1
    assert "is in use by a live run" in refused[0]


# ---- what is refused ----


@pytest.mark.bad_input("run.dir: an address of an unknown store, or whose package is missing")
@pytest.mark.bad_input("run.dir: hf://, or another store that may let two writers create one file")
@pytest.mark.bad_input("run.dir: an address of a bucket without a folder")
@pytest.mark.bad_input("run.dir: an address within another, or with a password")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://bucket", "names no folder in the bucket; add one, as s3://bucket/my_run"),
        ("s4://bucket/run", "run.dir=s4://... isn't known to let only one of two writers create"),
        ("hf://buckets/me/all/run", "as a run needs; use an address of s3, s3a, gs, gcs, az, abfs"),
        ("ftp://me:hush@host/run", "run.dir=ftp://... isn't known to"),
        ("simplecache::s3://bucket/run", "run.dir=simplecache::s3://... isn't known to"),
        ("s3://bucket::file:///run", "within another (::) or with a password"),
        ("s3://key:hush@bucket/run", "its environment variables for credentials"),
    ],
)
def test_an_address_that_can_not_be_used_is_refused(address, said, tmp_path, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path))
    message = message_of(64, local_folder, address)
    assert said in message
    assert "hush" not in message


@pytest.mark.bad_input("run.dir: an address of an unknown store, or whose package is missing")
def test_an_address_whose_package_is_missing_is_refused_in_one_line(launch):
    (launch.folder / "gcsfs.py").write_text("raise ImportError")
    words = [*WORDS, "--run.dir", "gs://bucket/run"]
    (done,) = launch.each(1, *words, DIST_AMP_CACHE="cache")
    assert done.returncode == 64, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "gs://bucket/run: Please install gcsfs to access Google Storage (pip" in line


@pytest.mark.bad_input("run.dir: an address, with run.save() in a loop of your own")
def test_a_loop_of_ones_own_at_an_address_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    run = make_run(World(), Tiny(), "--run.dir", address_of(tmp_path))
    for call in (run.save, run.resume):
        with pytest.raises(
            ConfigError, match=r"\(\) with run.dir=file://.*: only the train command"
        ):
            call()


def folder_of_two_nodes(world, folder):
    with pytest.raises(ConfigError) as caught:
        mirror.check_not_shared(folder, replace(world, local_rank=0))
    return str(caught.value)


@pytest.mark.bad_input("run.dir: an address, with a local folder that nodes share")
def test_nodes_that_share_the_local_folder_are_refused(tmp_path):
    for message in on_ranks(2, folder_of_two_nodes, tmp_path):
        assert "is shared by several nodes" in message
        assert "set DIST_AMP_CACHE to a folder on each node's disk" in message


@pytest.mark.bad_input("run.dir: an address, with a local folder that can't be made")
def test_a_local_folder_that_can_not_be_made_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"can't be used \(.*\); set DIST_AMP_CACHE to"):
        local_folder("s3://bucket/run")


def test_a_rank_that_starts_never_reads_an_address_that_another_is_writing(monkeypatch, tmp_path):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path))
    folder = local_folder("s3://bucket/run")
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(local_folder, "s3://bucket/run") for _ in range(300)]
        read = {run_dir(folder)}
        while not all(one.done() for one in others):
            read.add(run_dir(folder))
    assert read == {"s3://bucket/run"}


# ---- a real S3 server ----


@pytest.fixture
def s3(monkeypatch):
    """A server with a bucket; environment variables lead to it."""
    with s3_server() as server:
        server.put("bucket/other", b"")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("DIST_AMP_CACHE", "cache")
        yield server


S3 = [*WORDS, "--run.dir", "s3://bucket/run", "--task.target", "stops.py:Stops"]


def all_at(folder, name="run"):
    """The complete checkpoints at s3://bucket/NAME, fetched to a folder."""
    import fsspec

    fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            for file in fs.find(f"bucket/{name}"):
                path = folder / file.removeprefix(f"bucket/{name}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(fs.cat_file(file))
        except FileNotFoundError:  # removed since it was listed
            continue
        return complete(folder)


@needs_s3
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("fault", ["503", "500", "reset", "lost", "truncate"])
def test_a_store_that_fails_now_and_then_gets_all_checkpoints(fault, s3, launch, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    s3.faults_of_writes = ["", fault] * 20
    s3.faults = [fault, ""] * 4
    done = launch.each(2, *S3)
    assert [one.returncode for one in done] == [0, 0], done
    assert len(all_at(tmp_path / "fetched")) == 3
    shutil.rmtree(tmp_path / "cache")
    s3.faults = [fault, ""] * 4
    done = launch.each(2, *S3, "--train.steps", 10, "--run.allow_config_change", "true")
    assert [one.returncode for one in done] == [0, 0], done
    assert "resumed from step 8" in done[0].stdout
    assert max(all_at(tmp_path / "fetched")) == "step_00000010"


@needs_s3
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.bad_input("an object store that is away while a run trains, or at its end")
def test_training_continues_while_the_store_is_away_and_says_so(s3, launch, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    started = launch.start_each(2, *S3, "--run.timeout_seconds", 20, SLEEP="0.5")
    wait_until(lambda: s3.requests["PUT"] > 3)
    s3.every = "503"
    done = [finish(one, 300) for one in started]
    assert [one.returncode for one in done] == [75, 0], done
    assert "s3://bucket/run is not complete after 20 s" in done[0].stderr
    assert "the same command on this machine uploads it" in done[0].stderr
    s3.every = ""
    done = launch.each(2, *S3)
    assert [one.returncode for one in done] == [0, 0], done
    assert "is finished: it took 8 of train.steps=8" in done[0].stdout
    assert max(all_at(tmp_path / "fetched")) == "step_00000008"


@needs_s3
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.bad_input(
    "object storage without credentials, or a bucket that is missing or read-only"
)
def test_a_store_that_can_not_be_used_is_refused_at_the_start(s3, launch, tmp_path, monkeypatch):
    (tmp_path / "stops.py").write_text(STOPS)
    cases = {
        "none": "s3://nobucket/run can't be used: FileNotFoundError: The specified bucket does not "
        "exist; make the bucket, or check its name",
        "403": "check the credentials, which must be allowed to read, write and list, and the",
        "keys": "NoCredentialsError: Unable to locate credentials; check the credentials",
    }
    for case, said in cases.items():
        words = list(map(str, S3))
        if case == "none":
            words[words.index("s3://bucket/run")] = "s3://nobucket/run"
        s3.every = "403" if case == "403" else ""
        if case == "keys":
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        done = launch.each(2, *words)
        assert [one.returncode for one in done] == [1, 1], case
        (line,) = "".join(one.stderr for one in done).splitlines()
        assert said in line


def kill_uploaders(folder):
    """Those of runs that were started in a folder."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_uploader = b"dist_amp.storage.uploader" in (path / "cmdline").read_bytes()
            if is_uploader and (path / "cwd").readlink() == folder:
                os.kill(int(path.name), signal.SIGKILL)


@needs_s3
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_killed_checkpoints_are_complete_or_absent_and_the_end_is_the_same(
    seed, s3, launch, tmp_path
):
    """A rank, all ranks or the uploader, at random times; a new disk every other time.

    A run that has ended is compared, and the next kills are another's.
    """
    (tmp_path / "stops.py").write_text(STOPS)
    draw = random.Random(seed)
    whole = launch.each(2, *S3, "--run.dir", "whole")
    assert [one.returncode for one in whole] == [0, 0], whole
    manifest = json.loads((tmp_path / "whole/checkpoints/step_00000008/manifest.json").read_text())
    kills = ended = 0
    while kills < KILLS or ended == 0:
        name = f"run{ended}"
        ranks = launch.start_each(2, *S3, "--run.dir", f"s3://bucket/{name}", SLEEP="0.4")
        target = draw.choice(["rank", "ranks", "uploader"])
        if kills < KILLS:
            time.sleep(draw.uniform(2.0, 8.0))
            kills += ranks[0].poll() is None
            victims = {"rank": ranks[:1], "ranks": ranks}.get(target, [])
            for one in victims:
                one.kill()
            if target == "uploader":
                kill_uploaders(tmp_path)
        statuses = [one.wait(120) for one in ranks]
        checkpoints = all_at(tmp_path / "fetched", name)
        if draw.random() < 0.5:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        if statuses == [0, 0]:
            assert shards(checkpoints["step_00000008"]) == shards(manifest["files"])
            ended += 1
    print(f"{kills} kills, {ended} runs ended as one that was not disturbed")
