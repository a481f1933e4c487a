"""A run whose run.dir is an address, such as s3://bucket/run: a local folder stands for it.

The run reads and writes that folder alone. On each node a thread of the first rank uploads what is
new: a checkpoint's files, under names with their hashes, so that two writers never mix them; and
once the store has the files of all nodes, the manifest. So at the address too, a checkpoint is
complete or absent. Uploads that fail are tried again; the next start in this folder uploads what a
killed run did not. A start gets the manifests and logs that are at the address; a checkpoint's
other files are fetched when it is read.
"""

import getpass
import hashlib
import json
import math
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from dist_amp.distributed.process import attempt, in_time, warn
from dist_amp.distributed.signals import handle_signals
from dist_amp.errors import (
    SAVED_AND_STOPPED,
    CheckpointRejected,
    ConfigError,
    DataError,
    Failure,
    first_line,
)
from dist_amp.files import ADDRESS, only_process, run_dir
from dist_amp.settings import RunConfig
from dist_amp.storage.store import CLAIMS, RENEW_SECONDS, Claim, Store
from dist_amp.world import World

T = TypeVar("T")

VARIABLE = "DIST_AMP_CACHE"
USABLE = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|file)://[^:/]*(/((?!::)[^/])+)+")
MANIFEST = "manifest.json"
HOLDER = ".claim"  # in the main node's folder: the id of the claim under which it was written last

PARALLEL = 4  # files at a time
LOG_SECONDS = 30.0  # between uploads of logs: stores can't append, so each takes the whole file
PAUSES = (0.5, 1.0, 4.0, 16.0, 30.0)  # seconds between uploads, longer with each that fails
FETCH_PAUSES = (1.0, 4.0, 0.0)  # after each attempt to fetch a file


def local_folder(address: str, ending: str = "") -> Path:
    """Make the folder that stands for an address on this machine. Errors: ConfigError."""
    address = address.rstrip("/")
    if not USABLE.fullmatch(address):
        raise ConfigError(
            f"run.dir={address} is no address for a run: use s3://BUCKET/RUN, gs://, az:// or "
            "file:///FOLDER/RUN, without a password: it belongs into the environment"
        )
    temporary = Path(tempfile.gettempdir(), f"dist_amp-{getpass.getuser()}")
    parent = Path(os.environ.get(VARIABLE, temporary)).expanduser()
    unique = hashlib.sha256(address.encode()).hexdigest()[:8]
    folder = parent / f"{address.rpartition('/')[2]}-{unique}{ending}"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise ConfigError(f"{parent} belongs to another user; set {VARIABLE} to a folder of yours")
    folder.mkdir(exist_ok=True)
    complete = folder / f"{ADDRESS}.{uuid4().hex}"
    complete.write_text(address)
    complete.replace(folder / ADDRESS)  # another rank, or command, may be reading it
    return folder


# --- from the address


def pull(store: Store, folder: Path, logs: bool = True, is_copy: bool = False) -> None:
    """Show what is at the address. Checkpoints that are here only go if a newer one is there.

    is_copy: the folder is a command's, which has nothing of its own.
    """
    complete = {}
    for name in store.sizes("checkpoints"):
        if name.endswith(MANIFEST):
            complete[name.split("/")[1]] = store.read(name)
    local = {}
    for path in folder.glob(f"checkpoints/step_*/{MANIFEST}"):
        local[path.parent.name] = path.read_bytes()
    if is_copy or max(complete, default="") > max(local, default=""):
        for name in store.sizes("") if logs else ():
            if is_log(name) and not name.startswith("tensorboard/"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(store.read(name))
        for checkpoint in local:
            if local[checkpoint] != complete.get(checkpoint):
                shutil.rmtree(folder / "checkpoints" / checkpoint)
    for checkpoint, manifest in complete.items():
        path = folder / "checkpoints" / checkpoint
        if not path.exists():
            path.mkdir(parents=True)
            (path / MANIFEST).write_bytes(manifest)


def is_log(name: str) -> bool:
    """Whether a file of the run's folder is kept at the address as it is."""
    parts = name.split("/")
    return parts[0] not in ("checkpoints", CLAIMS) and not any(p.startswith(".") for p in parts)


def manifest_of(checkpoint: str) -> str:
    return f"checkpoints/{checkpoint}/{MANIFEST}"


def key_of(checkpoint: str, name: str, files: dict[str, Any]) -> str:
    return f"checkpoints/{checkpoint}/{name}.{files[name]['xxh3']}"


def fetch(checkpoint: Path, files: dict[str, Any]) -> None:
    """Get a checkpoint's files that are at the address only. Errors: CheckpointRejected."""

    def get(name: str) -> None:
        for pause in FETCH_PAUSES:
            try:
                if not (checkpoint / name).exists():
                    key = key_of(checkpoint.name, name, files)
                    store.download(key, checkpoint / name, files[name])
                return
            except Exception as error:  # each file system has errors of its own
                problem = first_line(error) or type(error).__name__
                time.sleep(pause)
        raise CheckpointRejected(f"{name} can't be fetched from {store.address}: {problem}")

    if not all((checkpoint / name).exists() for name in files):
        store = Store(run_dir(checkpoint.parent.parent))
        lock = only_process(checkpoint / ".fetching.lock", math.inf)
        with lock, ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(get, files))


