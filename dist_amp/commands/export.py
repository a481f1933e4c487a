"""python -m dist_amp.export RUN_OR_CHECKPOINT --out DIR: the trained model as one safetensors file, for use elsewhere.

One CPU process reads a checkpoint of any strategy and number of ranks, of it the model's tensors alone; a run stands
for its newest whole checkpoint. DIR gets model.safetensors and the run's config.toml. In your own code:

    import safetensors.torch
    model = task.build_model()
    safetensors.torch.load_model(model, "DIR/model.safetensors")

The model is float32 then, as the task builds it, whatever --dtype was; model.to(torch.bfloat16) computes in bf16.

Settings after RUN_OR_CHECKPOINT go over the checkpoint's config, so that a task which has moved is found
(--task.target new_file:MyTask). The task that the config names is imported, as it was to train: look at it first if
the checkpoint is a stranger's. Exit status: 0 done, 64 a setting, 65 the checkpoint, 1 DIR can't be written.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from dist_amp.checkpoint.compatibility import check_tensors
from dist_amp.checkpoint.format import CONFIG, MANIFEST, Refused, all_checkpoints, read_manifest, reason
from dist_amp.checkpoint.reader import Reader, read_into
from dist_amp.checkpoint.resume import newest_whole
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.load import load_config, to_toml
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.runtime.files import sync_folder, write_synced
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import Config
from dist_amp.task import Task
from dist_amp.world import World

MODEL = "model.safetensors"

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

A_CHECKPOINT = "a run's folder or RUN/checkpoints/step_N"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    usage = "RUN_OR_CHECKPOINT --out DIR [--dtype bf16|fp32] [--section.key VALUE ...]"
    parser = PathParser("python -m dist_amp.export", usage, __doc__ or "")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write; an export in it is replaced")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="of floating-point tensors; default fp32")
    path, options, settings = parser.read(argv)
    out = Path(options.out)
    if (out / MANIFEST).exists() or all_checkpoints(out):
        raise ConfigError(f"--out {out} is a run's or a checkpoint's folder; give the export one of its own")
    checkpoint = find_checkpoint(path, A_CHECKPOINT)
    config = load_config_of(checkpoint, settings)
    model = build_model(build_task(config.task, config.data), config)
    step = read_weights(model, checkpoint)
    cast(model, DTYPES[options.dtype])
    about = {"format": "pt", "step": str(step), "dtype": options.dtype, "checkpoint": checkpoint.resolve().name}
    text = to_toml(config) if settings else (checkpoint / CONFIG).read_text(encoding="utf-8")
    write(out, model, {**about, "torch": torch.__version__}, text)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out / MODEL}: {parameters:,} parameters in {options.dtype}, from step {step} ({checkpoint})")
    return 0


class PathParser(Parser):
    """A path, the command's own options, and settings of a run; a mistake is a ConfigError that ends with the usage."""

    def __init__(self, prog: str, usage: str, about: str):
        super().__init__(prog, about)
        self.usage = f"{prog} {usage}"

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.format_usage().strip()}")

    def read(self, argv: Sequence[str]) -> tuple[Path, argparse.Namespace, list[str]]:
        """(path, own options, settings). The path comes first: a setting takes all words that follow it."""
        options, rest = self.parse_known_args(argv)
        if not rest or rest[0].startswith("-"):
            self.error(f"the path must stand before {rest[0]}" if rest else "no path is given")
        if rest[1:] and not rest[1].startswith("--"):
            self.error(f"{rest[1]!r} belongs to no key")
        return Path(rest[0]), options, rest[1:]


