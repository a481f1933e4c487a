"""What makes a checkpoint's files trustworthy: hashes, the manifest that lists them, and a reader that runs no code.

A checkpoint is complete or absent: its folder is written under another name, the manifest comes last, and one rename
makes it valid. The formats inside notice no damage by themselves (a flipped bit loads silently), so every file is
hashed, and every hash is looked at before a run is resumed.
"""

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from dist_amp.runtime.files import sync_folder, write_synced

FORMAT = 1  # of the folder as a whole; a reader refuses those that are newer than itself

MANIFEST = "manifest.json"

CONFIG = "config.toml"


class Refused(Exception):
    """Why a checkpoint is not to be loaded; never the user's mistake, so another one may do."""


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without loading it; JSON, with a hash over itself."""

    step: int
    samples: int  # consumed by the steps taken
    world_size: int
    strategy: str
    precision: str
    device: str
    seed: int
    global_batch_size: int
    data_length: int
    data_fingerprint: str
    optimizer: dict[str, int]  # parameters in each group
    config_hash: str
    evaluation: dict[str, float]  # the newest, of this step
    evaluated_step: int
    best: dict[str, float]  # the lowest held-out loss so far, with its "step"
    versions: dict[str, str]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> {"bytes": size, "xxh3": hash}
    format: int = FORMAT

    def to_text(self) -> str:
        content = asdict(self)
        return json.dumps({**content, "xxh3": _xxh3(json.dumps(content).encode())}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Errors: Refused where it is missing, damaged, of a newer format, or lists what lies elsewhere."""
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        content = json.loads(text)
        if content["format"] > FORMAT:
            raise Refused(f"its format is {content['format']}, this version reads up to {FORMAT}; use a newer dist_amp")
        known = {one.name for one in fields(Manifest)}
        manifest = Manifest(**{name: value for name, value in content.items() if name in known})
    except OSError as error:
        raise Refused(f"{MANIFEST} can't be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError):  # what json, decode and the dataclass raise
        raise Refused(f"{MANIFEST} is damaged") from None
    # Byte by byte: a bit that flips where JSON allows anything would go unnoticed otherwise.
    if manifest.to_text() != text:
        raise Refused(f"{MANIFEST} is damaged")
    for name in dict(manifest.files):
        if name in ("", ".", "..") or Path(name).name != name:
            raise Refused(f"{MANIFEST} lists {name!r}, which is not a file's name in this folder")
    return manifest


def damage(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> str:
    """What is wrong with the files of a checkpoint, of which this call looks at one part; "" if nothing."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    for name in by_size[part::parts]:
        path, expected = folder / name, manifest.files[name]
        try:
            found = path.stat(follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a file"
            if found.st_size != expected["bytes"]:
                return f"{name} has {found.st_size:,} bytes, not {expected['bytes']:,}"
            if hash_file(path) != expected["xxh3"]:
                return f"{name} is damaged: its hash is not the manifest's"
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
    return ""


def fault_of(folder: Path, part: int = 0, parts: int = 1) -> str:
    """Why a checkpoint is not whole, by its manifest and one part of its files; "" if it is."""
    try:
        return damage(folder, read_manifest(folder), part, parts)
    except Refused as error:
        return str(error)


def all_checkpoints(run_folder: Path) -> list[Path]:
    """The run's checkpoints, oldest first, whole or not: `read_manifest` and `damage` tell."""
    return sorted(path for path in run_folder.glob("checkpoints/step_*") if path.name[len("step_") :].isdigit())


def hash_file(path: Path) -> str:
    """128 bits of xxh3: against accidents, ten times faster than sha256; no defence against forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def _xxh3(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def text_hash(text: str) -> str:
    return _xxh3(text.encode())


def hash_files(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The manifest's entries for these files."""
    return {path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path)} for path in paths}


def make_valid(fresh: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest and rename: before it there is no checkpoint, after it a whole one, whenever power fails."""
    write_synced(fresh / MANIFEST, manifest.to_text())
    sync_folder(fresh)
    os.rename(fresh, final)
    sync_folder(final.parent)


def remove_all_but(run_folder: Path, keep: int) -> list[str]:
    """Remove old checkpoints: the last `keep` stay, and the one with the lowest held-out loss; return what failed."""
    checkpoints, failed = all_checkpoints(run_folder), []
    best = min(checkpoints, key=_held_out_loss)
    for old in checkpoints[:-keep]:
        if old != best or math.isinf(_held_out_loss(best)):
            try:
                (old / MANIFEST).unlink(missing_ok=True)  # first: what is half removed is no checkpoint
                shutil.rmtree(old)
            except OSError as error:
                failed.append(f"{old} can't be removed ({error.strerror})")
    return failed


def _held_out_loss(checkpoint: Path) -> float:
    """The loss of the evaluation at its very step; inf where there was none."""
    try:
        manifest = read_manifest(checkpoint)
    except Refused:
        return math.inf
    loss = manifest.evaluation.get("loss", math.inf) if manifest.evaluated_step == manifest.step else math.inf
    return math.inf if math.isnan(loss) else loss


def quarantine_after(run_folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which were refused, and clear away what was left half written.

    The steps are taken again, and a folder is never written into twice. Returns the new names.
    """
    for left in run_folder.glob("checkpoints/.step_*.writing"):
        shutil.rmtree(left, ignore_errors=True)
    moved = []
    for path in all_checkpoints(run_folder):
        if int(path.name.removeprefix("step_")) > step:
            moved.append(quarantine(path))
    return moved


def quarantine(checkpoint: Path) -> Path:
    target = checkpoint.with_name(f"refused_{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    return checkpoint.rename(target)


def reason(error: BaseException) -> str:
    """One line; torch wraps what went wrong on a rank in an error of its own."""
    if isinstance(error, CheckpointException) and error.failures:
        return reason(next(inner for inner, _ in error.failures.values()))
    if "unexpected pos" in str(error):  # what torch's writer makes of a write that stopped half way
        return "no space is left on the disk"
    text = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return getattr(error, "strerror", None) or text
