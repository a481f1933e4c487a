"""python -m dist_amp.export RUN_OR_CHECKPOINT --out DIR: write a trained model as one safetensors
file.

It reads a checkpoint, written under any strategy by any number of ranks, or a run's newest valid
one. DIR gets model.safetensors, the run's config.toml and a model card, README.md. To load it:

    import safetensors.torch
    model = task.build_model()
    safetensors.torch.load_model(model, "DIR/model.safetensors")

The loaded model is float32, as the task builds it, whatever --dtype was. If optim.ema was set, the
moving average of the parameters is exported; --weights model exports the parameters themselves.

--format hf calls the task's export(model, folder), or without one the model's `save_pretrained`, to
write config, weights and tokenizer for AutoModel...from_pretrained("DIR"). A model with adapters is
written as adapters only; with --merge as a whole model, with the adapters added to its weights.

Settings after RUN_OR_CHECKPOINT override the checkpoint's config, for example if the task has moved
(--task.target new_file:MyTask). The config's task is imported from installed packages or the
current folder, never from the checkpoint's folder. Exit status: 0 done, 64 bad setting, 65 bad
checkpoint, 1 DIR can't be written.

Docs: docs/recipes.md
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from dist_amp.checkpoint.format import CONFIG, MANIFEST, all_checkpoints
from dist_amp.checkpoint.resume import checkpoints_at, newest_valid
from dist_amp.checkpoint.weights import load_weights
from dist_amp.config.load import load_saved
from dist_amp.config.task_class import build_task
from dist_amp.config.text import to_toml
from dist_amp.distributed.process import seed_all
from dist_amp.errors import ConfigError, Failure
from dist_amp.files import present
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config
from dist_amp.supervise.command_line import Parser, command
from dist_amp.task import Task
from dist_amp.world import World

MODEL = "model.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@command()
def main(argv: Sequence[str]) -> None:
    parser = model_parser("python -m dist_amp.export", __doc__, "RUN_OR_CHECKPOINT")
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="replaces an earlier export there")
    add("--dtype", default="fp32", choices=DTYPES, help="of floating-point weights; default fp32")
    formats = ("safetensors", "hf")
    add("--format", default="safetensors", choices=formats, help="hf: for from_pretrained")
    add("--merge", action="store_true", help="add adapters to base weights; needs --format hf")
    options, settings = parser.parse_known_args(argv)
    out = options.out
    check_replaceable(out)
    if options.merge and options.format != "hf":
        raise ConfigError("--merge is for --format hf; add --format hf")
    checkpoint = find_checkpoint(options.path)
    config = load_saved(checkpoint / CONFIG, settings)
    task: Any = build_task(config)
    model: Any = build_model(task, config)
    step, weights = load_weights(model, checkpoint, options.weights == "auto")
    if options.merge:
        if not hasattr(model, "merge_and_unload"):
            raise ConfigError("--merge: this model has no peft adapters; leave --merge out")
        model.float()  # else the sum with frozen bf16 weights is rounded to bf16
        model = model.merge_and_unload()
    model.to(DTYPES[options.dtype])
    with replacing(out) as folder:
        if options.format == "hf":
            save_for_transformers(task, model, folder)
        else:
            metadata = {"format": "pt", "step": str(step), "dtype": options.dtype}
            metadata |= {"weights": weights, "checkpoint": checkpoint.resolve().name}
            save_model(model, str(folder / MODEL), metadata)
        if present("commands.model_card"):
            from dist_amp.commands.model_card import write_card

            write_card(folder, out.name, config, checkpoint, weights)
        (folder / CONFIG).write_text(to_toml(config), encoding="utf-8")
    print(f"{out}: {weights} in {options.dtype}, from step {step} ({checkpoint})")


# --- load a trained model: also for sample


def model_parser(prog: str, description: str | None, metavar: str) -> Parser:
    """A parser for a path, which the help calls `metavar`, and for --weights."""
    parser = Parser(prog, description)
    parser.add_argument("path", type=Path, metavar=metavar, help="give it before any setting")
    text = "auto: the parameters' moving average, if the checkpoint has one; model: the "
    text += "parameters themselves"
    parser.add_argument("--weights", default="auto", choices=("auto", "model"), help=text)
    return parser


def find_checkpoint(path: Path, accepted: str = "a run's folder or RUN/checkpoints/step_N") -> Path:
    """The checkpoint at `path`, or the newest valid one of the run there. Raises DataError."""
    valid = newest_valid(checkpoints_at(path, str(path), accepted), World())
    assert valid is not None  # newest_valid raises if none of the paths is valid
    return valid


def build_model(task: Task, config: Config) -> nn.Module:
    """The task's model in evaluation mode, for a checkpoint's weights."""
    seed_all(config.run.seed)  # for what the checkpoint does not hold, as in the run
    model = build_whole(task, torch.device("cpu"), resumes=True)
    model.eval()
    return model


# --- writing


def save_for_transformers(task: Any, model: Any, folder: Path) -> None:
    """Call task.export or model.save_pretrained. Raises ConfigError if there is neither."""
    if "transformers" in sys.modules and present("tasks.pretrained"):
        from dist_amp.tasks.pretrained import as_published

        as_published(model)
    if hasattr(task, "export"):
        task.export(model, str(folder))
    elif hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder))
    else:
        raise ConfigError(
            f"--format hf: {type(model).__name__} has no save_pretrained; add `def export(self, "
            "model, folder)` to the task, or use --format safetensors"
        )


def check_replaceable(out: Path) -> None:
    """Raises ConfigError if `out` holds anything but an export."""
    is_run = (out / MANIFEST).exists() or (out / "tensorboard").exists() or all_checkpoints(out)
    is_export = (out / CONFIG).is_file() and not is_run
    is_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not (is_empty or is_export):
        raise ConfigError(
            f"--out {out} holds other files, and would be replaced; give the export a folder of "
            "its own"
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield a folder to write to. It replaces `out` at the end of the block unless that fails.

    Raises Failure if the disk can't be written.
    """
    new = out.with_name(f".{out.name}.writing")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        for path in new.iterdir():  # safetensors makes its files readable by their owner only
            if path.is_file():
                shutil.copymode(new / CONFIG, path)
        shutil.rmtree(out, ignore_errors=True)
        new.replace(out)
    except (OSError, SafetensorError) as error:
        raise Failure(f"--out {out} can't be written ({error}); give a writable folder") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
