"""python -m dist_amp.export RUN_OR_CHECKPOINT --out DIR: write the trained model as one safetensors file.

One CPU process reads the model from a checkpoint of any strategy and number of ranks; of a run, the newest valid
checkpoint. DIR gets model.safetensors and the run's config.toml. In your own code:

    import safetensors.torch
    model = task.build_model()
    safetensors.torch.load_model(model, "DIR/model.safetensors")

The model is then float32, as the task builds it, whatever --dtype was; model.to(torch.bfloat16) computes in bf16.
A run with optim.ema exports the moving average of its parameters; --weights model exports the parameters themselves.

--format hf writes what `save_pretrained` does, by the task's export(model, folder) if there is one: config, weights and
tokenizer, for AutoModel...from_pretrained("DIR"). Of a model with adapters it writes the adapters alone, which name the
base model that from_pretrained adds; --merge adds them to its weights and writes it whole.

Settings after RUN_OR_CHECKPOINT override the checkpoint's config, for example if the task has moved
(--task.target new_file:MyTask). The config's task is imported, as for training: check it first if you don't trust the
checkpoint's source. Exit status: 0 done, 64 bad setting, 65 bad checkpoint, 1 DIR can't be written.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from dist_amp.checkpoint.format import CONFIG, MANIFEST, all_checkpoints
from dist_amp.checkpoint.weights import has_average, load_weights
from dist_amp.commands.command_line import exit_status
from dist_amp.commands.hf_format import files_text, merged, write_hf
from dist_amp.commands.trained_model import MODEL, PathParser, build_model, find_checkpoint, load_config_of
from dist_amp.config.load import to_toml
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.runtime.files import sync_folder, write_synced

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    usage = (
        "RUN_OR_CHECKPOINT --out DIR [--format safetensors|hf] [--merge] [--dtype bf16|fp32] [--weights model] "
        "[--section.key VALUE ...]"
    )
    parser = PathParser("python -m dist_amp.export", usage, __doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write; an existing export is replaced")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="of floating-point tensors; default fp32")
    parser.add_argument("--format", default="safetensors", choices=("safetensors", "hf"), help="hf: for transformers")
    parser.add_argument("--merge", action="store_true", help="add adapters to the weights; needs --format hf")
    path, options, settings = parser.read(argv)
    if options.merge and options.format != "hf":
        raise ConfigError("--merge is for --format hf: the task's own model has adapters; add --format hf")
    out = Path(options.out)
    if (out / MANIFEST).exists() or all_checkpoints(out):
        raise ConfigError(f"--out {out} is the folder of a run or checkpoint; give the export its own folder")
    checkpoint = find_checkpoint(path)
    config = load_config_of(checkpoint, settings)
    task = build_task(config.task, config.data)
    model = build_model(task, config)
    average = options.weights == "auto" and has_average(checkpoint)
    step = load_weights(model, checkpoint, average)
    config_text = to_toml(config) if settings else (checkpoint / CONFIG).read_text(encoding="utf-8")
    if options.merge:
        cast(model, torch.float32)  # frozen weights may be bf16, and the sum would be rounded to it
        model = merged(model)
    cast(model, DTYPES[options.dtype])
    what = ", their moving average" if average else ""
    if options.format == "hf":
        write_hf(out, task, model, config_text)
        print(f"{out}: {files_text(out)}, in {options.dtype}{what}, from step {step} ({checkpoint})")
        return 0
    metadata = {
        "format": "pt",
        "step": str(step),
        "dtype": options.dtype,
        "weights": "ema" if average else "model",
        "checkpoint": checkpoint.resolve().name,
        "torch": torch.__version__,
    }
    write(out, model, metadata, config_text)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out / MODEL}: {parameters:,} parameters in {options.dtype}{what}, from step {step} ({checkpoint})")
    return 0


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors to `dtype`; tensors that share memory keep sharing it.

    If the file stored a shared tensor twice, load_model would reject it for the task's own model.
    """
    storages: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            old = tensor.data.untyped_storage()
            if old.data_ptr() not in storages:
                storages[old.data_ptr()] = torch.empty(0, dtype=tensor.dtype).set_(old).to(dtype)
            new = storages[old.data_ptr()]
            tensor.data = new.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def write(out: Path, model: nn.Module, metadata: dict[str, str], config_text: str) -> None:
    """Write both files under temporary names, then rename them, so that a kill leaves each file old or new.

    Errors: Failure with the path; DataError for a model that safetensors can't store.
    """
    temporary = {name: out / f".{name}.writing" for name in (MODEL, CONFIG)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_synced(temporary[CONFIG], config_text)
        save_model(model, str(temporary[MODEL]), metadata)
        shutil.copymode(temporary[CONFIG], temporary[MODEL])  # safetensors makes it readable by its owner only
        with temporary[MODEL].open("rb") as file:
            os.fsync(file.fileno())
        for name, path in temporary.items():
            path.replace(out / name)
        sync_folder(out)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failure(f"--out {out} can't be written ({why}); give a writable folder") from error
    except (RuntimeError, ValueError, AttributeError) as error:  # views, sparse tensors, entries that are not tensors
        why = str(error).split(". ")[0]
        raise DataError(
            f"safetensors can't store this model: {why}; let build_model make ordinary tensors, and .clone() views"
        ) from error
    finally:
        for path in temporary.values():
            with suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    sys.exit(main())
