"""A run at an address: complete or absent there, continued on any machine, by one writer.

The address is a folder by fsspec's file://, or an S3 server (moto; needs the extra `engines`).
"""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import s3_server
from forked import Launch
from messages import message_of
from ranks import on_ranks
from tiny import Tiny, make_run

from dist_amp.errors import CheckpointRejected, ConfigError, Failure
from dist_amp.files import entry_of, run_dir
from dist_amp.storage import mirror, store
from dist_amp.storage.mirror import Mirror, fetch, fetched, local_folder, pull
from dist_amp.storage.store import Claim, Store
from dist_amp.supervise.lifecycle import Job
from dist_amp.world import World

s3 = s3_server.s3  # the fixture
ENGINE = pytest.mark.engine
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
    """{complete checkpoint at the address: {shard: its hash}}."""
    found = {}
    for path in sorted(bucket.glob("checkpoints/*/manifest.json")):
        files = json.loads(path.read_text())["files"]
        for name, entry in files.items():
            assert entry_of(path.parent / f"{name}.{entry['xxh3']}") == entry
        shards = filter(re.compile(".*distcp").fullmatch, files)
        found[path.parent.name] = {name: files[name]["xxh3"] for name in shards}
    return found


@pytest.fixture
def bucket(tmp_path):
    return tmp_path / "bucket/run"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "cache"))


def run(launch, *words, ends=(0, 0), **environment):
    """A run at the address, whose ranks end with these statuses."""
    environment = {"DIST_AMP_CACHE": str(launch.folder / "cache"), **environment}
    words = [*WORDS, "--run.dir", address_of(launch.folder), *words]
    done = launch.each(len(ends), *words, **environment)
    assert tuple(process.returncode for process in done) == ends, done
    return done


def is_released(bucket):
    return json.loads((bucket / store.CLAIM).read_text()).get("released", False)


# ---- a whole run ----


def on_two_nodes(launch, **environment):
    """A rank on each of two nodes, with disks of their own."""
    node = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "DIST_AMP_CACHE": "node{rank}"}
    words = [*WORDS, *FSDP, "--run.dir", address_of(launch.folder)]
    done = launch.each(2, *words, **node, **environment)
    return done[0].stdout, [process.returncode for process in done]


def test_a_run_continues_after_a_kill_on_its_disks_and_on_empty_ones_as_if_nothing_had_been(
    launch, tmp_path, bucket
):
    run(launch, *FSDP, "--run.dir", f"file://{tmp_path}/whole")
    _, ends = on_two_nodes(launch, AT="5", NUMBER=str(int(signal.SIGKILL)))
    assert ends[0] == -signal.SIGKILL
    saved = sorted(path.parent.name for path in (tmp_path / "node0").rglob("manifest.json"))
    shutil.rmtree(bucket / "checkpoints", ignore_errors=True)  # as if none had been put
    stopped, ends = on_two_nodes(launch, AT="3")
    assert ends == [75, 75], stopped
    assert f"resumed from step {int(saved[-1][5:])}" in stopped
    assert "a sign of life" not in stopped, "of a run of this disk"
    assert f"start the same job again with --run.dir {address_of(tmp_path)}\n" in stopped
    assert saved[-1] in complete(bucket), "it is put by the next start on its disk"
    for rank in range(2):
        shutil.rmtree(tmp_path / f"node{rank}")
    ended, ends = on_two_nodes(launch)
    assert ends == [0, 0], ended
    checkpoints = complete(bucket)
    assert checkpoints["step_00000008"] == complete(tmp_path / "whole")["step_00000008"]
    assert len(checkpoints) == 3, "checkpoint.keep"
    settings = tomllib.loads((bucket / "config.toml").read_text())
    assert settings["run"]["dir"] == address_of(tmp_path)
    assert not list(bucket.glob("config_until_*")), "the local folder is no setting"
    rows = [(folder / "metrics.jsonl").read_text() for folder in (bucket, tmp_path / "whole")]
    losses = [[json.loads(row)["train/loss"] for row in text.splitlines()] for text in rows]
    assert losses[0] == losses[1]
    assert json.loads((bucket / "summary.json").read_text())["stopped_by"] == "completed"
    assert len(list((bucket / "tensorboard").glob("rank0000[01]/events*"))) == 6


