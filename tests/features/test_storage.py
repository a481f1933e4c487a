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
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Launch, finish
from messages import message_of
from ranks import on_ranks
from s3_server import s3_server
from tiny import Tiny, make_run

from dist_amp.errors import CheckpointRejected, ConfigError, Failure
from dist_amp.files import entry_of
from dist_amp.storage import mirror, store
from dist_amp.storage.mirror import Mirror, fetch, fetched, local_folder, pull, pull_manifests
from dist_amp.storage.store import Claim, Store, read_claim, take_claim
from dist_amp.world import World

KILLS = int(os.environ.get("DIST_AMP_KILLS", 6))  # of each seed
WORDS = ["--task.target", "test_storage:Stops", "--use_amp", "false", "--eval.every", "off"]
WORDS += ["--train.steps", 8, "--checkpoint.every", 2, "--metrics.log_every", 1]
WORDS += ["--checkpoint.keep", 3, "--run.timeout_seconds", 60]
SINGLE = ["--parallel.strategy", "single"]
FSDP = ["--parallel.strategy", "fsdp"]


class Stops(Tiny):
    """Raises or gets a signal in the training step AT, by the environment; SLEEP: in each step."""

    calls = 0

    def loss_sum(self, model, batch):
        self.calls += model.training
        time.sleep(float(os.environ.get("SLEEP", 0)))
        if self.calls == int(os.environ.get("AT", 0)):
            if "RAISES" in os.environ:
                raise RuntimeError("of the task")
            os.kill(os.getpid(), int(os.environ.get("NUMBER", signal.SIGTERM)))
        return super().loss_sum(model, batch)

    def on_step(self, run, report):
        """With it, the ranks agree on a stop after each step, however fast the steps are."""


def address_of(folder):
    return f"file://{folder}/bucket/run"


def complete(bucket):
    """{name of a checkpoint: its files}, of those at the address that are complete."""
    found = {}
    for path in sorted(bucket.glob("checkpoints/*/manifest.json")):
        found[path.parent.name] = files = json.loads(path.read_text())["files"]
        for name, entry in files.items():
            assert entry_of(path.parent / f"{name}.{entry['xxh3']}") == entry
    return found


def shards(files):
    return {name: entry["xxh3"] for name, entry in files.items() if name.endswith(".distcp")}


def last_shards(folder):
    """The hashes of the shards of step 8, in a run on this disk."""
    text = (folder / "checkpoints/step_00000008/manifest.json").read_text()
    return shards(json.loads(text)["files"])


@pytest.fixture
def bucket(tmp_path):
    return tmp_path / "bucket/run"


def statuses(done):
    return [process.returncode for process in done]


def run(launch, cache, *words, ranks=2, **environment):
    words = [*WORDS, "--run.dir", address_of(launch.folder), *words]
    return launch.each(ranks, *words, DIST_AMP_CACHE=str(cache), **environment)


def is_released(bucket, number=1):
    return json.loads((bucket / f"leases/{number:08d}").read_text()).get("released", False)


# ---- a whole run ----


