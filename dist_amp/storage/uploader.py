"""python -m dist_amp.storage.uploader FOLDER ADDRESS SECONDS [LEASE]: keeps an address equal to a
run's folder.

A process beside each node's first rank, so that training never waits for it. A checkpoint's files
are put under names with their hashes, so that two writers can't mix theirs; the logs follow; the
manifest comes last, and only where none is. What fails is tried again. Once the run has ended, or
was killed, it puts the rest, for SECONDS at most. Exit status: 0 all is there, or as below.
"""

import json
import math
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from dist_amp.errors import first_line, masked
from dist_amp.files import only_process
from dist_amp.storage.lease import RENEW_SECONDS, Lease, Lost
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

LOG_SECONDS = 30.0  # between uploads of logs: stores can't append, so each takes the whole file
POLL_SECONDS = 0.5
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
WARN_AFTER_SECONDS = 30.0  # of failures; then each time that they have doubled
LOST = 3  # exit status: another process has taken over
UNFINISHED = 4  # exit status: the rest is in the folder
NICENESS = 10  # training comes first
STAGING = ".uploading-"  # and the uploader's process: a dead run's may still be at work
PARALLEL = 4  # files at a time


class Uploader:
    """One pass after another. lease: of the run's main node; None on the others.

    seconds: for what is left when the run has ended.
    """

    def __init__(self, folder: Path, store: Store, lease: Lease | None, seconds: float = math.inf):
        self.folder = folder
        self.store = store
        self.lease = lease
        self.seconds = seconds
        self.staging = folder / f"{STAGING}{os.getpid()}"
        self.uploaded: dict[str, Manifest] = {}  # of this node's files, by name of the checkpoint
        self.seen: set[str] = set()  # checkpoints that were in the folder, to notice removals
        self.logs: dict[str, tuple[int, float]] = {}  # {file: size and time as they were put}
        self.logs_put = 0.0
        self.error = ""  # of the last pass
        self.succeeded = time.monotonic()  # that pass which did last
        self.warned_after = 0.0
        self.run_ended = threading.Event()
        self.ended = threading.Event()  # this process

    def run(self) -> None:
        """Until the run has ended and all is put. Errors: Lost."""
        for path in self.folder.glob(f"{STAGING}*"):
            if not Path("/proc", path.name.removeprefix(STAGING)).exists():
                shutil.rmtree(path, ignore_errors=True)
        renewing = threading.Thread(target=self._renew, daemon=True)
        if self.lease is not None:
            renewing.start()
        pause = FIRST_PAUSE
        while True:
            is_last = self.run_ended.is_set()
            try:
                self.pass_once(is_last)
            except Lost:
                raise
            except Exception as error:  # each file system has errors of its own
                self.failed(first_line(error) or type(error).__name__)
                if is_last:
                    time.sleep(pause)
                else:
                    self.run_ended.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if self.warned_after:
                    warn(f"{self.store.address} is up to date again")
                self.error = ""
                self.warned_after = 0.0
                self.succeeded = time.monotonic()
                pause = FIRST_PAUSE
                if is_last:
                    break
                self.run_ended.wait(POLL_SECONDS)
        shutil.rmtree(self.staging, ignore_errors=True)
        if self.lease is not None:
            self.ended.set()
            renewing.join()  # or it could renew what is released
            self.lease.release()

    def failed(self, error: str) -> None:
        """Warn after a while, and each time that it has doubled."""
        self.error = error
        seconds = time.monotonic() - self.succeeded
        if seconds > max(WARN_AFTER_SECONDS, 2 * self.warned_after):
            self.warned_after = seconds
            warn(
                f"{self.store.address} has not been up to date for {seconds:.0f} s ({error}); "
                f"checkpoints are kept in {self.folder} until it is"
            )

    def watch_run(self) -> None:
        """A line on standard input, or the end of that, is the run's end; then time is limited."""
        os.read(0, 1)
        self.run_ended.set()
        time.sleep(self.seconds)
        why = self.error or "the uploads are slow"
        warn(
            f"{self.store.address} is not complete after {self.seconds:g} s ({why}); the rest is "
            f"in {self.folder}: the same command on this machine uploads it"
        )
        os._exit(UNFINISHED)

    def _renew(self) -> None:
        assert self.lease is not None
        pool = ThreadPoolExecutor(1)
        renewal = pool.submit(self.lease.renew)
        while not self.ended.wait(RENEW_SECONDS):
            try:
                if renewal.done():
                    renewal = pool.submit(self.lease.renew)
                renewal.result(WARN_AFTER_SECONDS)
            except Lost as error:
                end_lost(error, self.store)
            except TimeoutError:
                self.failed("it does not answer")
            except Exception:  # the passes report that the store is away
                continue

    def pass_once(self, is_last: bool) -> None:
        """Put what is new, and remove what the run has removed."""
        new = []
        for path in sorted(self.folder.glob(f"{CHECKPOINTS}/step_*"), reverse=True):
            manifest = read_manifest(path)
            if manifest is None:
                continue
            self.seen.add(path.name)
            if self.uploaded.get(path.name) != manifest:
                new.append((path, manifest))
        for path, manifest in new:  # the newest first: an older one may be removed meanwhile
            self.put_checkpoint(path, manifest)
        if is_last or time.monotonic() - self.logs_put > LOG_SECONDS:
            self.put_logs()
        # The run removes old ones once a new one has appeared, which may be after that is put.
        if self.lease is not None and self.uploaded and (new or is_last):
            self.remove_old()

    # --- checkpoints

    def put_checkpoint(self, path: Path, manifest: Manifest) -> None:
        """Put this node's files of a checkpoint; the main node puts the manifest, last."""
        here = self.stage(path, manifest)
        remote = self.store.sizes(f"{CHECKPOINTS}/{path.name}")
        wanted = []
        for name in here:
            if remote.get(key_of(path.name, name, manifest)) != manifest.files[name]["bytes"]:
                wanted.append(name)
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(lambda name: self.put_file(path.name, name, manifest), wanted))
        if self.lease is not None and here:
            self.publish(path.name, manifest)
        shutil.rmtree(self.staging / path.name, ignore_errors=True)
        self.uploaded[path.name] = manifest

    def stage(self, path: Path, manifest: Manifest) -> list[str]:
        """Link the checkpoint's files that are on this node, so that the run can remove its own."""
        staging = self.staging / path.name
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        here = []
        for name in manifest.files:
            with suppress(FileNotFoundError):  # another node's
                os.link(path / name, staging / name)
                here.append(name)
        return here

    def put_file(self, checkpoint: str, name: str, manifest: Manifest) -> None:
        local = self.staging / checkpoint / name
        self.store.upload(local, key_of(checkpoint, name, manifest), manifest.files[name]["xxh3"])

    def publish(self, checkpoint: str, manifest: Manifest) -> None:
        """Put the manifest when the store has every file. Errors: OSError while it has not."""
        assert self.lease is not None
        remote = self.store.sizes(f"{CHECKPOINTS}/{checkpoint}")
        for name, entry in manifest.files.items():
            if remote.get(key_of(checkpoint, name, manifest)) != entry["bytes"]:
                raise OSError(f"{checkpoint}/{name} is not up yet")
        self.put_logs()  # before it: a run that resumes here needs its metrics so far
        self.lease.check()
        key = f"{CHECKPOINTS}/{checkpoint}/{MANIFEST}"
        if not self.store.create(key, manifest.text):
            # Of a run that was thought dead, or refused by this one: this one holds the lease.
            self.store.remove(key)
            if not self.store.create(key, manifest.text):
                raise OSError(f"{key} comes from another writer")
        for name in remote:
            used = {key, *(key_of(checkpoint, file, manifest) for file in manifest.files)}
            if name not in used:
                self.store.remove(name)

    def remove_old(self) -> None:
        """Remove checkpoints that the run has removed, never the newest; manifests first."""
        newest = max(self.uploaded)
        for checkpoint, files in remote_steps(self.store).items():
            is_here = (self.folder / CHECKPOINTS / checkpoint / MANIFEST).exists()
            is_cut = f"{CHECKPOINTS}/{checkpoint}/{MANIFEST}" not in files
            if is_here or checkpoint >= newest or not (is_cut or checkpoint in self.seen):
                continue
            for name in sorted(files, key=lambda name: not name.endswith(f"/{MANIFEST}")):
                self.store.remove(name)
            self.uploaded.pop(checkpoint, None)

    # --- logs, settings, reports

    def put_logs(self) -> None:
        if self.lease is not None:
            self.lease.check()
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if not is_log(name) or not path.is_file():
                continue
            stat = path.stat()
            if self.logs.get(name) != (stat.st_size, stat.st_mtime):
                self.store.write(name, path.read_bytes())
                self.logs[name] = (stat.st_size, stat.st_mtime)
        self.logs_put = time.monotonic()


def end_lost(error: Lost, store: Store) -> NoReturn:
    warn(f"{error}: nothing more of this run is put at {store.address}")
    os._exit(LOST)


def warn(text: str) -> None:
    print(f"warning: {masked(text)}", file=sys.stderr, flush=True)


def main() -> None:
    folder, address, seconds, *lease = sys.argv[1:]
    os.nice(NICENESS)
    store = Store(address)
    held = None
    if lease:
        held = Lease(store, lease[0], json.loads((Path(folder) / HOLDER).read_text()), {})
    # One that a killed run has left ends first: they would remove each other's links.
    with only_process(Path(folder) / LOCK, seconds=math.inf):
        try:
            uploader = Uploader(Path(folder), store, held, float(seconds))
            threading.Thread(target=uploader.watch_run, daemon=True).start()
            uploader.run()
        except Lost as error:
            end_lost(error, store)


if __name__ == "__main__":
    main()