@pytest.mark.bad_input("a wrong setting that is found after a run has taken its address")
@pytest.mark.bad_input("run.resume=never at an address that holds a run, on an empty disk")
def test_a_run_that_fails_waits_for_its_uploads_and_gives_its_address_to_the_corrected_command(
    launch, bucket, tmp_path
):
    run(launch, *SINGLE, ends=(1,), AT="6", RAISES="1")
    assert max(complete(bucket)) == "step_00000004"
    assert is_released(bucket)
    run(launch, *SINGLE, "--run.seed", 5, ends=(64,))
    assert is_released(bucket)
    another = [*SINGLE, "--run.resume", "never"]
    (refused,) = run(launch, *another, ends=(1,), DIST_AMP_CACHE="second")
    assert f"run.dir={address_of(tmp_path)} holds a run already" in refused.stderr
    assert max(complete(bucket)) == "step_00000004"


# ---- uploads ----


def local_run(folder, content=b"shard"):
    add_checkpoint(folder, 4, content)
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
def watched(tmp_path, monkeypatch):
    """A store that keeps what is put to it in `names`, and calls `before` with an action first.

    After each action every checkpoint at the address is complete.
    """
    at = Store(address_of(tmp_path))
    at.names = []
    at.before = lambda action: None

    def act(action, call, *args):
        at.before(action)
        name = next(arg for arg in args if isinstance(arg, str))
        if action != "remove" and "leases" not in name:
            at.names.append(name.rpartition("/")[2].partition(".")[0])
        call(*args)
        complete(tmp_path / "bucket/run")

    for action in ("write", "upload", "remove"):
        setattr(at, action, partial(act, action, getattr(at, action)))
    monkeypatch.setattr(store, "LOOK_SECONDS", 0.0)
    return at


def away(action):
    raise OSError("the store is away")


def mirror_of(folder, at, dead=""):
    """The mirror of a run's main node, with a claim of its own."""
    return Mirror(at, folder, Claim(at, dead, pytest.fail))


@pytest.fixture
def local(tmp_path):
    return local_run(tmp_path / "local")


@pytest.fixture
def main(local, watched):
    return mirror_of(local, watched)


@pytest.mark.parametrize("number", range(4))
def test_an_upload_that_fails_anywhere_leaves_no_checkpoint_and_is_tried_again(
    number, main, watched, bucket
):
    watched.before = lambda action: away(action) if len(watched.names) == number else None
    with pytest.raises(OSError, match="the store is away"):
        main.put_new(is_last=True)
    assert complete(bucket) == {}
    watched.before = lambda action: None
    main.put_new(is_last=True)
    assert list(complete(bucket)) == ["step_00000004"]
    assert sorted(watched.names[:2]) == ["__0_0", "__1_0"]
    assert watched.names[2:] == ["metrics", "manifest"], "in this order, and nothing twice"


def test_a_checkpoint_of_two_nodes_is_published_once_both_have_put_their_files(
    local, main, tmp_path, watched, bucket
):
    second = local_run(tmp_path / "second")
    (local / "checkpoints/step_00000004/__1_0.distcp").unlink()
    (second / "checkpoints/step_00000004/__0_0.distcp").unlink()
    add_checkpoint(local, 2)
    with pytest.raises(OSError, match=r"__1_0.distcp\.\w+ is not uploaded yet"):
        main.put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000002"], "an older one does not wait for it"
    Mirror(watched, second, None).put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000002"], "the second node publishes nothing"
    main.put_new(is_last=False)
    assert max(complete(bucket)) == "step_00000004"


def test_checkpoints_that_the_run_removed_are_removed_never_the_newest(local, main, bucket):
    main.put_new(is_last=False)
    cut = bucket / "checkpoints/step_00000002/__0_0.distcp.0123"
    cut.parent.mkdir()
    cut.write_text("left by a save that was killed")
    shutil.rmtree(local / "checkpoints/step_00000004")
    main.put_new(is_last=True)
    assert list(complete(bucket)) == ["step_00000004"], "the only one"
    add_checkpoint(local, 6)
    main.put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000006"]
    assert not [path for path in bucket.rglob("*distcp*") if "00000006" not in str(path)]
    add_checkpoint(local, 8)
    main.put_new(is_last=False)
    shutil.rmtree(local / "checkpoints/step_00000006")
    main.put_new(is_last=True)
    assert list(complete(bucket)) == ["step_00000008"], "also what goes after the last one is put"


