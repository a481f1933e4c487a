"""Mirror a run from a local folder to its run.dir, an address such as s3://bucket/run.

A start takes the claim (store.py), so that only one run writes at the address, and downloads newer
manifests and logs; a checkpoint's other files follow when it is read. The run itself uses only the
local folder, and on each node a thread of the first rank uploads what is new. Uploaded files have
their hashes in their names, so two writers never mix files of a checkpoint. Its manifest comes
last, after the files of all nodes: at the address, too, a checkpoint is complete or absent. Failed
uploads are retried; the next start uploads what a killed run has not.
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

VARIABLE = "DIST_AMP_CACHE"  # the environment variable with the parent of local folders
USABLE = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|file)://[^:/]*(/((?!::)[^/])+)+")
MANIFEST = "manifest.json"
CLAIM_FILE = ".claim"  # file in the main node's folder, with the id of the last claim it had

PARALLEL = 4  # files that are uploaded, or downloaded, at a time
LOG_SECONDS = 30.0  # between uploads of logs: stores can't append, so each sends whole files
PAUSES = (0.5, 1.0, 4.0, 16.0, 30.0)  # seconds until the next upload, after 0, 1, ... failures
FETCH_PAUSES = (1.0, 4.0, 0.0)  # seconds after each failed attempt to download a file


def local_folder(address: str, ending: str = "") -> Path:
    """Create the local folder that mirrors an address; returns its path. Raises ConfigError."""
    address = address.rstrip("/")
    if not USABLE.fullmatch(address):
        raise ConfigError(
            f"run.dir={address} is no address for a run: use s3://BUCKET/RUN, gs://, az:// or "
            "file:///FOLDER/RUN; a password belongs in the environment, not in the address"
        )
    temporary = Path(tempfile.gettempdir(), f"dist_amp-{getpass.getuser()}")
    parent = Path(os.environ.get(VARIABLE, temporary)).expanduser()
    unique = hashlib.sha256(address.encode()).hexdigest()[:8]
    folder = parent / f"{address.rpartition('/')[2]}-{unique}{ending}"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise ConfigError(f"{parent} belongs to another user; set {VARIABLE} to a folder of yours")
    folder.mkdir(exist_ok=True)
    draft = folder / f"{ADDRESS}.{uuid4().hex}"
    draft.write_text(address)
    draft.replace(folder / ADDRESS)  # at once, since another rank or command may be reading it
    return folder


# --- downloads


def pull(store: Store, folder: Path, logs: bool = True, is_copy: bool = False) -> None:
    """Download manifests that the folder lacks. If the address has a newer checkpoint, or if the
    folder is a command's copy, also download logs, and remove checkpoints that are only here.
    """
    remote = {}  # {checkpoint at the address: its manifest}
    for name in store.sizes("checkpoints"):
        if name.endswith(MANIFEST):
            remote[name.split("/")[1]] = store.read(name)
    local = {}
    for path in folder.glob(f"checkpoints/step_*/{MANIFEST}"):
        local[path.parent.name] = path.read_bytes()
    if is_copy or max(remote, default="") > max(local, default=""):
        for name in store.sizes("") if logs else ():
            if is_log(name) and not name.startswith("tensorboard/"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(store.read(name))
        for checkpoint in local:
            if local[checkpoint] != remote.get(checkpoint):
                shutil.rmtree(folder / "checkpoints" / checkpoint)
    for checkpoint, manifest in remote.items():
        path = folder / "checkpoints" / checkpoint
        if not path.exists():
            path.mkdir(parents=True)
            (path / MANIFEST).write_bytes(manifest)


def is_log(name: str) -> bool:
    """Whether a file of the run's folder is a log: not a checkpoint's, the claim, nor hidden."""
    parts = name.split("/")
    return parts[0] not in ("checkpoints", CLAIMS) and not any(p.startswith(".") for p in parts)


def manifest_of(checkpoint: str) -> str:
    return f"checkpoints/{checkpoint}/{MANIFEST}"


def key_of(checkpoint: str, name: str, files: dict[str, Any]) -> str:
    return f"checkpoints/{checkpoint}/{name}.{files[name]['xxh3']}"


def fetch(checkpoint: Path, files: dict[str, Any]) -> None:
    """Download a checkpoint's files that its local folder lacks. Raises CheckpointRejected."""

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


# --- uploads


