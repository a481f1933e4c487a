"""A run whose run.dir is an address: a local folder stands for it, and an uploader follows.

The local folder holds what a run's folder does. At the start it gets the manifests that are at the
address, and the logs; a checkpoint's other files are fetched when they are read.
"""

import getpass
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from dist_amp.distributed.process import LAUNCHER, attempt
from dist_amp.distributed.signals import handle_signals
from dist_amp.errors import (
    SAVED_AND_STOPPED,
    CheckpointRejected,
    ConfigError,
    Failure,
    first_line,
)
from dist_amp.files import ADDRESS, InUse, only_process, run_dir, write_durably
from dist_amp.settings import RunConfig
from dist_amp.storage.lease import Lease, last_lease, take
from dist_amp.storage.store import (
    CHECKPOINTS,
    HOLDER,
    LOCK,
    MANIFEST,
    Manifest,
    Store,
    is_log,
    key_of,
    read_manifest,
    remote_steps,
)
from dist_amp.storage.uploader import FIRST_PAUSE, LONGEST_PAUSE, LOST, UNFINISHED
from dist_amp.world import World

VARIABLE = "DIST_AMP_CACHE"
PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "file")  # whose create is exclusive
BRIEF_SECONDS = 10.0  # for a failed rank's lease, before a restart
ATTEMPTS = 4
SHARED = ".nodes"  # to notice nodes that share the folder


def local_folder(address: str) -> Path:
    """The folder that stands for an address on this machine; made if it is missing.

    In DIST_AMP_CACHE, or a folder for temporary files. Errors: ConfigError.
    """
    address = address.rstrip("/")
    protocol, _, path = address.partition("://")
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"run.dir={protocol}://... isn't known to let only one of two writers create a file, "
            f"as a run needs; use an address of {', '.join(PROTOCOLS)}"
        )
    if "::" in path or ":" in path.rpartition("@")[0]:
        raise ConfigError(
            "run.dir is an address within another (::) or with a password; use one of a store, "
            "such as s3://bucket/run, and its environment variables for credentials"
        )
    if "/" not in path:
        raise ConfigError(f"{address} names no folder in the bucket; add one, as {address}/my_run")
    folder = folder_for(address)
    parent = folder.parent
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.stat().st_uid != os.getuid():
            raise PermissionError(1, "it belongs to another user")
        folder.mkdir(exist_ok=True)
        write_address(folder, address)
    except OSError as error:
        raise ConfigError(
            f"{parent} can't be used ({error.strerror}); set {VARIABLE} to a folder on a local disk"
        ) from error
    return folder


def write_address(folder: Path, address: str) -> None:
    complete = folder / f"{ADDRESS}.{uuid4().hex}"
    complete.write_text(address)
    complete.replace(folder / ADDRESS)  # another rank, or command, may be reading it


def folder_for(address: str) -> Path:
    parent = Path(tempfile.gettempdir(), f"dist_amp-{getpass.getuser()}")
    if VARIABLE in os.environ:
        parent = Path(os.environ[VARIABLE]).expanduser()
    unique = hashlib.sha256(address.encode()).hexdigest()[:8]
    return parent / f"{address.rpartition('/')[2]}-{unique}"


@contextmanager
def mirrored(config: RunConfig, job: Any) -> Iterator[None]:
    """Hold the lease of the address and follow the folder; every rank calls it.

    job: the supervised one. Errors: Failure if another run holds the lease, or the store can't be
    used.
    """
    folder = job.folder
    world = job.world
    check_not_shared(folder, world)
    address = run_dir(folder)
    lease: Lease | None = None
    leases: tuple[dict[str, Any], Any] = ({}, None)  # the lease's record, the id of the one before
    with ExitStack() as undo:
        with on_all_ranks(address, world):
            if world.is_main:
                check_never(config, Store(address))
                lease = take(Store(address), folder, world.say)
                undo.callback(lease.release)
                leases = lease.record, lease.before.get("id")
        leases = world.from_main(leases)
        with on_all_ranks(address, world):
            if world.local_rank == 0:
                pull_since(Store(address), folder, *leases, world.is_main)
        undo.pop_all()
    if world.local_rank != 0:
        yield
        return
    world.say(f"local  {folder}, uploaded to {address}")
    follower = Follower(address, folder, config.timeout_seconds, lease)
    try:
        yield
    except KeyboardInterrupt:  # the second Ctrl-C
        follower.end()
        raise
    except BaseException:
        # The launcher waits longer, after its ranks, unless it starts them again.
        job.at_end = partial(follower.wait, briefly=LAUNCHER in os.environ)
        raise
    job.at_end = follower.complete


