"""python -m dist_amp.export RUN_OR_CHECKPOINT --out DIR: write a trained model as one safetensors
file.

Reads the model on the CPU from a checkpoint of any strategy and number of ranks; given a run, from
its newest valid checkpoint. DIR gets model.safetensors and the run's config.toml. In your code:

    import safetensors.torch
    model = task.build_model()
    safetensors.torch.load_model(model, "DIR/model.safetensors")

The model is then float32, as the task builds it, whatever --dtype was; model.to(torch.bfloat16)
computes in bf16. A run with a moving average of its parameters exports that; --weights model the
parameters themselves.

--format hf writes what `save_pretrained` does, or the task's export(model, folder) if it has one:
config, weights and tokenizer, for AutoModel...from_pretrained("DIR"). For a model with adapters it
writes only the adapters, which name the base model that from_pretrained adds; --merge adds them to
the base weights and writes the whole model.

Settings after RUN_OR_CHECKPOINT override the checkpoint's config, for example if the task has moved
(--task.target new_file:MyTask). The config's task is imported, as for training: check it first if
you don't trust the checkpoint's source. Exit status: 0 done, 64 bad setting, 65 bad checkpoint, 1
DIR can't be written.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from dist_amp.checkpoint.format import CONFIG, MANIFEST, all_checkpoints
from dist_amp.checkpoint.resume import checkpoints_at, newest_valid
from dist_amp.checkpoint.weights import average_of, load_weights
from dist_amp.config.load import load_config, to_toml
from dist_amp.config.task_class import build_task
from dist_amp.distributed.process import seed_all
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.files import sync_folder, write_synced
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config
from dist_amp.supervise.command_line import Parser, exit_status
from dist_amp.task import Task
from dist_amp.world import World

MODEL = "model.safetensors"
USAGE = (
    "RUN_OR_CHECKPOINT --out DIR [--format safetensors|hf] [--merge] [--dtype bf16|fp32] "
    "[--weights model] [--section.key VALUE ...]"
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> None:
    path, options, settings = parse(argv)
    out = Path(options.out)
    checkpoint = find_checkpoint(path)
    config = load_config_of(checkpoint, settings)
    task: Any = build_task(config.task, config.data)
    model: Any = build_model(task, config)
    average = ""
    if options.weights == "auto":
        average = average_of(checkpoint)
    step = load_weights(model, checkpoint, average)
    if options.merge:
        if not hasattr(model, "merge_and_unload"):
            raise ConfigError(
                "--merge needs a model with adapters of peft, and this one has none; leave --merge "
                "out"
            )
        cast(model, torch.float32)  # frozen weights may be bf16, and the sum would be rounded to it
        model = model.merge_and_unload()
    cast(model, DTYPES[options.dtype])
    with replacing(out) as folder:
        if options.format == "hf":
            save_for_transformers(task, model, folder)
        else:
            metadata = {
                "format": "pt",
                "step": str(step),
                "dtype": options.dtype,
                "weights": average or "model",
                "checkpoint": checkpoint.resolve().name,
                "torch": torch.__version__,
            }
            save_model(model, str(folder / MODEL), metadata)
        text = (checkpoint / CONFIG).read_text(encoding="utf-8")
        write_synced(folder / CONFIG, to_toml(config) if settings else text)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    of = ", their moving average" if average else ""
    print(
        f"{out}: {parameters:,} parameters in {options.dtype}{of}, from step {step} ({checkpoint})"
    )


def parse(argv: Sequence[str]) -> tuple[Path, argparse.Namespace, list[str]]:
    """(the path, this command's options, settings). Errors: ConfigError."""
    parser = PathParser("python -m dist_amp.export", USAGE, __doc__)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="where to write; an existing export is replaced"
    )
    parser.add_argument(
        "--dtype", default="fp32", choices=DTYPES, help="of floating-point tensors; default fp32"
    )
    kinds = ("safetensors", "hf")
    parser.add_argument("--format", default=kinds[0], choices=kinds, help="hf: for transformers")
    text = "add adapters to the weights; needs --format hf"
    parser.add_argument("--merge", action="store_true", help=text)
    path, options, settings = parser.read(argv)
    if options.merge and options.format != "hf":
        raise ConfigError(
            "--merge is for --format hf: the task's own model has adapters; add --format hf"
        )
    out = Path(options.out)
    if (out / MANIFEST).exists() or all_checkpoints(out):
        raise ConfigError(
            f"--out {out} is the folder of a run or checkpoint; give the export its own folder"
        )
    return path, options, settings