# --- to the address


class Mirror:
    """Uploads what is new. claim: on the run's main node; None on other nodes."""

    def __init__(self, store: Store, folder: Path, claim: Claim | None):
        self.store = store
        self.folder = folder
        self.claim = claim
        self.up: dict[str, int] = {}  # {checkpoint that is up: the time of its manifest}
        self.logs: dict[str, tuple[int, float]] = {}  # {log that is up: its size and time}
        self.logs_put = 0.0
        self.problem = ""  # of the last upload, if it failed
        self.run_ended = threading.Event()
        self.ended = threading.Event()  # this too, whatever is left
        self.uploads = threading.Thread(target=self.upload, name="uploads", daemon=True)
        if claim is not None:
            threading.Thread(target=self.renew, args=[claim], name="claim", daemon=True).start()

    def renew(self, claim: Claim) -> None:
        while not self.ended.wait(RENEW_SECONDS):
            with suppress(Exception):  # an upload fails too, and says so
                claim.renew()

    def upload(self) -> None:
        """Until the run has ended and all is up."""
        failures = 0
        while not self.ended.is_set():
            is_last = self.run_ended.is_set()
            try:
                self.put_new(is_last)
                self.problem = ""
                failures = 0
                if is_last:
                    return
            except Exception as error:  # each file system has errors of its own
                self.problem = first_line(error) or type(error).__name__
                failures += 1
                if failures == len(PAUSES):  # after a minute or so
                    warn(
                        f"{self.store.address} is not up to date ({self.problem}); checkpoints are "
                        f"kept in {self.folder} until it is"
                    )
            pause = PAUSES[min(failures, len(PAUSES) - 1)]
            (self.ended if is_last else self.run_ended).wait(pause)

    def put_new(self, is_last: bool) -> None:
        """Upload what is new, and remove at the address what the run has removed."""
        manifests = self.folder.glob(f"checkpoints/step_*/{MANIFEST}")
        times = {path.parent.name: path.stat().st_mtime_ns for path in manifests}
        new = sorted(name for name in times if self.up.get(name) != times[name])
        problem: Exception | None = None
        for name in reversed(new):  # the newest first: an older one may be removed meanwhile
            try:
                self.put_checkpoint(name)
                self.up[name] = times[name]
            except Exception as error:
                problem = problem or error
        if is_last or time.monotonic() - self.logs_put > LOG_SECONDS:
            self.put_logs()
        if problem:
            raise problem
        if self.claim is not None and self.up and (new or is_last):
            names = self.store.sizes("checkpoints")
            for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):  # first
                checkpoint = name.split("/")[1]
                if checkpoint < max(self.up) and checkpoint not in times:
                    self.store.remove(name)

    def put_checkpoint(self, checkpoint: str) -> None:
        """Upload this node's files of a checkpoint; on the main node, publish it at the address.

        Errors: OSError while the store has not all files, also those of other nodes.
        """
        path = self.folder / "checkpoints" / checkpoint
        manifest = (path / MANIFEST).read_bytes()
        if self.store.read(manifest_of(checkpoint)) == manifest:
            return  # it came from there, or an earlier start has put it
        files = json.loads(manifest)["files"]
        sizes = {key_of(checkpoint, name, files): files[name]["bytes"] for name in files}
        before = self.store.sizes(f"checkpoints/{checkpoint}")

        def put(name: str) -> None:
            key = key_of(checkpoint, name, files)
            if before.get(key) != sizes[key] and (path / name).exists():  # else another node's
                self.store.upload(path / name, key, files[name])

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(put, files))
        if self.claim is None:
            return
        after = self.store.sizes(f"checkpoints/{checkpoint}")
        for key, size in sizes.items():
            if after.get(key) != size:
                raise OSError(f"{key} is not up yet")
        self.put_logs()  # before it: a run that resumes here needs its metrics so far
        self.store.write(manifest_of(checkpoint), manifest)

    def put_logs(self) -> None:
        if self.claim is not None:
            self.claim.renew()  # an error if another run has taken the address
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if is_log(name) and path.is_file():
                stat = path.stat()
                if self.logs.get(name) != (stat.st_size, stat.st_mtime):
                    self.store.write(name, path.read_bytes())
                    self.logs[name] = (stat.st_size, stat.st_mtime)
        self.logs_put = time.monotonic()

    def finish(self, seconds: float, job: Any) -> None:
        """Wait until all is up. Errors: SystemExit with 75 if it is not, unless the run has failed.

        Ctrl-C ends the wait; other signals don't: it needs the time that a grace period gives.
        """
        self.run_ended.set()
        address = self.store.address
        job.world.say(f"waiting up to {seconds:g} s for the uploads to {address}; Ctrl-C ends it")
        ignored = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        with suppress(KeyboardInterrupt), handle_signals(signal.SIG_IGN, ignored):
            self.uploads.join(seconds)
        is_complete = not self.uploads.is_alive()
        self.ended.set()
        if self.claim is not None:
            with suppress(TimeoutError):  # without an answer another run waits a while
                in_time(30.0, self.claim.release)
        if is_complete:
            job.world.say(f"uploaded: --run.dir {address} continues on any machine")
            return
        warn(
            f"{address} is not complete after {seconds:g} s ({self.problem or 'it is slow'}); the "
            f"rest is in {self.folder}: the same command on this machine uploads it"
        )
        if job.status is None:
            raise SystemExit(SAVED_AND_STOPPED)