def on_two_nodes(folder, *words, **environment):
    """A rank on each of two nodes with empty disks, where their local folders have one name."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    world |= {"DIST_AMP_CACHE": "cache", **environment}
    started = []
    for rank in range(2):
        node = folder / f"node{rank}"
        shutil.rmtree(node, ignore_errors=True)
        node.mkdir()
        started.append(Launch(node).start(0, *WORDS, *words, RANK=str(rank), **world))
    return [finish(process, 300) for process in started]


def test_a_run_continues_on_empty_disks_and_ends_as_one_that_was_not_stopped(
    launch, tmp_path, bucket
):
    address = address_of(tmp_path)
    whole = launch.each(2, *WORDS, *FSDP, "--run.dir", "whole")
    assert statuses(whole) == [0, 0], whole[0].stderr
    stopped = on_two_nodes(tmp_path, *FSDP, "--run.dir", address, AT="5")
    assert statuses(stopped) == [75, 75], stopped[0].stderr
    assert f"start the same job again with --run.dir {address}\n" in stopped[0].stdout
    assert max(complete(bucket)) >= "step_00000005"
    ended = on_two_nodes(tmp_path, *FSDP, "--run.dir", address)
    assert statuses(ended) == [0, 0], ended[0].stderr
    checkpoints = complete(bucket)
    assert shards(checkpoints["step_00000008"]) == last_shards(tmp_path / "whole")
    assert len(checkpoints) == 3, "checkpoint.keep"
    assert tomllib.loads((bucket / "config.toml").read_text())["run"]["dir"] == address
    assert not list(bucket.glob("config_until_*")), "the local folder is no setting"
    rows = [(folder / "metrics.jsonl").read_text() for folder in (bucket, tmp_path / "whole")]
    losses = [[json.loads(row)["train/loss"] for row in text.splitlines()] for text in rows]
    assert losses[0] == losses[1]
    assert json.loads((bucket / "summary.json").read_text())["stopped_by"] == "completed"
    assert len(list((bucket / "tensorboard").glob("rank0000[01]/events*"))) == 4


def test_what_a_killed_run_has_not_put_is_put_by_the_next_start_on_its_disk(
    launch, tmp_path, bucket
):
    killed = run(launch, "cache", *FSDP, AT="6", NUMBER=str(int(signal.SIGKILL)))
    assert killed[0].returncode == -signal.SIGKILL
    saved = sorted(path.parent.name for path in (tmp_path / "cache").rglob("manifest.json"))
    for name in complete(bucket):
        shutil.rmtree(bucket / "checkpoints" / name)  # as if none had been put
    ended = run(launch, "cache", *FSDP)
    assert statuses(ended) == [0, 0], ended
    assert "waiting up to" not in ended[0].stdout, "for a sign of life of a run of this disk"
    assert f"resumed from step {int(saved[-1][5:])}" in ended[0].stdout
    assert list(complete(bucket)) == ["step_00000004", "step_00000006", "step_00000008"]


def test_a_run_that_fails_waits_for_its_uploads_and_keeps_its_exit_status(launch, bucket):
    (failed,) = run(launch, "cache", *SINGLE, ranks=1, AT="6", RAISES="1")
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
def test_a_start_that_fails_gives_its_address_to_the_corrected_command(finished):
    (refused,) = run(Launch(finished), "first", *SINGLE, "--run.seed", 5, ranks=1)
    assert refused.returncode == 64, refused
    assert is_released(finished / "bucket/run", 2)


def begin(address, resume="auto", world=None):
    """What a run does at its start."""
    job = SimpleNamespace(folder=local_folder(address), world=world or World())
    mirror.mirrored(SimpleNamespace(resume=resume), job).__enter__()


@pytest.mark.bad_input("run.resume=never at an address that holds a run, on an empty disk")
def test_a_run_that_may_not_resume_is_refused_where_another_is(finished):
    with pytest.raises(Failure, match=f"run.dir={address_of(finished)} holds a run already"):
        begin(address_of(finished), "never")
    assert len(complete(finished / "bucket/run")) == 3


# ---- uploads ----


def local_run(folder, step=4, content=b"shard"):
    """A local folder with logs, and a checkpoint of two files."""
    add_checkpoint(folder, step, content)
    (folder / "metrics.jsonl").write_bytes(content)
    return folder


def add_checkpoint(folder, step, content=b"shard"):
    path = folder / f"checkpoints/step_{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for number in range(2):
        name = f"__{number}_0.distcp"
        (path / name).write_bytes(content * (number + 1))
        files[name] = entry_of(path / name)
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": files}))
    return path


@pytest.fixture
def watched(tmp_path):
    """A store that keeps what is done to it in `done`, and calls `before` with that first."""
    at = Store(address_of(tmp_path))
    at.done = []
    at.before = lambda action, name: None

    def note(action, call, *args):
        name = next(arg for arg in args if isinstance(arg, str))
        at.before(action, name)
        at.done.append((action, name))
        return call(*args)

    for action in ("write", "create", "upload", "remove"):
        setattr(at, action, partial(note, action, getattr(at, action)))
    return at


def put_into(at):
    """The names of what has been put, without claims."""
    return [name for kind, name in at.done if kind != "remove" and "leases" not in name]


def away(action, name):
    raise OSError("the store is away")


def mirror_of(folder, at, dead=""):
    """The mirror of a run's main node, with a claim of its own."""
    return Mirror(at, folder, take_claim(at, dead, pytest.fail))


