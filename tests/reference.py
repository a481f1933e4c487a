"""python tests/reference.py: write configs/reference.toml, all settings with what they mean."""

import json
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from tyro._docstrings import get_field_docstring

from dist_amp.config.load import load_config

REFERENCE = Path(__file__).parent.parent / "configs/reference.toml"
HEAD = """\
#:schema schema.json
# All settings with their defaults. Put only what differs into your own file: any value can also be
# set by DIST_AMP_SECTION__KEY=VALUE in the environment or --section.key VALUE on the command line.
# The last one wins: defaults, files in order, environment, command line.
"""
# Of the default task; `--task.target my_file:MyTask --help task` lists those of another one.
TASK_ARGS = {
    "context": "Bytes of context of a prediction; a sample has one more.",
    "width": "Width of the model: a multiple of 2 x heads.",
    "layers": "Transformer blocks.",
    "heads": "Attention heads per block.",
    "vocabulary": "Rows of the embedding, at least 256; bytes use the first 256.",
    "tied": "Whether embedding and output share their weights.",
    "loss_chunk": "Tokens whose logits exist at a time while training; auto: 512 MiB of float32 "
    "logits, off: all.",
    "packed_attention": "Of packed rows. varlen: torch's kernel for documents of any length, on "
    "GPUs; mask: a block-diagonal mask; auto: the first where it runs.",
    "prompt": "The text that the trained model continues at the end of a run.",
    "sample_bytes": "How many bytes it appends.",
}


def reference() -> str:
    return HEAD + "".join(f"{line}\n" for line in section("", load_config([], environ={})))


def section(name, config):
    lines, inner = [], []
    if name:
        lines += ["", f"[{name}]"]
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            inner += section(f"{name}.{item.name}".lstrip("."), value)
        else:
            about = TASK_ARGS.get(item.name) if name == "task.args" else meaning(config, item.name)
            indent = {"initial_indent": "# ", "subsequent_indent": "# "}
            lines += textwrap.wrap(about, 100, **indent, break_on_hyphens=False)
            plain = list(value) if isinstance(value, tuple) else value
            lines.append(f"{item.name} = {json.dumps(plain)}")
    return lines + inner


def meaning(config, name):
    """The docstring of a setting and, of one with named values, these."""
    hint = get_type_hints(type(config))[name]
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    values = [value for part in literals for value in get_args(part)]
    text = get_field_docstring(type(config), name, ())
    words = text.replace(";", " ").replace(":", " ").split()
    unnamed = [value for value in values if value not in words]
    return f"{text} Values: {', '.join(values)}." if unnamed and len(values) > 1 else text


if __name__ == "__main__":
    REFERENCE.write_text(reference())
