"""python -m dist_amp.sample RUN_OR_CHECKPOINT_OR_EXPORT: what the trained model makes, by the task's sample(model).

A text is printed, an image goes to sample.png in the current folder. Settings after the path go over the run's config:
--task.args.prompt "class " --task.args.sample_bytes 100, --run.device cpu. It computes in the dtype that the task
builds the model in, float32, also from a bf16 export: any CPU and GPU can, and nothing is rounded a second time.
Exit status: 0 done, 64 a setting or a task without sample(), 65 the weights, 1 sample.png can't be written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

from dist_amp.checkpoint.format import MANIFEST, all_checkpoints
from dist_amp.commands.command_line import exit_status
from dist_amp.commands.export import (
    A_CHECKPOINT,
    MODEL,
    PathParser,
    build_model,
    find_checkpoint,
    load_config_of,
    read_weights,
)
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.telemetry.metrics import printable
from dist_amp.world import locate

PICTURE = Path("sample.png")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    usage = "RUN_OR_CHECKPOINT_OR_EXPORT [--section.key VALUE ...]"
    path, _, settings = PathParser("python -m dist_amp.sample", usage, __doc__ or "").read(argv)
    exported = (path / MODEL).is_file() and not (path / MANIFEST).exists() and not all_checkpoints(path)
    folder = path if exported else find_checkpoint(path, f"{A_CHECKPOINT}, or an export's folder")
    config = load_config_of(folder, settings)
    device = locate(config.run).device
    task: Any = build_task(config.task, config.data)
    if not hasattr(task, "sample"):
        raise ConfigError(f"task.target={config.task.target} has no sample(model); add one that returns text or image")
    model = build_model(task, config)
    if exported:
        read_export(model, folder / MODEL)
    else:
        read_weights(model, folder)
    with torch.no_grad():
        show(task.sample(model.to(device)))
    return 0


def read_export(model: nn.Module, file: Path) -> None:
    """Errors: DataError, in one line, where the file is damaged or of another model."""
    try:
        load_model(model, file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} can't be read ({error}); export it again") from error
    except RuntimeError as error:  # torch's first line has no names; each that follows has one, with both shapes
        why = [line.strip() for line in str(error).splitlines()]
        raise DataError(f"{file} does not fit the task's model: {why[min(1, len(why) - 1)]}") from error


def show(sample: str | Tensor) -> None:
    """Print a text; write an image [C, H, W] in 0..1 to sample.png."""
    if isinstance(sample, str):
        print(printable(sample))
        return
    if not isinstance(sample, Tensor) or sample.dim() != 3 or len(sample) not in (1, 3, 4):
        what = list(sample.shape) if isinstance(sample, Tensor) else type(sample).__name__
        raise DataError(f"the task's sample(model) gave {what}; return a text, or an image [1, 3 or 4, H, W] in 0..1")
    from PIL import Image

    pixels = (sample.float().nan_to_num().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    try:
        Image.fromarray(pixels[..., 0] if len(sample) == 1 else pixels).save(PICTURE)
    except OSError as error:
        raise Failure(f"{PICTURE.resolve()} can't be written ({error.strerror}); go to a folder that can be") from error
    print(f"{PICTURE.resolve()}: {sample.shape[2]} x {sample.shape[1]} pixels")


if __name__ == "__main__":
    sys.exit(main())