@contextmanager
def until_ctrl_c() -> Iterator[None]:
    """The block ignores other signals: the uploader needs the time that a grace period gives."""
    ctrl_c = handle_signals(signal.default_int_handler, [signal.SIGINT])
    with suppress(KeyboardInterrupt), handle_signals(signal.SIG_IGN), ctrl_c:
        yield


def wait_for_uploads(address: str) -> None:
    """For the launcher: until its ranks' uploader has ended, which limits its time itself."""
    lock = local_folder(address) / LOCK
    with until_ctrl_c():
        try:
            with only_process(lock):
                return
        except InUse as error:
            if not is_of_this_launch(str(error)):
                return
            print(f"waiting for the uploads to {address}", file=sys.stderr, flush=True)
        with only_process(lock, math.inf):
            return


def is_of_this_launch(holder: str) -> bool:
    """Whether an uploader, as its lock file names it, is not that of another live run."""
    _, pid, *_ = holder.split()
    with suppress(OSError):  # it has ended meanwhile
        environ = Path("/proc", pid, "environ").read_bytes().split(b"\0")
        return f"{LAUNCHER}={os.getpid()}".encode() in environ
    return False


@contextmanager
def on_all_ranks(address: str, world: World) -> Iterator[None]:
    """Errors: Failure on every rank if the block fails on one."""
    problem: Failure | None = None
    try:
        yield
    except Failure as error:
        problem = error
    except Exception as error:  # each file system has errors of its own
        problem = Failure(unusable(address, error))
    world.wait_long()  # for a lease of a dead run
    world.raise_first(problem)


def check_never(config: RunConfig, store: Store) -> None:
    """Errors: Failure if run.resume=never meets a run that the local folder does not show yet."""
    may_resume = config.resume != "never" or attempt()
    if not may_resume and any(name.endswith(MANIFEST) for name in store.sizes(CHECKPOINTS)):
        raise Failure(
            f"run.dir={store.address} holds a run already; choose another, or use run.resume=auto"
        )


def unusable(address: str, error: BaseException) -> str:
    """What is wrong with an address at the start, and the fix."""
    fix = "check the credentials, which must be allowed to read, write and list, and the network"
    kind = type(error).__name__
    if "NotFoundError" in kind:  # Azure's is no FileNotFoundError
        fix = "make the bucket, or check its name"
    return f"{address} can't be used: {kind}: {first_line(error)}; {fix}"


def check_not_shared(folder: Path, world: World) -> None:
    """Errors: ConfigError if two nodes see one folder, in which they would mix their files."""
    nodes = folder / SHARED
    token = uuid4().hex
    if world.is_main:
        shutil.rmtree(nodes, ignore_errors=True)
    world.barrier()
    with on_all_ranks(str(folder), world):
        if world.local_rank == 0:
            nodes.mkdir(exist_ok=True)
            (nodes / token).touch()
    others = ""
    if world.local_rank == 0:
        others = ", ".join({path.name for path in nodes.glob("*")} - {token})
    if any(world.gather(others)):
        raise ConfigError(
            f"{folder} is shared by several nodes, which keep their parts of checkpoints in it; "
            f"set {VARIABLE} to a folder on each node's disk"
        )


# --- at the start


def pull_since(
    store: Store, folder: Path, record: dict[str, Any], before: Any, is_main: bool
) -> None:
    """Pull, and note under which lease. before: the id of the lease before it."""
    note = json.dumps({**record, "is_main": is_main})
    is_current = last_lease(folder) == before
    if is_current:  # it stays so if the pull fails; another is not before a pull
        write_durably(folder / HOLDER, note)
    pull(store, folder, is_current, is_main)
    write_durably(folder / HOLDER, note)


