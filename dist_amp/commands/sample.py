"""python -m dist_amp.sample RUN_OR_CHECKPOINT_OR_EXPORT: generate a sample from a trained model.

Prints the text that task.sample(model) returns; an image is written to sample.png in the current
folder. Settings after the path override the run's config: --task.args.prompt "class "
--task.args.sample_bytes 100, --run.device cpu. The model computes in the dtype that the task builds
it in, float32, even from a bf16 export: this works on any CPU and GPU and adds no rounding. A run
with a moving average of its parameters samples with that, or with --weights model with the
parameters themselves. Exit status: 0 done, 64 bad setting or a task without sample(), 65 bad
weights, 1 sample.png can't be written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from dist_amp.checkpoint.format import MANIFEST, all_checkpoints
from dist_amp.checkpoint.weights import average_of, load_weights
from dist_amp.commands.export import MODEL, PathParser, build_model, find_checkpoint, load_config_of
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.supervise.command_line import exit_status
from dist_amp.supervise.sampling import checked, printable
from dist_amp.world import locate

IMAGE = Path("sample.png")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> None:
    usage = "RUN_OR_CHECKPOINT_OR_EXPORT [--weights model] [--section.key VALUE ...]"
    path, options, settings = PathParser("python -m dist_amp.sample", usage, __doc__).read(argv)
    folder = path
    is_run = (path / MANIFEST).exists() or all_checkpoints(path)
    exported = (path / MODEL).is_file() and not is_run
    if not exported:
        accepted = "a run's folder, RUN/checkpoints/step_N, or an export's folder"
        folder = find_checkpoint(path, accepted)
    config = load_config_of(folder, settings)
    device = locate(config.run).device
    task: Any = build_task(config.task, config.data)
    if not hasattr(task, "sample"):
        raise ConfigError(
            f"task.target={config.task.target} has no sample(model); add one that returns text or "
            "an image"
        )
    model = build_model(task, config)
    if exported:
        read_export(model, folder / MODEL)
    else:
        average = ""
        if options.weights == "auto":
            average = average_of(folder)
        load_weights(model, folder, average)
    with torch.no_grad():
        show(task.sample(model.to(device)))


def read_export(model: nn.Module, file: Path) -> None:
    """Load an export's weights. Errors: DataError for a damaged file, or another model's."""
    try:
        load_model(model, file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} can't be read ({error}); export it again") from error
    except RuntimeError as error:
        first, *details = str(error).splitlines()  # each detail names a parameter and both shapes
        raise DataError(
            f"{file} does not fit the task's model: {(details or [first])[0].strip()}"
        ) from error


def show(sample: Any) -> None:
    """Print text, or write an image [C, H, W] in 0..1 to sample.png. Errors: DataError."""
    pixels = checked(sample)
    if isinstance(pixels, str):
        print(printable(pixels))
        return
    height, width, channels = pixels.shape
    if channels == 1:
        pixels = pixels[..., 0]
    try:
        Image.fromarray(pixels.numpy()).save(IMAGE)
    except OSError as error:
        raise Failure(
            f"{IMAGE.resolve()} can't be written ({error.strerror}); start in a writable folder"
        ) from error
    print(f"{IMAGE.resolve()}: {width} x {height} pixels")


if __name__ == "__main__":
    sys.exit(main())