@pytest.mark.bad_input("a run at an address that was silent for so long that another has taken it")
def test_a_dead_runs_address_is_taken_and_it_publishes_nothing_if_it_lives_after_all(
    main, tmp_path, watched, bucket, monkeypatch
):
    monkeypatch.setattr(store, "DEAD_SECONDS", 0.0)
    printed = []
    claim = Claim(watched, "", printed.append)
    assert "did not say that it ended; waiting up to 0 s for a sign of life" in printed[0]
    with pytest.raises(OSError, match="has taken over"):
        main.put_new(is_last=True)
    assert complete(bucket) == {}
    Mirror(watched, local_run(tmp_path / "live", b"live!"), claim).put_new(is_last=False)
    assert list(complete(bucket)) == ["step_00000004"]


@pytest.mark.bad_input("a file of a checkpoint on the local disk that is damaged before its upload")
def test_a_file_that_is_not_what_its_manifest_says_is_not_put(local, main, bucket):
    (local / "checkpoints/step_00000004/__0_0.distcp").write_bytes(b"shatd")
    with pytest.raises(OSError, match="is not what its manifest says"):
        main.put_new(is_last=False)
    assert complete(bucket) == {}


def test_a_signal_does_not_cut_the_last_upload(main, watched, bucket):
    def stop(action):
        if action == "upload":
            assert main.run_ended.wait(60)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)

    watched.before = stop
    main.uploads.start()
    main.finish(60.0, Job(None, World()))
    assert list(complete(bucket)) == ["step_00000004"]
    assert is_released(bucket)


@pytest.mark.bad_input("an object store that is away while a run trains, and after its end")
def test_a_run_whose_uploads_are_not_complete_ends_with_75_and_the_next_start_completes_them(
    local, main, watched, bucket, capfd, monkeypatch
):
    monkeypatch.setattr(mirror, "PAUSES", (0.01,) * 3)
    watched.before = away
    main.uploads.start()
    with pytest.raises(SystemExit) as ended:
        main.finish(1.0, Job(None, World()))
    assert ended.value.code == 75
    printed = capfd.readouterr().err
    warning = f"{watched.address} is not up to date (the store is away); checkpoints are kept in "
    assert printed.count(warning) == 1
    assert f"{watched.address} is not complete after 1 s (the store is away)" in printed
    assert f"the rest is in {local}: the same command on this machine uploads it" in printed
    watched.before = lambda action: None
    again = mirror_of(local, watched, main.claim.record["id"])
    again.uploads.start()
    again.finish(60.0, Job(None, World()))
    printed = capfd.readouterr().out
    assert f"uploaded: --run.dir {watched.address} continues on any machine" in printed
    assert list(complete(bucket)) == ["step_00000004"]


# ---- downloads ----


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run(Launch(folder), *SINGLE, ends=(0,))
    return folder


@pytest.fixture
def finished(finished_once, tmp_path, monkeypatch):
    """The folder of a run that has just finished; this process is on another machine."""
    monkeypatch.setenv("DIST_AMP_CACHE", str(tmp_path / "second"))
    return shutil.copytree(finished_once, tmp_path, dirs_exist_ok=True)


def damage(kind, path):
    content = path.read_bytes()
    flipped = bytes([content[0] ^ 1]) + content[1:]
    path.write_bytes({"flipped": flipped, "cut": content[:-1]}[kind])


@pytest.mark.bad_input("a checkpoint on object storage that is damaged or forged")
@pytest.mark.parametrize(("name", "kind"), [(".metadata", "flipped"), ("manifest.json", "cut")])
def test_a_damaged_checkpoint_at_the_address_gives_way_to_the_one_before(
    name, kind, finished, monkeypatch, capsys
):
    monkeypatch.setattr(mirror, "FETCH_PAUSES", (0.0,))
    (path,) = finished.glob(f"bucket/run/checkpoints/step_00000008/{name}*")
    damage(kind, path)
    address = address_of(finished)
    pull(Store(address), local_folder(address))
    words = [*WORDS, *SINGLE, "--run.dir", address, "--run.resume", "auto"]
    assert make_run(World(), None, *words).step == 6
    assert "using step_00000006 instead" in capsys.readouterr().err


def test_a_file_that_arrives_damaged_is_fetched_again_and_one_that_is_gone_is_named(
    local, main, watched, bucket, monkeypatch
):
    main.put_new(is_last=False)
    (local / ".address").write_text(watched.address)
    path = local / "checkpoints/step_00000004"
    (path / "__0_0.distcp").unlink()
    files = json.loads((path / "manifest.json").read_text())["files"]
    arrives = [b"x", b"shar", b"shard"]
    monkeypatch.setattr(mirror, "FETCH_PAUSES", (0.0,) * 3)
    get_file = "fsspec.implementations.local.LocalFileSystem.get_file"
    with patch(get_file, lambda _, remote, to: Path(to).write_bytes(arrives.pop(0))):
        fetch(path, files)
    assert (path / "__0_0.distcp").read_bytes() == b"shard"
    assert arrives == [], "only what was missing is fetched, and again while it is damaged"
    for file in (path / "__1_0.distcp", *bucket.rglob("*__1_0*")):
        file.unlink()
    with pytest.raises(CheckpointRejected, match=r"__1_0.distcp can't be fetched from file://"):
        fetch(path, files)


