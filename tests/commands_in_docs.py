"""Finds the commands in the documentation, and says how each is run by a test, or what it needs."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from forked import ROOT

DOCS = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "README.md"]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *DOCS,
]
FILES = [*sorted((ROOT / "configs").glob("*.toml")), *sorted((ROOT / "launch").iterdir())]
PROGRAMS = {
    *("python", "python3", "torchrun", "dist_amp", "bash", "source", "pip", "(ulimit"),
    *("sbatch", "scancel", "scontrol", "kubectl", "docker", "ray", "ssh", "sysctl", "taskset"),
    *(".ci/run", ".venv/bin/ruff", ".venv/bin/pip", ".venv/bin/mkdocs"),
    *("wandb", "trackio"),
}

# A command that matches is not run, for this reason; its programs, files and options are checked.
# A test that covers it is named where there is one.
NEEDS = {
    r".*\.\.\.": "what the three dots stand for",
    r"(sbatch|scancel|scontrol) ": "Slurm: tests/repo/test_slurm.py",
    r"kubectl ": "a Kubernetes cluster: tests/repo/test_kubernetes.py",
    r"docker ": "docker: tests/repo/test_container.py",
    r"ray start|python launch/ray_train\.py": "Ray: tests/slow/test_ray.py",
    r"torchrun --nproc_per_node=2 my_script\.py": "a script of yours: tests/repo/test_readme.py",
    r"NNODES=2 ": "several machines: tests/repo/test_launch.py",
    r"dist_amp launch --nnodes (2|1:4)": "several machines: tests/features/test_launch_command.py",
    r"python -m benchmarks gpu": "a GPU: tests/repo/test_benchmarks.py",
    r"python -m benchmarks (amp( --out benchmarks)?|overhead)$": "tests/repo/test_benchmarks.py",
    r"python -m benchmarks amp --reduced$": "minutes: tests/repo/test_benchmarks.py",
    r"ssh ": "another machine",
    r"(\.venv/bin/)?pip install": "the network",
    r"(DIST_AMP_FAKE_GPU=1 )?bash tests/engines\.sh": "the network",
    r".* --data\.name user/": "the network",
    r"python -m benchmarks\.storage": "an address: tests/features/test_storage.py",
    r".* '?s3://": "an object store: tests/features/test_sources_s3.py",
    r"python -m dist_amp\.follow|wandb |trackio ": "tests/features/test_follow_trackers.py",
    r"\.venv/bin/mkdocs": "mkdocs: tests/slow/test_site.py",
    r"sysctl ": "root",
    r"taskset ": "the number of a process",
    r"(bash )?\.ci/run": "hours: it runs all tests",
    r"\(ulimit": "memory that runs out: tests/features/test_explain.py",
    r"dist_amp (update|adopt muon( --remove ema)?)$": "a project in git: tests/repo/test_update.py",
}


class Block(NamedTuple):
    """The commands of a block of a page, run from top to bottom; or one in a sentence."""

    page: str
    commands: tuple[str, ...]


def blocks() -> list[Block]:
    """Each block and each single command once, with the page that has it first."""
    found: dict[tuple[str, ...], str] = {}
    for path in PAGES:
        text = path.read_text()
        for commands in [*in_blocks(text), *in_sentences(text)]:
            found.setdefault(commands, path.relative_to(ROOT).as_posix())
    for path in FILES:
        for command in in_header(path.read_text()):
            found.setdefault((command,), path.relative_to(ROOT).as_posix())
    longer = [commands for commands in found if len(commands) > 1]
    return [
        Block(page, commands)
        for commands, page in found.items()
        if len(commands) > 1 or not any(commands[0] in block for block in longer)
    ]


def in_blocks(text: str) -> Iterator[tuple[str, ...]]:
    """Of blocks without a language, or of bash; of console those after a $."""
    for language, block in re.findall(r"(?ms)^ *```(\w*)\n(.*?)^ *```", text):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        if language == "console":
            yield tuple(without_comment(line[2:]) for line in lines if line.startswith("$ "))
        elif language in ("", "bash"):
            yield tuple(without_comment(line) for line in lines if line.strip())


def in_sentences(text: str) -> Iterator[tuple[str, ...]]:
    """Code in a sentence or table that begins with a program and has an argument."""
    sentences = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    for code in re.findall(r"`([^`]+)`", sentences):
        command = " ".join(code.split())
        if is_command(command) and (" " in command or command == ".ci/run"):
            yield (command,)


def in_header(text: str) -> Iterator[str]:
    """The comment lines, at a file's start, that begin with a program."""
    header = re.match(r"(?:#.*\n)*", text)
    for line in re.findall(r"(?m)^#\s+(\S.*)$", header[0] if header else ""):
        if is_command(line):
            yield without_comment(line)


