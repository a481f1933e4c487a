"""The README.md of an export: a model card in Hugging Face's format, without local paths.

Docs: docs/recipes.md
"""

import json
from pathlib import Path

from dist_amp.checkpoint.format import read_manifest
from dist_amp.settings import Config

PEFT_TITLE = "Model Card for Model ID"  # of the unfilled card that peft writes


def write_card(folder: Path, name: str, config: Config, checkpoint: Path, weights: str) -> None:
    """Write the card into the export's folder, unless the task's export has written one."""
    path = folder / "README.md"
    if path.exists() and PEFT_TITLE not in path.read_text(encoding="utf-8"):
        return
    manifest = read_manifest(checkpoint)
    target = Path(config.task.target).name
    rows = {
        "task": target,
        "steps": f"{manifest.step:,} of {manifest.global_batch_size:,} samples",
        "weights": f"{weights}, trained in {manifest.precision}",
        "versions": ", ".join(f"{key} {value}" for key, value in manifest.versions.items()),
    }
    if manifest.evaluation:
        values = ", ".join(f"{key} {value:.4f}" for key, value in manifest.evaluation.items())
        rows["held out"] = f"{values} (step {manifest.evaluated_step:,})"
    if (folder / "adapter_config.json").exists():
        library = "peft"
        code = f'from peft import AutoPeftModel\n\nmodel = AutoPeftModel.from_pretrained("{name}")'
    elif (folder / "config.json").exists():
        library = "transformers"
        architectures = json.loads((folder / "config.json").read_text()).get("architectures")
        kind = (architectures or ["AutoModel"])[0]
        code = f'from transformers import {kind}\n\nmodel = {kind}.from_pretrained("{name}")'
    else:
        library = "pytorch"
        module, _, task = target.partition(":")
        code = (
            "from safetensors.torch import load_model\n"
            f"from {module.removesuffix('.py')} import {task}\n\n"
            f"model = {task}(...).build_model()  # with the task.args of config.toml\n"
            f'load_model(model, "{name}/model.safetensors")'
        )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    path.write_text(
        f"---\nlibrary_name: {library}\ntags:\n- dist_amp\n---\n\n# {name}\n\n"
        f"| | |\n|---|---|\n{table}\n\n```python\n{code}\n```\n",
        encoding="utf-8",
    )