def test_a_newer_checkpoint_of_another_machine_replaces_what_is_here(tmp_path, watched):
    here = local_run(tmp_path / "here", content=b"older")
    there = local_run(tmp_path / "there", content=b"newer")
    add_checkpoint(there, 6)
    add_checkpoint(here, 5)
    mirror_of(there, watched).put_new(is_last=True)
    pull(watched, here)
    assert (here / "metrics.jsonl").read_text() == "newer"
    names = sorted(str(path.relative_to(here)) for path in here.glob("checkpoints/step*/*"))
    assert names == [f"checkpoints/step_0000000{step}/manifest.json" for step in (4, 6)]


@pytest.mark.parametrize("newer", [[], [9]])
def test_what_is_newest_on_a_disk_stays_and_replaces_what_was_refused(
    newer, local, watched, bucket
):
    main = mirror_of(local, watched)
    main.put_new(is_last=True)
    shutil.rmtree(local / "checkpoints/step_00000004")
    for step in (4, *newer):
        add_checkpoint(local, step, content=b"anew!")  # and the run is killed before it is put
    pull(watched, local)
    assert (local / "checkpoints/step_00000004/__0_0.distcp").read_bytes() == b"anew!"
    mirror_of(local, watched, main.claim.record["id"]).put_new(is_last=True)
    assert list(complete(bucket)) == [f"step_0000000{step}" for step in (4, *newer)]


def test_what_a_command_shows_follows_the_address(local, main, watched, bucket):
    main.put_new(is_last=True)
    shown = fetched(watched.address)
    add_checkpoint(local, 6)
    main.put_new(is_last=True)
    fetched(watched.address)
    assert len(list(shown.glob("checkpoints/step_*"))) == 2
    shutil.rmtree(bucket / "checkpoints/step_00000006")
    fetched(watched.address)
    assert [path.name for path in shown.glob("checkpoints/*")] == ["step_00000004"]


# ---- claims ----


@pytest.mark.bad_input("a run at an address that a live run writes")
def test_a_live_runs_address_is_refused_by_its_holders_name_until_it_ends(watched, monkeypatch):
    claim = Claim(watched, "", pytest.fail)
    monkeypatch.setattr(time, "sleep", lambda seconds: claim.renew())
    with pytest.raises(Failure, match=rf"is in use by a live run \(process {os.getpid()} on "):
        Claim(watched, "of another disk", print)
    monkeypatch.setattr(time, "sleep", lambda seconds: claim.release())
    again = Claim(watched, "of another disk", print)
    assert again.read()["id"] == again.record["id"]


@pytest.mark.bad_input("two runs at one address at once")
def test_of_two_that_start_at_once_the_last_to_write_gets_the_address(watched, monkeypatch):
    started = []

    def start_another(seconds):
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        watched.remove(store.CLAIM)  # it finds no claim either
        started.append(Claim(Store(watched.address), "", pytest.fail))

    monkeypatch.setattr(time, "sleep", start_another)
    assert "is in use by a live run" in message_of(1, Claim, watched, "", pytest.fail)
    started[0].renew()


# ---- what is refused ----


NO_ADDRESS = "is no address for a run: use s3://BUCKET/RUN, gs://, az:// or file:///"


