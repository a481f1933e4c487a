"""The README.md of an export: a model card in the hub's format, without paths of this machine.

Docs: docs/recipes.md
"""

import json
import math
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dist_amp import __version__
from dist_amp.checkpoint.format import Manifest, read_manifest
from dist_amp.config.text import flat, to_toml
from dist_amp.record import Record
from dist_amp.settings import Config
from dist_amp.sources.mixture import tables_of

CARD = "README.md"
OF_PEFT = "Model Card for Model ID"  # in the unfilled card that peft writes
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
LIBRARIES = ("torch", "transformers", "peft")


def write_card(folder: Path, name: str, config: Config, checkpoint: Path, weights: str) -> None:
    """Write the card into the export's folder, unless the task's export has written one."""
    path = folder / CARD
    if path.exists() and OF_PEFT not in path.read_text(encoding="utf-8"):
        return
    manifest = read_manifest(checkpoint)
    model = str(flat(to_toml(config)).get("task.args.model", ""))
    is_on_hub = not Path(model).exists() and bool(HUB_NAME.fullmatch(model))
    base = model if is_on_hub else last_part(model)
    library, code = loading_code(folder, name, config.task.target, base)
    front = ["---", f"library_name: {library}"]
    if is_on_hub and library != "pytorch":
        front.append(f"base_model: {model}")
    front += ["tags:", "- dist_amp", "---"]
    data = []
    for source in tables_of(config.data).values() or [config.data]:
        source_name = source.name if source.path == "off" else last_part(source.path)
        data.append("the task's" if source_name == "auto" else source_name)
    versions = {"dist_amp": __version__, **manifest.versions}
    for package in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions.setdefault(package, version(package))
    rows = {
        "base model": base,
        "task": last_part(config.task.target),
        "data": ", ".join(data),
        "steps": f"{manifest.step:,} of {manifest.global_batch_size:,} samples",
        "weights": f"{weights}, trained in {manifest.precision}",
        **losses(checkpoint, manifest),
        "versions": ", ".join(f"{key} {value}" for key, value in versions.items()),
    }
    table = [f"| {key} | {value} |" for key, value in rows.items() if value]
    blocks = [front, [f"# {name}"], ["| | |", "|---|---|", *table], ["```python", *code, "```"]]
    path.write_text("\n\n".join(map("\n".join, blocks)) + "\n", encoding="utf-8")


def last_part(path: str) -> str:
    """The name at the end of a path or address, without its folders, password and query."""
    return path.partition("?")[0].rstrip("/").rpartition("/")[2].rpartition("@")[2]


def losses(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """The last evaluation's, and the last logged training loss up to the checkpoint."""
    found = {}
    for row in Record(checkpoint.parent.parent).rows:
        loss = float(row.get("train/loss", "nan"))  # a row of an evaluation has none
        if row["step"] <= manifest.step and math.isfinite(loss):
            found["training loss"] = f"{loss:.4f} (step {row['step']:,})"
    if manifest.evaluation:
        values = ", ".join(f"{key} {value:.4f}" for key, value in manifest.evaluation.items())
        found["held out"] = f"{values} (step {manifest.evaluated_step:,})"
    return found


def loading_code(folder: Path, name: str, target: str, base: str) -> tuple[str, list[str]]:
    """Returns (the hub's name of the library, code that loads the model), by the export's files."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        mapping = json.loads(adapter.read_text()).get("auto_mapping") or {}
        kind = mapping.get("base_model_class", "AutoModel")
        return "peft", [
            "from peft import PeftModel",
            f"from transformers import {kind}",
            "",
            f'base = {kind}.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(base, "{name}")',
        ]
    if (folder / "config.json").exists():
        named = json.loads((folder / "config.json").read_text()).get("architectures")
        kind = (named or ["AutoModel"])[0]
        return "transformers", [
            f"from transformers import {kind}",
            "",
            f'model = {kind}.from_pretrained("{name}")',
        ]
    module, _, task = last_part(target).partition(":")
    return "pytorch", [
        "from safetensors.torch import load_model",
        f"from {module.removesuffix('.py')} import {task}",
        "",
        f"model = {task}(...).build_model()  # with the task.args of config.toml",
        f'load_model(model, "{name}/model.safetensors")',
    ]
