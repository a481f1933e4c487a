"""python -m dist_amp.tokenize --out FOLDER --data.tokenizer NAME [--data.path ...] [other settings of [data]]

Rows to tokens, ahead of training: the training and the validation split as memory-mapped files in FOLDER, which
data.path then names. Rows are chats (messages), prompts with completions, or texts (data.text_column). The files are
the same for any number of workers, and an interrupted command, started again, goes on after its last complete shard.

    python -m dist_amp.tokenize --data.path 'rows/*.jsonl' --data.tokenizer bytes --out tokens
    python -m dist_amp.train --data.path tokens ...

--check FOLDER compares the files with the hashes of when they were made, and changes nothing.

Exit status: 0 done, 64 bad setting, 65 bad data or files, 1 FOLDER can't be written.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.commands.stopped_early import raise_on_signals
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.process import configure_logging
from dist_amp.sources.conversations import MESSAGES_COLUMN, PROMPT_COLUMN, check_rows
from dist_amp.sources.load import load_rows
from dist_amp.sources.token_shards import Manifest, hash_problem, holds_tokens, read_manifest
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokenizing import SHARD_TOKENS, tokenize


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    with raise_on_signals():
        return exit_status(run, argv, "; start the same command again to go on")


def run(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.tokenize", __doc__)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--out", metavar="FOLDER", help="where to write; an interrupted command's folder is completed")
    parser.add_argument("--check", metavar="FOLDER", help="verify the hashes of this folder's files")
    parser.add_argument(
        "--workers", type=int, default=cores, help=f"processes; 0: this one; default: all {cores} cores"
    )
    parser.add_argument(
        "--shard_tokens", "--shard-tokens", type=int, default=SHARD_TOKENS, help="in a file; default 134,217,728"
    )
    options, words = parser.parse_known_args(argv)
    configure_logging(0)
    if options.check is not None:
        if words or options.out:
            raise ConfigError(f"--check takes a folder alone, without {' '.join(words) or '--out'}")
        return check(Path(options.check))
    if options.out is None:
        raise ConfigError("--out is missing; name the folder to write, as in --out tokens")
    if options.workers < 0 or options.shard_tokens < 1:
        raise ConfigError(
            f"--workers {options.workers} and --shard_tokens {options.shard_tokens} must be at least 0 and 1"
        )
    data = load_config(words).data
    if data.name == "auto" and data.path == "off":
        raise ConfigError("neither data.path nor data.name is set; name the rows to tokenize")
    if names := [one.name for one in fields(data.sources)]:
        raise ConfigError(f"data.sources has {', '.join(names)}; tokenize each source by itself, and mix the folders")
    if holds_tokens(data.path):
        raise ConfigError(f"data.path={data.path} holds tokens already; name the rows that they were made of")
    tokenizer = open_tokenizer(data.tokenizer)
    splits = {split: load_rows(data, split, MESSAGES_COLUMN, PROMPT_COLUMN) for split in ("train", "validation")}
    splits = {split: rows for split, rows in splits.items() if rows is not None}
    for rows in splits.values():
        check_rows(rows, data.text_column, tokenizer)
    workers = 0 if options.workers == 1 else options.workers
    folder = Path(options.out)
    show(folder, tokenize(folder, splits, tokenizer, data.text_column, say, workers, options.shard_tokens))
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def show(folder: Path, manifest: Manifest) -> None:
    """Print what the folder holds."""
    for name, split in manifest.splits.items():
        print(f"{folder / name}: {split}")


def check(folder: Path) -> int:
    """Errors: DataError for the first file that is not what was written."""
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise DataError(f"{folder} is not complete: dist_amp.tokenize was interrupted; start it again as before")
    for name, split in manifest.splits.items():
        if problem := hash_problem(folder, name, split):
            raise DataError(f"{problem}; copy it again, or make the tokens again")
    print(f"{folder}: all files are as they were written")
    show(folder, manifest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