@pytest.mark.bad_input("run.dir: a bucket without a folder, an address within another, hf://")
@pytest.mark.bad_input("run.dir: an address with a password, or whose package is missing")
@pytest.mark.parametrize(
    ("address", "fragment"),
    [
        ("s3://bucket", NO_ADDRESS),
        ("hf://buckets/me/all/run", NO_ADDRESS),
        ("s3://bucket/run::file:///run", NO_ADDRESS),
        ("s3://k:hush@b/run", NO_ADDRESS),
        ("gs://bucket/run", "gs://bucket/run: Please install gcsfs to access Google Storage"),
    ],
)
def test_an_address_that_can_not_be_used_is_refused(address, fragment, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    message = message_of(64, lambda: Store(run_dir(local_folder(address))))
    assert fragment in message
    assert "hush" not in message


@pytest.mark.bad_input("run.dir: an address, with run.save() in a loop of your own")
def test_a_loop_of_ones_own_at_an_address_is_refused(tmp_path):
    run = make_run(World(), Tiny(), "--run.dir", address_of(tmp_path))
    for call in (run.save, run.resume):
        assert "() does not support run.dir=file://" in message_of(64, call)


def start_with_one_folder(world, folder):
    """What a run does at its start; ranks are as on two nodes."""
    os.environ["DIST_AMP_CACHE"] = str(folder / "cache")
    world = replace(world, local_rank=0)
    job = SimpleNamespace(folder=local_folder(address_of(folder)), world=world)
    with pytest.raises(ConfigError, match="is shared by several nodes"):
        mirror.mirror_run(SimpleNamespace(resume="auto"), job)


@pytest.mark.bad_input("run.dir: an address, with a local folder that nodes share")
def test_nodes_that_share_the_local_folder_are_refused(tmp_path):
    on_ranks(2, start_with_one_folder, tmp_path)


# ---- a real S3 server ----


S3 = ["--run.dir", "s3://bucket/run"]


def all_at(folder, name="run"):
    """The complete checkpoints at s3://bucket/NAME, fetched to a folder."""
    at = Store(f"s3://bucket/{name}")
    shutil.rmtree(folder, ignore_errors=True)
    if at.sizes(""):
        at.fs.get(at.root, str(folder), recursive=True)
    return complete(folder)


@pytest.mark.slow
@ENGINE
@pytest.mark.parametrize("fault", ["503", "500", "reset", "lost", "truncate"])
def test_a_store_that_fails_now_and_then_gets_all_checkpoints(fault, s3, launch, tmp_path):
    s3.faults_of_writes = ["", fault] * 20
    s3.faults = [fault, ""] * 4
    run(launch, *S3)
    assert len(all_at(tmp_path / "fetched")) == 3
    shutil.rmtree(tmp_path / "cache")
    s3.faults = [fault, ""] * 4
    done = run(launch, *S3, "--train.steps", 10, "--run.allow_config_change", "true")
    assert "resumed from step 8" in done[0].stdout
    assert max(all_at(tmp_path / "fetched")) == "step_00000010"


@pytest.mark.slow
@ENGINE
@pytest.mark.bad_input("object storage without credentials, or a missing or read-only bucket")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("none", "FileNotFoundError: The specified bucket does not exist; check the bucket's name"),
        ("bucket", "the network, and credentials that may read, write and list"),
        ("no_keys", "NoCredentialsError: Unable to locate credentials; check the "),
    ],
)
def test_a_store_that_can_not_be_used_is_refused_at_the_start(name, line, s3, launch, monkeypatch):
    s3.every = "403" if name == "bucket" else ""
    if name == "no_keys":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    done = run(launch, "--run.dir", f"s3://{name}/run", ends=(1, 1))
    # A rank that ends later may print torch's trace of the connection that it has lost.
    (printed,) = re.findall("error: .*", "".join(process.stderr for process in done))
    assert line in printed


@pytest.mark.slow
@ENGINE
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_killed_checkpoints_are_complete_or_absent_and_the_end_is_the_same(
    seed, s3, launch, tmp_path
):
    """A rank or all ranks, at random times; a new disk every other time.

    A run that has ended is compared, and the next kills are another's.
    """
    draw = random.Random(seed)
    run(launch, "--run.dir", "s3://bucket/whole")
    whole = all_at(tmp_path / "fetched", "whole")["step_00000008"]
    kills = ended = 0
    while kills < KILLS or ended == 0:
        name = f"run{ended}"
        ranks = launch.start_each(2, *WORDS, "--run.dir", f"s3://bucket/{name}", SLEEP="0.4")
        if kills < KILLS:
            time.sleep(draw.uniform(2.0, 8.0))
            kills += ranks[0].poll() is None
            for process in ranks[: draw.choice([1, 2])]:
                process.kill()
        ends = [process.wait(120) for process in ranks]
        at = Store(f"s3://bucket/{name}")
        if record := json.loads(at.read(store.CLAIM) or "{}"):
            # As if a while had passed: a wait is no test.
            at.write(store.CLAIM, json.dumps({**record, "released": True}).encode())
        checkpoints = all_at(tmp_path / "fetched", name)
        if draw.random() < 0.5:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        if ends == [0, 0]:
            assert checkpoints["step_00000008"] == whole
            ended += 1