@pytest.mark.parametrize("at", range(4))
def test_an_upload_that_fails_anywhere_leaves_no_checkpoint_and_is_tried_again(
    at, tmp_path, watched, bucket
):
    main = mirror_of(local_run(tmp_path / "local"), watched)
    watched.before = lambda *action: away(*action) if len(put_into(watched)) == at else None
    with pytest.raises(OSError, match="the store is away"):
        main.put_new(is_last=True)
    assert complete(bucket) == {}
    watched.before = lambda *_: None
    main.put_new(is_last=True)
    assert list(complete(bucket)) == ["step_00000004"]
    names = [name.rpartition("/")[2].partition(".")[0] for name in put_into(watched)]
    assert sorted(names[:2]) == ["__0_0", "__1_0"]
    assert names[2:] == ["metrics", "manifest"], "in this order, and nothing twice"


def test_a_checkpoint_of_two_nodes_is_published_once_both_have_put_their_files(
    tmp_path, watched, bucket
):
    first, second = local_run(tmp_path / "first"), local_run(tmp_path / "second")
    (first / "checkpoints/step_00000004/__1_0.distcp").unlink()
    (second / "checkpoints/step_00000004/__0_0.distcp").unlink()
    add_checkpoint(first, 2)
    main = mirror_of(first, watched)
    with pytest.raises(OSError, match=r"__1_0.distcp\.\w+ is not up yet"):
        main.put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000002"], "an older one does not wait for it"
    Mirror(watched, second, None).put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000002"], "the second node publishes nothing"
    main.put_new(is_last=False)
    assert max(complete(bucket)) == "step_00000004"


def test_checkpoints_that_the_run_removed_are_removed_manifests_first_never_the_newest(
    tmp_path, watched, bucket
):
    folder = local_run(tmp_path / "local")
    main = mirror_of(folder, watched)
    main.put_new(is_last=False)
    cut = bucket / "checkpoints/step_00000002/__0_0.distcp.0123"
    cut.parent.mkdir()
    cut.write_text("left by a save that was killed")
    shutil.rmtree(folder / "checkpoints/step_00000004")
    main.put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000004"], "the only one"
    add_checkpoint(folder, 6)
    watched.done.clear()
    main.put_new(is_last=False)
    removed = [name for kind, name in watched.done if kind == "remove"]
    of_step_4 = [name for name in removed if "step_00000004" in name]
    assert of_step_4[0] == "checkpoints/step_00000004/manifest.json"
    assert list(complete(bucket)) == ["step_00000006"]
    assert not [path for path in bucket.rglob("*distcp*") if "00000006" not in str(path)]
    add_checkpoint(folder, 8)
    main.put_new(is_last=False)
    shutil.rmtree(folder / "checkpoints/step_00000006")
    main.put_new(is_last=True)
    assert list(complete(bucket)) == ["step_00000008"], "also what goes after the last one is put"


def test_a_checkpoint_that_the_run_removes_while_it_is_put_is_put_whole(tmp_path, watched, bucket):
    main = mirror_of(local_run(tmp_path / "local"), watched)
    path = tmp_path / "local/checkpoints/step_00000004"
    watched.before = lambda *_: shutil.rmtree(path, ignore_errors=True)
    main.put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000004"]


@pytest.mark.bad_input("a run at an address that was silent for so long that another has taken it")
def test_a_run_that_was_thought_dead_publishes_nothing_and_never_mixes_its_shards(
    tmp_path, watched, bucket
):
    dead = mirror_of(local_run(tmp_path / "dead", content=b"dead!"), watched)
    live = mirror_of(
        local_run(tmp_path / "live", content=b"live!"), watched, dead.claim.record["id"]
    )
    with pytest.raises(OSError, match="has taken over"):
        dead.put_new(is_last=True)
    assert complete(bucket) == {}
    (bucket / "checkpoints/step_00000004/manifest.json").write_text('{"files": {}}')
    live.put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000004"]
    assert len(list(bucket.rglob("*distcp*"))) == 2, "those of the dead run are removed"