def is_command(line: str) -> bool:
    return re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).split(" ")[0] in PROGRAMS


def without_comment(line: str) -> str:
    return re.sub(r"\s+#\s.*", "", line.strip())


def needs(command: str) -> str:
    """What the command needs that a test lacks; "" if it is run."""
    return next((what for pattern, what in NEEDS.items() if re.match(pattern, command)), "")


# What stands in for the reader's own things, for eight GPUs and for a port that is free.
STAND_INS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "model",
    "MODEL": "model",
    "my_file:MyTask": "my_file:TinyRegression",
    "--step N": "--step 2",
    "-k NAME": "-k accumulation",
    "--check tokens": "--check other",
    " ARGS": "",
    "torchrun ": "torchrun --standalone --local-addr 127.0.0.1 ",
    "--nproc_per_node=8": "--nproc_per_node=2",
}
RUNS = "RUN A B RUN_A RUN_B runs/a runs/b runs/20260131T093000Z-1f6b2c".split()

# Words added to the commands that match, for less work; of equal options the last one counts.
TRAINS = r".*(dist_amp[. ](train|launch|demo)\b(?!.*--help| -m)|launch/(demo|one_node)\.sh)"
OTHER_TASK = "my_file|hf_finetune|images|examples/"
SMALL_GPT = "--task.args.width 32 --task.args.layers 1 --task.args.heads 2 --task.args.context 32"
LESS_WORK = {
    TRAINS: "--train.steps 4 --train.micro_batch_size 2 --eval.batches 1",
    rf"(?!.*({OTHER_TASK})){TRAINS}": f"{SMALL_GPT} --task.args.sample_bytes 8",
    # Python's own source takes four seconds to read.
    rf"(?!.*({OTHER_TASK}|data\.path))python -m dist_amp\.(train|plan)": "--data.path corpus",
    r".*--config gpt_124m$": "--train.global_batch_size auto",
    r".*gan\.py": "--train.steps 4",
    r"python -m dist_amp\.plan .*gpt_124m": SMALL_GPT,
    r".*-m dist_amp\.verify .*": "--world_sizes 1 --precisions fp32",
    r".*-m dist_amp\.verify --bit_exact": "--world_sizes 1,2",
    r"bash launch/test\.sh": "--collect-only -q",
    r"(dist_amp new|python -m dist_amp\.(sample|tokenize|verify))$": "--help",
    r"python -m benchmarks amp ": "--smoke",
    r"python -m benchmarks overhead ": "--rounds 6",
    r"python -m benchmarks pretrained": "--layers 1",
    r"python -m benchmarks packing": "--documents 1000",
    r".*benchmarks[. ](data|activations|checkpoint|collectives|bit_exact|tripwires)": SMALL_GPT,
    r"python -m benchmarks activations": "--task.args.layers 2",  # it recomputes every second block
    r".*benchmarks\.(bit_exact|tripwires)": "--train.steps 4 --train.global_batch_size 16 "
    "--train.micro_batch_size 2",
}

# Tests of these take 1 s; a block with any other command is a slow test.
QUICK = re.compile(
    r"dist_amp (plan|replay|diff|runs|plot|report|train --help)|dist_amp new$"
    r"|python -m dist_amp\.(train|plan|sample|export|tokenize)|python -m benchmarks( packing)?$"
    r"|source "
)
HUGGING_FACE = re.compile("hf_finetune|my_tokenizer")


def is_quick(block: Block) -> bool:
    commands = [command for command in block.commands if not needs(command)]
    return all(QUICK.match(one) and not HUGGING_FACE.search(one) for one in commands)


def small(command: str) -> str:
    """The command with the stand-ins, and with less work."""
    added = [words for pattern, words in LESS_WORK.items() if re.match(pattern, command)]
    for theirs, ours in STAND_INS.items():
        command = command.replace(theirs, ours)
    return " ".join([command, *added])