class Mirror:
    """Uploads this node's new files. claim: of the run, on its main node; None on other nodes."""

    def __init__(self, store: Store, folder: Path, claim: Claim | None):
        self.store = store
        self.folder = folder
        self.claim = claim
        self.uploaded: dict[str, int] = {}  # {uploaded checkpoint: its manifest's mtime}
        self.logs: dict[str, tuple[int, float]] = {}  # {uploaded log: its size and mtime}
        self.logs_uploaded_at = 0.0
        self.problem = ""  # the error of the last upload, if it failed
        self.run_ended = threading.Event()  # set: upload the rest, then end
        self.ended = threading.Event()  # set: end now, complete or not
        self.uploads = threading.Thread(target=self.upload, name="uploads", daemon=True)
        if claim is not None:
            threading.Thread(target=self.renew, args=[claim], name="claim", daemon=True).start()

    def renew(self, claim: Claim) -> None:
        while not self.ended.wait(RENEW_SECONDS):
            with suppress(Exception):  # the uploads fail for the same reason, and report it
                claim.renew()

    def upload(self) -> None:
        """Upload until the run has ended and nothing is left."""
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
        new = sorted(name for name in times if self.uploaded.get(name) != times[name])
        problem: Exception | None = None
        for name in reversed(new):  # newest first: an older one may be removed meanwhile
            try:
                self.put_checkpoint(name)
                self.uploaded[name] = times[name]
            except Exception as error:
                problem = problem or error
        if is_last or time.monotonic() - self.logs_uploaded_at > LOG_SECONDS:
            self.put_logs()
        if problem:
            raise problem
        if self.claim is not None and self.uploaded and (new or is_last):
            names = self.store.sizes("checkpoints")
            # Manifests first: without one, what is left does not count as a checkpoint.
            for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):
                checkpoint = name.split("/")[1]
                if checkpoint < max(self.uploaded) and checkpoint not in times:
                    self.store.remove(name)

    def put_checkpoint(self, checkpoint: str) -> None:
        """Upload this node's files of a checkpoint. The main node also uploads the manifest, which
        publishes it. Raises OSError on the main node while any node's files are missing.
        """
        path = self.folder / "checkpoints" / checkpoint
        manifest = (path / MANIFEST).read_bytes()
        if self.store.read(manifest_of(checkpoint)) == manifest:
            return  # it was downloaded, or an earlier start has uploaded it
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
                raise OSError(f"{key} is not uploaded yet")
        self.put_logs()  # before the manifest: a run that resumes here needs its metrics so far
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
        self.logs_uploaded_at = time.monotonic()

    def finish(self, seconds: float, job: Any) -> None:
        """Wait for the uploads. Raises SystemExit(75) if they don't end, unless the run failed.

        Ctrl-C ends the wait. Other signals don't: uploads may use the machine's grace period.
        """
        self.run_ended.set()
        address = self.store.address
        job.world.say(f"waiting up to {seconds:g} s for uploads to {address}; Ctrl-C ends the wait")
        ignored = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        with suppress(KeyboardInterrupt), handle_signals(signal.SIG_IGN, ignored):
            self.uploads.join(seconds)
        is_complete = not self.uploads.is_alive()
        self.ended.set()
        if self.claim is not None:
            with suppress(TimeoutError):  # if it is not released, the next run waits a while
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


# --- for a run, and for commands that read one


def mirror_run(config: RunConfig, job: Any) -> None:
    """Claim the address, and upload until the end of the job; every rank calls it.

    Raises Failure if another run holds the claim, or the store can't be used.
    """
    folder, world = job.folder, job.world
    address = run_dir(folder)
    claim_file = folder / CLAIM_FILE

    def take_claim(store: Store) -> Claim:
        names = store.sizes("checkpoints")
        if config.resume == "never" and not attempt() and any(MANIFEST in name for name in names):
            raise Failure(
                f"run.dir={address} holds a run already; choose another, or use run.resume=auto"
            )
        # This process has the folder's lock, so the process that wrote this file is dead.
        dead_id = claim_file.read_text() if claim_file.exists() else ""
        claim = Claim(store, dead_id, world.say)
        claim_file.write_text(claim.record["id"])
        return claim

    def open_mirror(store: Store) -> Mirror:
        if not world.is_main and claim_file.exists() and claim_file.read_text() == claim_id:
            raise ConfigError(
                f"{folder} is shared by several nodes, but each needs its own for its parts of "
                f"checkpoints; set {VARIABLE} to a folder on each node's disk"
            )
        pull(store, folder, logs=world.is_main)
        return Mirror(store, folder, claim)

    claim = on_all_ranks(world, address, take_claim if world.is_main else None)
    claim_id = world.from_main(claim.record["id"] if claim else "")
    uploader = on_all_ranks(world, address, open_mirror if world.local_rank == 0 else None)
    if uploader is not None:
        world.say(f"local  {folder}, uploaded to {address}")
        uploader.uploads.start()
        job.at_end = partial(uploader.finish, config.timeout_seconds, job)


def on_all_ranks(world: World, address: str, call: Callable[[Store], T] | None) -> T | None:
    """The result of this rank's call, if it has one. Raises any rank's Failure, on every rank."""
    problem: Failure | None = None
    result: T | None = None
    try:
        result = call and at_address(address, call)
    except Failure as error:
        problem = error
    world.wait_long()  # the main rank may wait for a dead run's claim
    world.raise_first(problem)
    return result


def at_address(address: str, call: Callable[[Store], T]) -> T:
    """Call with the store at an address. Raises Failure with the cause and the fix."""
    try:
        return call(Store(address))
    except Failure:
        raise
    except Exception as error:  # each file system has errors of its own
        raise Failure(
            f"{address} can't be used: {type(error).__name__}: {first_line(error)}; check the "
            "bucket's name, the network, and credentials that may read, write and list"
        ) from error


def fetched(text: str) -> Path:
    """The local path of a run, a checkpoint or another file, which may be at an address.

    Downloads manifests and logs; a checkpoint's files follow when it is read. Raises Failure.
    """
    if "://" not in text:
        return Path(text).expanduser()
    address, *inside = re.split("/(?=checkpoints/)", text.rstrip("/"), maxsplit=1)
    folder = local_folder(address, "-read")

    def show(store: Store) -> None:
        if not store.sizes(CLAIMS):
            raise DataError(f"{address} holds no run; give the run.dir of a run")
        with only_process(folder / ".reading.lock", math.inf):
            pull(store, folder, is_copy=True)

    at_address(address, show)
    return folder.joinpath(*inside)
