"""Files at an address (s3, gs, az, ... by fsspec): put and fetched whole, each byte verified.

And what a run has there, and in the local folder that stands for it. Without torch, which the
uploader's process does without: checkpoint/format.py imports it.
"""

import base64
import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from dist_amp.errors import ConfigError, first_line

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
LOCK = ".uploader.lock"  # of the uploader that is at work here
HOLDER = ".lease.json"  # of the lease under which the local folder was written last

PART_BYTES = 64 << 20  # of an upload in parallel parts; S3 takes at most 10,000 parts
MOST_PARTS = 10_000
BLOCK_BYTES = 4 << 20


class Damaged(Exception):
    """A file has another size or hash than its manifest says."""


class Store:
    """The files below an address. Names are relative to it. Errors: those of its file system."""

    def __init__(self, address: str):
        from fsspec.core import url_to_fs

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # logs a trace of what it raises
        self.address = address.rstrip("/")
        try:
            # Cached listings and file systems would show what was there before.
            self.fs, self.root = url_to_fs(self.address, use_listings_cache=False)
        except ImportError as error:  # its message names the package to install
            raise ConfigError(f"run.dir={address}: {first_line(error)} (pip install)") from error

    def path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def sizes(self, folder: str) -> dict[str, int]:
        """{name: bytes} of all files in a folder; empty without it."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{self.root}/"): info["size"] for path, info in found.items()}

    def read(self, name: str) -> bytes:
        content: bytes = self.fs.cat_file(self.path(name))
        return content

    def write(self, name: str, content: bytes) -> None:
        if "file" in self.fs.protocol:
            self._place(name, content, os.replace)
        else:
            self.fs.pipe_file(self.path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists, which the store decides: of two writers one succeeds.

        An answer that was lost on the way is no failure: then the content is the same.
        """
        try:
            if "file" in self.fs.protocol:  # whose "create" looks first, and writes then
                self._place(name, content, os.link)
            else:
                self.fs.pipe_file(self.path(name), content, mode="create")
        except FileExistsError:
            return self.read(name) == content
        return True

    def _place(self, name: str, content: bytes, place: Callable[[Path, str], object]) -> None:
        """On a disk: nobody sees half of it."""
        self._make_parent(name)
        temporary = Path(self.root, f".{uuid4().hex}")
        try:
            temporary.write_bytes(content)
            place(temporary, self.path(name))
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def upload(self, local: Path, name: str, xxh3: str) -> None:
        """Put a file, in parallel parts, and verify what has arrived.

        xxh3: what the file must hold. Errors: Damaged if it does not, or OSError if the store has
        something else afterwards.
        """
        size = local.stat().st_size
        part = max(PART_BYTES, -(-size // MOST_PARTS))
        sent, checksums = hashes(local, part)
        if sent != xxh3:
            raise Damaged(f"{local} is not what its manifest says")
        options: dict[str, Any] = {}
        if "s3" in self.fs.protocol:
            options["chunksize"] = part
        self._make_parent(name)
        self.fs.put_file(str(local), self.path(name), **options)
        info = self.fs.info(self.path(name))
        if info["size"] != size:
            raise OSError(f"{info['size']} of {size} bytes have arrived")
        if checksum_of(info) not in checksums and self._hash_of(name) != xxh3:
            raise OSError("other bytes have arrived than were sent")

    def download(self, name: str, local: Path, size: int, xxh3: str) -> None:
        """Fetch a file; it appears when it is complete and verified. Errors: Damaged."""
        temporary = local.with_name(f".{local.name}.{uuid4().hex[:8]}.fetching")
        try:
            self.fs.get_file(self.path(name), str(temporary))
            if temporary.stat().st_size != size or hashes(temporary, size)[0] != xxh3:
                raise Damaged(f"{self.address}/{name} is damaged")
            os.replace(temporary, local)
        finally:
            temporary.unlink(missing_ok=True)

    def _hash_of(self, name: str) -> str:
        """Of what the store has, read back: some have no checksums, or of encrypted bytes."""
        with self.fs.open(self.path(name), "rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

    def _make_parent(self, name: str) -> None:
        if "file" in self.fs.protocol:  # object stores have no folders
            self.fs.makedirs(self.fs._parent(self.path(name)), exist_ok=True)


def hashes(path: Path, part_bytes: int) -> tuple[str, set[str]]:
    """(xxh3, the checksums that stores may have of it: MD5 of the whole, and S3's of its parts)."""
    xxh3 = xxhash.xxh3_128()
    whole = hashlib.md5(usedforsecurity=False)
    parts = []
    with path.open("rb") as file:
        while True:
            part = hashlib.md5(usedforsecurity=False)
            left = part_bytes
            while left and (block := file.read(min(left, BLOCK_BYTES))):
                left -= len(block)
                for digest in (xxh3, whole, part):
                    digest.update(block)
            if left == part_bytes:
                break
            parts.append(part.digest())
            if left:
                break
    of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return xxh3.hexdigest(), {whole.hexdigest(), f"{of_parts}-{len(parts)}"}


def checksum_of(info: dict[str, Any]) -> str:
    """The store's checksum of a file, in hexadecimal; "" if it has none."""
    if "md5Hash" in info:  # Google's
        return base64.b64decode(info["md5Hash"]).hex()
    if "content_settings" in info:  # Azure's, which has none of a file that came in parts
        return bytes(info["content_settings"]["content_md5"] or b"").hex()
    return str(info.get("ETag", "")).strip('"')


# --- of a run


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest, as far as its files go. text: the whole."""

    text: bytes
    files: dict[str, dict[str, Any]] = field(compare=False)


def read_manifest(checkpoint: Path) -> Manifest | None:
    """None for a folder without one, or that is removed meanwhile."""
    try:
        text = (checkpoint / MANIFEST).read_bytes()
        return Manifest(text, json.loads(text)["files"])
    except (OSError, ValueError, LookupError):
        return None


def key_of(checkpoint: str, name: str, manifest: Manifest) -> str:
    """A file's name at the address: with its hash, so that it never has another content."""
    return f"{CHECKPOINTS}/{checkpoint}/{name}.{manifest.files[name]['xxh3']}"


def remote_steps(store: Store) -> dict[str, list[str]]:
    """{checkpoint at the address: names of its files}, complete or not."""
    steps: dict[str, list[str]] = {}
    for name in sorted(store.sizes(CHECKPOINTS)):
        steps.setdefault(name.split("/")[1], []).append(name)
    return steps


def is_log(name: str) -> bool:
    """Whether a file of the run's folder is kept at the address as it is."""
    first = name.partition("/")[0]
    return first != CHECKPOINTS and not any(part.startswith(".") for part in name.split("/"))