@pytest.mark.bad_input("a file of a checkpoint on the local disk that is damaged before its upload")
def test_a_file_that_is_not_what_its_manifest_says_is_not_put(tmp_path, watched, bucket):
    folder = local_run(tmp_path / "local")
    (folder / "checkpoints/step_00000004/__0_0.distcp").write_bytes(b"shatd")
    with pytest.raises(OSError, match="is not what its manifest says"):
        mirror_of(folder, watched).put_new(is_last=False)
    assert complete(bucket) == {}


def test_a_signal_during_the_last_upload_does_not_cut_it(tmp_path, watched, bucket):
    main = mirror_of(local_run(tmp_path / "local"), watched)

    def stop(action, name):
        if action == "upload":
            assert main.run_ended.wait(60)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)

    watched.before = stop
    main.uploads.start()
    main.finish(60.0, has_failed=False)
    assert list(complete(bucket)) == ["step_00000004"]
    assert is_released(bucket)


@pytest.mark.bad_input("uploads that are not complete when a run at an address has waited for them")
@pytest.mark.bad_input("an object store that is away while a run trains, or at its end")
def test_a_run_whose_uploads_are_not_complete_ends_with_75_and_the_next_start_completes_them(
    tmp_path, watched, bucket, capfd, monkeypatch
):
    monkeypatch.setattr(mirror, "PAUSES", (0.01,) * 3)
    folder = local_run(tmp_path / "local")
    main = mirror_of(folder, watched)
    watched.before = away
    main.uploads.start()
    with pytest.raises(SystemExit) as ended:
        main.finish(0.1, has_failed=False)
    assert ended.value.code == 75
    printed = capfd.readouterr().err
    warning = f"{watched.address} is not up to date (the store is away); checkpoints are kept in "
    assert printed.count(warning) == 1
    assert f"{watched.address} is not complete after 0.1 s (the store is away)" in printed
    assert f"the rest is in {folder}: the same command on this machine uploads it" in printed
    watched.before = lambda *_: None
    again = mirror_of(folder, watched, main.claim.record["id"])
    again.uploads.start()
    again.finish(60.0, has_failed=False)
    printed = capfd.readouterr().out
    assert f"uploaded: --run.dir {watched.address} continues on any machine" in printed
    assert list(complete(bucket)) == ["step_00000004"]


# ---- downloads ----


def damage(kind, path):
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes({"flipped": flipped, "cut": content[:-1], "longer": content + b"0"}[kind])


@pytest.mark.bad_input("a checkpoint on object storage that is damaged or forged")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("__0_0.distcp", "longer"), (".metadata", "flipped"), ("manifest.json", "cut")],
)
def test_a_damaged_checkpoint_at_the_address_gives_way_to_the_one_before(
    name, kind, finished, monkeypatch, capsys
):
    monkeypatch.setattr(mirror, "FETCH_PAUSES", (0.0,))
    (path,) = finished.glob(f"bucket/run/checkpoints/step_00000008/{name}*")
    damage(kind, path)
    address = address_of(finished)
    pull_manifests(Store(address), local_folder(address), is_stale=False)
    words = [*WORDS, *SINGLE, "--run.dir", address, "--run.resume", "auto"]
    assert make_run(World(), None, *words).step == 6
    assert "using step_00000006 instead" in capsys.readouterr().err


def test_a_file_that_arrives_damaged_is_fetched_again_and_one_that_is_gone_is_named(
    tmp_path, watched, bucket, monkeypatch
):
    folder = local_run(tmp_path / "local")
    mirror_of(folder, watched).put_new(is_last=False)
    (folder / ".address").write_text(watched.address)
    path = folder / "checkpoints/step_00000004"
    (path / "__0_0.distcp").unlink()
    files = json.loads((path / "manifest.json").read_text())["files"]
    fetches = []
    original = type(watched.fs).get_file

    def truncate(self, remote, local, **options):
        original(self, remote, local, **options)
        fetches.append(remote)
        if len(fetches) < 3:
            Path(local).write_bytes(b"x")

    monkeypatch.setattr(mirror, "FETCH_PAUSES", (0.0,) * 3)
    monkeypatch.setattr(type(watched.fs), "get_file", truncate)
    fetch(path, files)
    assert (path / "__0_0.distcp").read_bytes() == b"shard"
    assert len(fetches) == 3, "only what was missing"
    for file in (path / "__1_0.distcp", *bucket.rglob("*__1_0*")):
        file.unlink()
    with pytest.raises(CheckpointRejected, match=r"__1_0.distcp is not at file://"):
        fetch(path, files)


