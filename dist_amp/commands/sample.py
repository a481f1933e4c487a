"""python -m dist_amp.sample RUN_OR_CHECKPOINT_OR_EXPORT: generate a sample from a trained model.

It calls task.sample(model) and prints the text that this returns, or writes the image to sample.png
in the current folder. Settings after the path override the run's: --task.args.prompt "class ". The
model computes in float32, even from a bf16 export. If the run had optim.ema, the model's
weights are the moving average of the parameters; with --weights model, the parameters themselves.
Exit status: 0 done, 64 bad setting or a task without sample(), 65 bad weights.

Docs: docs/recipes.md
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_model

from dist_amp.checkpoint.format import CONFIG, MANIFEST, all_checkpoints
from dist_amp.checkpoint.weights import load_weights
from dist_amp.commands.export import MODEL, build_model, find_checkpoint, model_parser
from dist_amp.config.load import load_saved
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError
from dist_amp.supervise.command_line import command
from dist_amp.supervise.sampling import as_text_or_image, printable
from dist_amp.world import locate

IMAGE = Path("sample.png")


@command()
def main(argv: Sequence[str]) -> None:
    parser = model_parser("python -m dist_amp.sample", __doc__, "RUN_OR_CHECKPOINT_OR_EXPORT")
    options, settings = parser.parse_known_args(argv)
    folder = options.path
    is_run = (folder / MANIFEST).exists() or all_checkpoints(folder)
    is_export = (folder / MODEL).is_file() and not is_run
    if not is_export:
        accepted = "a run's folder, RUN/checkpoints/step_N, or an export's folder"
        folder = find_checkpoint(folder, accepted)
    config = load_saved(folder / CONFIG, settings)
    device = locate(config.run).device
    task: Any = build_task(config)
    if not hasattr(task, "sample"):
        raise ConfigError(
            f"task.target={config.task.target} has no sample(model); add one that returns text or "
            "an image"
        )
    model = build_model(task, config)
    if is_export:
        try:
            load_model(model, folder / MODEL)
        except (OSError, SafetensorError, RuntimeError) as error:
            # The last line of load_model's RuntimeError has a parameter's name and both shapes.
            problem = str(error).splitlines()[-1].strip()
            text = f"{folder / MODEL} can't be loaded ({problem})"
            raise DataError(f"{text}; export it again, for this task's model") from error
    else:
        load_weights(model, folder, options.weights == "auto")
    with torch.no_grad():
        show(task.sample(model.to(device)))


def show(sample: Any) -> None:
    """Print text, or write an image [C, H, W] in 0..1 to sample.png. Raises DataError."""
    pixels = as_text_or_image(sample)
    if isinstance(pixels, str):
        print(printable(pixels))
        return
    height, width, _ = pixels.shape
    Image.fromarray(pixels.squeeze(2).numpy()).save(IMAGE)  # grey images are [H, W]
    print(f"{IMAGE.resolve()}: {width} x {height} pixels")


if __name__ == "__main__":
    sys.exit(main())