def pull(store: Store, folder: Path, is_current: bool, with_logs: bool) -> None:
    """Make the folder show what is at the address: manifests, and on the main node the logs.

    is_current: the last run wrote here: what is only here is newer than the address, and is kept.
    """
    complete = {}
    for checkpoint, names in remote_steps(store).items():
        key = f"{CHECKPOINTS}/{checkpoint}/{MANIFEST}"
        if key in names:  # else an upload was cut
            with suppress(FileNotFoundError):  # removed since, by the last run's uploader
                complete[checkpoint] = store.read(key)
    for path in folder.glob(f"{CHECKPOINTS}/step_*"):
        if path.name in complete or is_current:
            continue
        if path.name > max(complete, default=""):  # it is nowhere else
            kept = path.with_name(f"not_put_{path.name}_{uuid4().hex[:8]}")
            print(f"warning: {path} is not at {store.address}; kept as {kept}", file=sys.stderr)
            path.rename(kept)
        else:
            shutil.rmtree(path)
    for checkpoint, text in complete.items():
        path = folder / CHECKPOINTS / checkpoint
        here = read_manifest(path)
        if here is None or here.text != text:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            (path / MANIFEST).write_bytes(text)
    if is_current or not with_logs:
        return
    for name in store.sizes(""):
        if is_log(name) and name.partition("/")[0] not in ("tensorboard", "leases"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(name))


def fetch(checkpoint: Path, names: Iterable[str]) -> None:
    """Get files of a checkpoint that are only at the address. Errors: CheckpointRejected."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return
    store = None
    for name in names:
        if name not in manifest.files or (checkpoint / name).exists():
            continue
        store = store or Store(run_dir(checkpoint.parent.parent))
        with only_process(checkpoint / f".{name}.lock", seconds=3600.0):
            if not (checkpoint / name).exists():
                fetch_one(store, checkpoint, name, manifest)


def fetch_one(store: Store, checkpoint: Path, name: str, manifest: Manifest) -> None:
    """Try a few times. Errors: CheckpointRejected."""
    key = key_of(checkpoint.name, name, manifest)
    entry = manifest.files[name]
    pause = 1.0
    for number in range(ATTEMPTS):
        try:
            store.download(key, checkpoint / name, entry["bytes"], entry["xxh3"])
        except FileNotFoundError:
            raise CheckpointRejected(f"{name} is not at {store.address}") from None
        except Exception as error:  # each file system has errors of its own
            if number == ATTEMPTS - 1:
                what = first_line(error) or type(error).__name__
                raise CheckpointRejected(f"{name} can't be fetched: {what}") from error
            time.sleep(pause)
            pause *= 4
        else:
            return


# --- while the run trains


class Follower:
    """Starts the uploader, starts it again if it dies, and stops the run if another took over."""

    def __init__(self, address: str, folder: Path, timeout_seconds: float, lease: Lease | None):
        self.address = address
        self.timeout_seconds = timeout_seconds
        words = [str(folder), address, str(timeout_seconds)]
        self.command = [sys.executable, "-m", "dist_amp.storage.uploader", *words]
        if lease is not None:
            self.command.append(lease.name)
        self.lease = lease
        self.has_ended = False
        self.process = self.start()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def start(self) -> "subprocess.Popen[bytes]":
        # A group of its own: a Ctrl-C, or the launcher's signals, must not cut an upload. But no
        # session of its own, between which Linux may share the processors whatever the niceness.
        # No standard output: a pipe from it would stay open as long as the uploader.
        return subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0
        )

    def watch(self) -> None:
        pause = FIRST_PAUSE
        while (status := self.process.wait()) not in (0, LOST, UNFINISHED):
            print(
                f"warning: the uploader has ended with status {status}; it is started again in "
                f"{pause:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.process = self.start()
            if self.has_ended:
                self.end()
        if status == LOST and not self.has_ended:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        """Tell the uploader that the run has ended; loader workers may hold the pipe open."""
        self.has_ended = True
        with suppress(OSError, ValueError):  # it has died, or has been told
            self.process.stdin.write(b"\n")  # type: ignore[union-attr]
            self.process.stdin.close()  # type: ignore[union-attr]

    def complete(self) -> None:
        """Wait for the uploads. Errors: SystemExit with 75 if they are not complete."""
        self.wait()
        if self.process.returncode == UNFINISHED or self.watcher.is_alive():
            raise SystemExit(SAVED_AND_STOPPED)

    def wait(self, briefly: bool = False) -> None:
        """Until all is up, at most for run.timeout_seconds; the rest stays here."""
        self.end()
        with until_ctrl_c():
            self.watcher.join(2.0)
            seconds = self.timeout_seconds
            if briefly:
                seconds = BRIEF_SECONDS
            elif self.watcher.is_alive():
                text = f"waiting up to {seconds:g} s for the uploads to {self.address}"
                print(f"{text}; Ctrl-C ends it", file=sys.stderr, flush=True)
            self.watcher.join(seconds + 2.0)
        if self.process.returncode == 0 and self.lease is not None:
            print(f"uploaded: --run.dir {self.address} continues on any machine", flush=True)