def started(at, folder, dead=""):
    """The mirror of a start that has claimed the address and brought its folder up to date."""
    main = mirror_of(folder, at, dead)
    pull(at, folder, main.claim.record, is_main=True)
    return main


def put_all(main):
    main.claim.record["written_by"] = main.claim.record["id"]
    main.put_new(is_last=True)


def test_what_another_machine_wrote_since_replaces_what_is_here(tmp_path, watched, capsys):
    here = local_run(tmp_path / "here", content=b"older")
    started(watched, here).close()
    there = mirror_of(local_run(tmp_path / "there", content=b"newer"), watched)
    put_all(there)
    add_checkpoint(here, 9)
    started(watched, here, there.claim.record["id"])
    assert (here / "metrics.jsonl").read_text() == "newer"
    assert [path.name for path in here.glob("checkpoints/step*")] == ["step_00000004"]
    assert [path.name for path in here.glob("checkpoints/step*/*")] == ["manifest.json"]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"step_00000009 never came to {watched.address}, written elsewhere since" in line
    (kept,) = here.glob("checkpoints/not_put_step_00000009_*")
    assert (kept / "manifest.json").exists()
    assert kept.name in line


def test_a_checkpoint_that_this_disk_has_made_anew_replaces_the_one_that_was_refused(
    tmp_path, watched, bucket
):
    here = local_run(tmp_path / "local", content=b"refused")
    main = started(watched, here)
    put_all(main)
    shutil.rmtree(here / "checkpoints/step_00000004")
    add_checkpoint(here, 4, content=b"anew!")  # and the run is killed before it is put
    put_all(started(watched, here, main.claim.record["id"]))
    (files,) = complete(bucket).values()
    assert (here / "checkpoints/step_00000004/__0_0.distcp").read_bytes() == b"anew!"
    assert len(list(bucket.rglob("*distcp*"))) == len(files) == 2


@pytest.mark.parametrize("pulls", [True, False])
def test_starts_that_are_killed_before_they_put_anything_leave_what_is_only_on_a_disk(
    pulls, tmp_path, watched
):
    here = local_run(tmp_path / "local")
    main = started(watched, here)
    put_all(main)
    add_checkpoint(here, 9)
    for _ in range(2):
        start = started if pulls else lambda at, folder, dead: mirror_of(folder, at, dead)
        main = start(watched, here, main.claim.record["id"])
    started(watched, here, main.claim.record["id"])
    names = sorted(path.name for path in here.glob("checkpoints/step*"))
    assert names == ["step_00000004", "step_00000009"]
    assert len(list((here / "checkpoints/step_00000009").iterdir())) == 3


