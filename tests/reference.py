"""python tests/reference.py: write configs/reference.toml, all settings with what they mean."""

import json
import textwrap
from pathlib import Path

from dist_amp.config.help import choices_of
from dist_amp.config.schema import described, json_schema
from dist_amp.config.task_class import find_task
from dist_amp.settings import TaskConfig

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
    about = described(json_schema(find_task(TaskConfig.target)), sources=[])
    lines = [HEAD]
    table = ""
    for key, schema in about.items():
        section, _, name = key.rpartition(".")
        if section != table:
            table = section
            lines.append(f"\n[{section}]\n")
        text = TASK_ARGS[name] if section == "task.args" else meaning(schema)
        lines += [f"# {line}\n" for line in textwrap.wrap(text, 98, break_on_hyphens=False)]
        lines.append(f"{name} = {json.dumps(schema['default'])}\n")
    return "".join(lines)


def meaning(schema):
    """What a setting means and, if some of its named values do not stand there, these."""
    text = schema["description"]
    values = [value for part in schema.get("anyOf", [schema]) for value in choices_of(part)]
    words = text.replace(";", " ").replace(":", " ").split()
    unnamed = [value for value in values if value not in words]
    return f"{text} Values: {', '.join(values)}." if unnamed and len(values) > 1 else text


if __name__ == "__main__":
    REFERENCE.write_text(reference())