# --- a trained model from a path on the command line, for sample too


class PathParser(Parser):
    """Parses a path, options and settings. Errors: ConfigError that ends with the usage."""

    def __init__(self, prog: str, usage: str, description: str | None):
        super().__init__(prog, description)
        self.usage = f"{prog} {usage}"
        self.add_argument(
            "--weights",
            default="auto",
            choices=("auto", "model"),
            help="auto: the parameters' moving average where the checkpoint has one; model: the "
            "parameters themselves",
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.format_usage().strip()}")

    def read(self, argv: Sequence[str]) -> tuple[Path, argparse.Namespace, list[str]]:
        """(path, options, settings). The path comes first: a setting takes all values after it."""
        options, rest = self.parse_known_args(argv)
        if not rest:
            self.error("no path is given")
        if rest[0].startswith("-"):
            self.error(f"the path must come before {rest[0]}")
        if rest[1:] and not rest[1].startswith("--"):
            self.error(f"{rest[1]!r} belongs to no key")
        return Path(rest[0]), options, rest[1:]


def find_checkpoint(path: Path, accepted: str = "a run's folder or RUN/checkpoints/step_N") -> Path:
    """The checkpoint at `path`, or the newest valid one of the run there, by every file's hash.

    Errors: DataError if there is none or none is valid, naming what is `accepted`.
    """
    valid = newest_valid(checkpoints_at(path, str(path), accepted), World())
    assert valid is not None  # newest_valid raises if none of the paths is valid
    return valid


def load_config_of(folder: Path, settings: Sequence[str]) -> Config:
    """The config of a checkpoint or an export, overridden by settings as on the command line."""
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder} has no {CONFIG}; export it again, or copy it from the run")
    try:
        return load_config([f"--config={folder / CONFIG}", *settings])
    except ConfigError as error:
        if not str(error).startswith("task.target="):
            raise
        raise ConfigError(
            f"{error}; {folder} needs its task: start in the run's working directory, or give "
            "--task.target"
        ) from error


def build_model(task: Task, config: Config) -> nn.Module:
    """The task's model in evaluation mode, for a checkpoint's weights."""
    seed_all(config.run.seed)  # as in the run, for what the checkpoint does not hold
    return build_whole(task, torch.device("cpu"), resumes=True).eval()


# --- writing


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors; those that share memory must share it in the file too."""
    storages: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            old = tensor.data.untyped_storage()
            if old.data_ptr() not in storages:
                storages[old.data_ptr()] = torch.empty(0, dtype=tensor.dtype).set_(old).to(dtype)
            new = storages[old.data_ptr()]
            tensor.data = new.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def save_for_transformers(task: Any, model: Any, folder: Path) -> None:
    """By task.export or save_pretrained. Errors: ConfigError for a model that can do neither."""
    if "transformers" in sys.modules:  # its progress bars do not know of terminals
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    if hasattr(task, "export"):
        task.export(model, str(folder))
    elif hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder))
    else:
        raise ConfigError(
            f"--format hf: {type(model).__name__} has no save_pretrained; add `def export(self, "
            "model, folder)` to the task, or use --format safetensors"
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder to write to, which replaces `out` after the with-block unless the block fails.

    Errors: ConfigError if `out` holds anything but an export; DataError, Failure (the disk).
    """
    if out.exists() and not (out / CONFIG).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out} holds other files, and would be replaced; give the export a folder of "
            "its own"
        )
    new, old = out.with_name(f".{out.name}.writing"), out.with_name(f".{out.name}.replaced")
    try:
        _tidy(out, new, old)  # after a kill
        new.mkdir(parents=True)
        yield new
        for path in new.rglob("*"):
            if path.is_file():
                shutil.copymode(new / CONFIG, path)  # safetensors' are readable by the owner only
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if out.exists():
            out.replace(old)
        new.replace(out)
        sync_folder(out.parent)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failure(f"--out {out} can't be written ({why}); give a writable folder") from error
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {str(error).split('. ')[0]}"
        raise DataError(
            f"this model can't be exported: {why}; let build_model make ordinary tensors, and "
            ".clone() views"
        ) from error
    finally:
        _tidy(out, new, old)


def _tidy(out: Path, new: Path, old: Path) -> None:
    """Put an earlier export back if nothing took its place; remove what is left over."""
    if old.exists() and not out.exists():
        old.replace(out)
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
