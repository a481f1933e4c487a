"""The export for transformers: a folder that `from_pretrained` opens, written under another name and renamed."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from dist_amp.checkpoint.format import CONFIG
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.runtime.files import sync_folder, write_synced


def merged(model: Any) -> nn.Module:
    """The model with its adapters added to the weights. Errors: ConfigError for a model without adapters."""
    if not hasattr(model, "merge_and_unload"):
        raise ConfigError("--merge needs a model with adapters of peft, and this one has none; leave --merge out")
    return model.merge_and_unload()


def write_hf(out: Path, task: Any, model: Any, config_text: str) -> None:
    """Write the model, by task.export or its own save_pretrained, and the run's config; replace an earlier export.

    Errors: ConfigError for a model that can do neither, and for a folder with other files; Failure with the path.
    """
    if not hasattr(task, "export") and not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"--format hf: {type(model).__name__} has no save_pretrained; add `def export(self, model, folder)` to the "
            "task, or use --format safetensors"
        )
    if "transformers" in sys.modules:  # its progress bars do not know of terminals
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    with replacing(out) as folder:
        if hasattr(task, "export"):
            task.export(model, str(folder))
        else:
            model.save_pretrained(str(folder))
        write_synced(folder / CONFIG, config_text)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of `out` after the with-block; a failure leaves `out` as it was.

    Errors: ConfigError if `out` holds anything but an export, DataError if the block fails, Failure for the disk.
    """
    if out.exists() and not (out / CONFIG).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} holds other files, and would be replaced; give the export a folder of its own")
    new, old = out.with_name(f".{out.name}.writing"), out.with_name(f".{out.name}.replaced")
    try:
        _tidy(out, new, old)  # after a kill
        new.mkdir(parents=True)
        yield new
        for path in sorted(new.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if out.exists():
            out.replace(old)
        new.replace(out)
        sync_folder(out.parent)
    except OSError as error:
        why = error.strerror or str(error)
        raise Failure(f"--out {out} can't be written ({why}); give a writable folder") from error
    except (RuntimeError, ValueError, TypeError) as error:
        raise DataError(f"this model can't be exported: {type(error).__name__}: {error}") from error
    finally:
        _tidy(out, new, old)


def _tidy(out: Path, new: Path, old: Path) -> None:
    """Put the earlier export back if it was moved away and nothing took its place; remove what is left over."""
    if old.exists() and not out.exists():
        old.replace(out)
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)


def files_text(out: Path) -> str:
    """The exported weight files, with their sizes in MB."""
    return ", ".join(f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)" for path in sorted(out.glob("*.safetensors")))