def test_what_a_command_shows_follows_the_address(tmp_path, watched, bucket, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    main = mirror_of(local_run(tmp_path / "local"), watched)
    main.put_new(is_last=True)
    shown = fetched(watched.address)
    add_checkpoint(tmp_path / "local", 6)
    main.put_new(is_last=True)
    fetched(watched.address)
    assert len(list(shown.glob("checkpoints/step_*"))) == 2
    shutil.rmtree(bucket / "checkpoints/step_00000006")
    fetched(watched.address)
    assert [path.name for path in shown.glob("checkpoints/*")] == ["step_00000004"]


# ---- claims ----


@pytest.mark.bad_input("a run at an address that another live run writes, also on another machine")
@pytest.mark.bad_input("a run at an address from a machine whose clock is an hour off")
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_live_runs_address_is_refused_by_its_holders_name(hours, watched, monkeypatch):
    claim = take_claim(watched, "", pytest.fail)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    monkeypatch.setattr(time, "sleep", lambda seconds: claim.renew())
    with pytest.raises(Failure, match=rf"is in use by a live run \(process {os.getpid()} on "):
        take_claim(watched, "of another disk", print)


def test_a_dead_runs_address_is_taken_and_it_stops_putting_if_it_lives_after_all(
    watched, monkeypatch
):
    monkeypatch.setattr(store, "DEAD_SECONDS", 0.0)
    printed = []
    dead = take_claim(watched, "", printed.append)
    assert take_claim(watched, "", printed.append).number == 2
    assert "did not say that it ended; waiting up to 0 s for a sign of life" in printed[0]
    with pytest.raises(OSError, match="has taken over"):
        dead.renew()


@pytest.mark.bad_input("a store that lets two writers create one file")
def test_a_store_that_can_not_tell_two_writers_apart_is_refused(watched):
    watched.create = lambda name, content: watched.write(name, content) is None
    with pytest.raises(Failure, match="lets two writers create one file"):
        take_claim(watched, "", print)


@pytest.mark.bad_input("two runs that are started at one address at once")
@pytest.mark.bad_input("an object store that lists a file a while after it was written")
@pytest.mark.parametrize("is_late", [False, True])
def test_of_two_that_start_at_once_one_gets_the_address(is_late, watched, monkeypatch):
    if is_late:
        monkeypatch.setattr(Store, "sizes", lambda self, folder: {})
    else:
        take_claim(watched, "", print).release()
    both = threading.Barrier(2)
    create = Store.create

    def together(self, name, content):
        if not both.broken:
            with suppress(threading.BrokenBarrierError):
                both.wait(timeout=5)
            both.abort()
        return create(self, name, content)

    def start(_):
        try:
            claims.append(take_claim(Store(watched.address), "", print))
        except Failure as error:
            return str(error)

    claims = []
    monkeypatch.setattr(Store, "create", together)
    monkeypatch.setattr(time, "sleep", lambda seconds: [claim.renew() for claim in claims])
    with ThreadPoolExecutor(2) as pool:
        (refused,) = filter(None, pool.map(start, range(2)))
    assert len(claims) == 1
    assert "is in use by a live run" in refused


# ---- what is refused ----


@pytest.mark.bad_input("run.dir: hf://, or another store that may let two writers create one file")
@pytest.mark.bad_input("run.dir: an address of a bucket without a folder")
@pytest.mark.bad_input("run.dir: an address within another, or with a password")
@pytest.mark.parametrize(
    "address",
    ["s3://bucket", "hf://buckets/me/all/run", "s3://bucket/run::file:///run", "s3://k:hush@b/run"],
)
def test_an_address_that_can_not_be_used_is_refused(address, tmp_path, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path))
    message = message_of(64, local_folder, address)
    assert "is no address for a run: use s3://BUCKET/RUN, gs://, az:// or file:///" in message
    assert "hush" not in message


@pytest.mark.bad_input("run.dir: an address of an unknown store, or whose package is missing")
def test_an_address_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    message = message_of(64, Store, "gs://bucket/run")
    assert "gs://bucket/run: Please install gcsfs to access Google Storage (pip" in message


@pytest.mark.bad_input("run.dir: an address, with run.save() in a loop of your own")
def test_a_loop_of_ones_own_at_an_address_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))
    run = make_run(World(), Tiny(), "--run.dir", address_of(tmp_path))
    for call in (run.save, run.resume):
        assert "() with run.dir=file://" in message_of(64, call)


def folder_of_two_nodes(world, folder):
    """Ranks as on two nodes, with one local folder."""
    object.__setattr__(world, "local_rank", 0)
    os.environ["DIST_AMP_CACHE"] = str(folder / "cache")
    with pytest.raises(ConfigError) as caught:
        begin(address_of(folder), world=world)
    return str(caught.value)


@pytest.mark.bad_input("run.dir: an address, with a local folder that nodes share")
def test_nodes_that_share_the_local_folder_are_refused(tmp_path):
    for message in on_ranks(2, folder_of_two_nodes, tmp_path):
        assert "is shared by several nodes" in message


@pytest.mark.bad_input("run.dir: an address, with a local folder that can't be made")
def test_a_local_folder_that_can_not_be_made_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "file"))
    assert "set DIST_AMP_CACHE to a folder" in message_of(64, local_folder, "s3://bucket/run")


# ---- a real S3 server ----