# --- a run, and a command


def mirror_run(config: RunConfig, job: Any) -> None:
    """Claim the address, and upload from now to the end of the job; every rank calls it.

    Errors: Failure if another run holds the claim, or the store can't be used.
    """
    folder, world = job.folder, job.world
    address = run_dir(folder)
    holder = folder / HOLDER

    def take(store: Store) -> Claim:
        names = store.sizes("checkpoints")
        if config.resume == "never" and not attempt() and any(MANIFEST in name for name in names):
            raise Failure(
                f"run.dir={address} holds a run already; choose another, or use run.resume=auto"
            )
        # The claim that this folder notes is a dead process's: this one has the folder's lock.
        dead = holder.read_text() if holder.exists() else ""
        claim = Claim(store, dead, world.say)
        holder.write_text(claim.record["id"])
        return claim

    def follow(store: Store) -> Mirror:
        if not world.is_main and holder.exists() and holder.read_text() == claim_id:
            raise ConfigError(
                f"{folder} is shared by several nodes, which keep their parts of checkpoints in "
                f"it; set {VARIABLE} to a folder on each node's disk"
            )
        pull(store, folder, logs=world.is_main)
        return Mirror(store, folder, claim)

    claim = on_all_ranks(world, address, take if world.is_main else None)
    claim_id = world.from_main(claim.record["id"] if claim else "")
    uploader = on_all_ranks(world, address, follow if world.local_rank == 0 else None)
    if uploader is not None:
        world.say(f"local  {folder}, uploaded to {address}")
        uploader.uploads.start()
        job.at_end = partial(uploader.finish, config.timeout_seconds, job)


def on_all_ranks(world: World, address: str, call: Callable[[Store], T] | None) -> T | None:
    """The result of this rank's call, if it has one. Errors: Failure on every rank."""
    problem: Failure | None = None
    result: T | None = None
    try:
        result = call and at_address(address, call)
    except Failure as error:
        problem = error
    world.wait_long()  # for a claim of a dead run
    world.raise_first(problem)
    return result


def at_address(address: str, call: Callable[[Store], T]) -> T:
    """Call with the store at an address. Errors: Failure with what is wrong, and the fix."""
    try:
        return call(Store(address))
    except Failure:
        raise
    except Exception as error:  # each file system has errors of its own
        raise Failure(
            f"{address} can't be used: {type(error).__name__}: {first_line(error)}; check the "
            "bucket's name, the credentials, which must be allowed to read, write and list, and "
            "the network"
        ) from error


def fetched(text: str) -> Path:
    """The path of a run, a checkpoint or another file; what is at an address is shown in a folder.

    It gets manifests and logs; a checkpoint's files follow when it is read. Errors: Failure.
    """
    if "://" not in text:
        return Path(text).expanduser()
    address, *inside = re.split("/(?=checkpoints/)", text.rstrip("/"), maxsplit=1)
    folder = local_folder(address, "-read")

    def show(store: Store) -> None:
        if not store.sizes(CLAIMS):
            raise DataError(f"{address} holds no run; give what its run.dir was")
        with only_process(folder / ".reading.lock", math.inf):
            pull(store, folder, is_copy=True)

    at_address(address, show)
    return folder.joinpath(*inside)