def find_checkpoint(path: Path, give: str) -> Path:
    """The checkpoint at `path`, or the newest whole one of the run there, every file's hash looked at.

    Errors: DataError where there is none, or none that is whole. give: what the path may be.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; give {give}")
    paths = all_checkpoints(path) or [path]
    if paths == [path] and not any((path / name).exists() for name in (MANIFEST, ".metadata")):
        raise DataError(f"{path} holds no checkpoint, and is none; give {give}")
    whole = newest_whole(paths, World(), "taking", "restore one from a copy")
    assert whole is not None  # there are some: it has raised if none is whole
    return whole


def load_config_of(folder: Path, settings: Sequence[str]) -> Config:
    """The config of a checkpoint or an export, with settings as on the command line over it."""
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder} lacks its {CONFIG}; export it again, or take it from the run")
    try:
        return load_config([f"--config={folder / CONFIG}", *settings])
    except ConfigError as error:
        moved = str(error).startswith("task.target=")
        hint = f"; {folder} needs its task: start where the run was, or give --task.target" if moved else ""
        raise ConfigError(f"{error}{hint}") from error


def build_model(task: Task, config: Config) -> nn.Module:
    """The task's model, in evaluation mode; seeded as in the run, for what it draws and does not save."""
    seed_all(config.run.seed)
    return task.build_model().eval()


def read_weights(model: nn.Module, checkpoint: Path) -> int:
    """Set the model to the checkpoint's weights, in the model's own dtypes; return the step that they are of.

    Errors: DataError for a checkpoint that is refused, or has other names or shapes.
    """
    manifest, named = read_manifest(checkpoint), get_model_state_dict(model)
    try:
        reader = Reader(checkpoint, manifest.files)
        metadata = reader.read_metadata()
        for name, tensor in named.items():
            named[name] = _place_for(metadata.state_dict_metadata.get(f"model.{name}"), tensor)
        check_tensors(checkpoint, metadata, "model", named)
        read_into({"model": named}, reader, alone=True)
    except Refused as error:
        raise DataError(f"checkpoint {checkpoint} is refused: {error}") from None
    except CheckpointException as error:
        raise DataError(f"checkpoint {checkpoint} can't be loaded: {reason(error)}") from error
    set_model_state_dict(model, named)
    return manifest.step


def _place_for(entry: Any, value: Any) -> Any:
    """What to read an entry into: parallel.param_dtype=bf16 keeps a float32 model's parameters in bf16."""
    if not (isinstance(entry, TensorStorageMetadata) and isinstance(value, Tensor)):
        return value
    stored = entry.properties.dtype
    return value.to(stored) if value.is_floating_point() and stored.is_floating_point else value


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Floating-point tensors to `dtype`, integers as they are; what shares memory goes on sharing it.

    load_model would refuse what is stored twice where the task's own model shares.
    """
    memories: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            old = tensor.data.untyped_storage()
            if old.data_ptr() not in memories:
                memories[old.data_ptr()] = torch.empty(0, dtype=tensor.dtype).set_(old).to(dtype)
            new = memories[old.data_ptr()]
            tensor.data = new.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def write(out: Path, model: nn.Module, about: dict[str, str], config_text: str) -> None:
    """Write both files beside their names, then rename: a kill leaves the old or the new, and nothing cut short.

    Errors: Failure with the path; DataError for what safetensors can't hold.
    """
    fresh = {name: out / f".{name}.writing" for name in (MODEL, CONFIG)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_synced(fresh[CONFIG], config_text)
        save_model(model, str(fresh[MODEL]), about)
        shutil.copymode(fresh[CONFIG], fresh[MODEL])  # safetensors lets nobody else read it
        with fresh[MODEL].open("rb") as file:
            os.fsync(file.fileno())
        for name, path in fresh.items():
            path.replace(out / name)
        sync_folder(out)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failure(f"--out {out} can't be written ({why}); give a folder that can be") from error
    except (RuntimeError, ValueError, AttributeError) as error:  # parts of a tensor, sparse ones, what is none
        why = str(error).split(". ")[0]
        raise DataError(
            f"safetensors can't hold this model: {why}; let build_model make ordinary tensors, a part of another one "
            "with .clone()"
        ) from error
    finally:
        for path in fresh.values():
            with suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    sys.exit(main())