@pytest.fixture
def s3(monkeypatch):
    """A server with a bucket; environment variables lead to it."""
    if not all(map(importlib.util.find_spec, ("s3fs", "moto", "flask"))):
        pytest.skip("needs s3fs and moto: bash tests/engines.sh")
    with s3_server() as server:
        server.put("bucket/other", b"")
        importlib.import_module("s3fs").S3FileSystem.clear_instance_cache()  # of another server
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("DIST_AMP_CACHE", "cache")
        yield server


S3 = [*WORDS, "--run.dir", "s3://bucket/run"]


def all_at(folder, name="run"):
    """The complete checkpoints at s3://bucket/NAME, fetched to a folder."""
    at = Store(f"s3://bucket/{name}")
    shutil.rmtree(folder, ignore_errors=True)
    for file in at.sizes(""):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(at.read(file))
    return complete(folder)


@pytest.mark.slow
@pytest.mark.engine
def test_of_eight_writers_one_creates_a_file_on_s3(s3):
    at = Store("s3://bucket/created")
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda number: at.create("leases/1", b"%d" % number), range(8)))
    assert sum(created) == 1
    assert at.read("leases/1") == b"%d" % created.index(True)
    assert at.create("leases/1", at.read("leases/1")), "whose answer was lost"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("fault", ["503", "500", "reset", "lost", "truncate"])
def test_a_store_that_fails_now_and_then_gets_all_checkpoints(fault, s3, launch, tmp_path):
    s3.faults_of_writes = ["", fault] * 20
    s3.faults = [fault, ""] * 4
    done = launch.each(2, *S3)
    assert statuses(done) == [0, 0], done
    assert len(all_at(tmp_path / "fetched")) == 3
    shutil.rmtree(tmp_path / "cache")
    s3.faults = [fault, ""] * 4
    done = launch.each(2, *S3, "--train.steps", 10, "--run.allow_config_change", "true")
    assert statuses(done) == [0, 0], done
    assert "resumed from step 8" in done[0].stdout
    assert max(all_at(tmp_path / "fetched")) == "step_00000010"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.bad_input(
    "object storage without credentials, or a bucket that is missing or read-only"
)
@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("nobucket", "can't be used: FileNotFoundError: The specified bucket does not exist; make"),
        ("403", "check the credentials, which must be allowed to read, write and list, and the"),
        ("no keys", "NoCredentialsError: Unable to locate credentials; check the credentials"),
    ],
)
def test_a_store_that_can_not_be_used_is_refused_at_the_start(case, line, s3, launch, monkeypatch):
    s3.every = case if case == "403" else ""
    name = case if case == "nobucket" else "bucket"
    if case == "no keys":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    done = launch.each(2, *S3, "--run.dir", f"s3://{name}/run")
    assert statuses(done) == [1, 1]
    (printed,) = "".join(process.stderr for process in done).splitlines()
    assert line in printed


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_killed_checkpoints_are_complete_or_absent_and_the_end_is_the_same(
    seed, s3, launch, tmp_path
):
    """A rank or all ranks, at random times; a new disk every other time.

    A run that has ended is compared, and the next kills are another's.
    """
    draw = random.Random(seed)
    whole = launch.each(2, *S3, "--run.dir", "whole")
    assert statuses(whole) == [0, 0], whole
    kills = ended = 0
    while kills < KILLS or ended == 0:
        name = f"run{ended}"
        ranks = launch.start_each(2, *S3, "--run.dir", f"s3://bucket/{name}", SLEEP="0.4")
        target = draw.choice(["rank", "ranks"])
        if kills < KILLS:
            time.sleep(draw.uniform(2.0, 8.0))
            kills += ranks[0].poll() is None
            for process in ranks[:1] if target == "rank" else ranks:
                process.kill()
        ends = [process.wait(120) for process in ranks]
        at = Store(f"s3://bucket/{name}")
        number = len(at.sizes("leases"))
        if record := read_claim(at, number):  # as if a while had passed: a wait is no test
            Claim(at, number, record).release()
        checkpoints = all_at(tmp_path / "fetched", name)
        if draw.random() < 0.5:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        if ends == [0, 0]:
            assert shards(checkpoints["step_00000008"]) == last_shards(tmp_path / "whole")
            ended += 1
    print(f"{kills} kills, {ended} runs ended as one that was not disturbed")
