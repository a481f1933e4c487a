"""python -m dist_amp.tokenize --out FOLDER --data.tokenizer NAME [SETTINGS]: pre-tokenize a dataset
into memory-mapped files.

It writes the training and validation splits to FOLDER, which training reads as data.path. Rows are
chats (messages), prompts with completions, or texts (data.text_column). The files are the same for
any number of workers. If interrupted, start it again: it continues after the last complete shard.

    python -m dist_amp.tokenize --data.path 'rows/*.jsonl' --data.tokenizer bytes --out tokens
    python -m dist_amp.train --data.path tokens ...

--check FOLDER only verifies the files' recorded hashes.

Exit status: 0 done, 64 bad setting, 65 bad data or files, 1 FOLDER can't be written.

Docs: docs/packing.md
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dist_amp.config.load import load_config
from dist_amp.distributed.process import configure_logging, cpu_cores
from dist_amp.errors import ConfigError, Failure, in_one_line
from dist_amp.sources.conversations import LAYOUTS, check_rows
from dist_amp.sources.load import load_rows
from dist_amp.sources.token_shards import TokenShards, read_manifest
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import SHARD_TOKENS, tokenize
from dist_amp.supervise.command_line import Parser, command


@command("; start the same command again to continue")
def main(argv: Sequence[str]) -> None:
    cores = cpu_cores()
    parser = Parser("python -m dist_amp.tokenize", __doc__)
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER", help="the folder to write, or to continue")
    add("--check", type=Path, metavar="FOLDER", help="verify the hashes of this folder's files")
    text = f"worker processes; 0: only this process; default: one per core ({cores})"
    add("--workers", type=int, default=cores, help=text)
    text = f"tokens per file; default {SHARD_TOKENS:,}"
    add("--shard_tokens", type=int, default=SHARD_TOKENS, help=text)
    options, words = parser.parse_known_args(argv)
    configure_logging(0)
    folder = options.check or options.out
    if folder is None or (options.check and (options.out or words)):
        raise ConfigError("give --out FOLDER to write tokens, or --check FOLDER alone to verify")
    if options.check:
        for name in read_manifest(folder).splits:
            TokenShards(folder, name).check_hashes()
        print(f"{folder}: all files match their hashes")
    else:
        write(folder, words, options.workers, options.shard_tokens)
    for name, split in read_manifest(folder).splits.items():
        print(f"{folder / name}: {split}")


def write(folder: Path, words: Sequence[str], workers: int, shard_tokens: int) -> None:
    if workers < 0 or shard_tokens < 1:
        raise ConfigError(
            f"--workers {workers} and --shard_tokens {shard_tokens} must be at least 0 and 1"
        )
    data = load_config(words).data
    if data.sources or data.tokenizer == "auto" or (data.name == "auto" and data.path == "off"):
        raise ConfigError(
            "set data.tokenizer, and data.path or data.name, the rows to tokenize; tokenize each "
            "of data.sources on its own, and mix the folders"
        )
    tokenizer = open_tokenizer(data.tokenizer)
    splits = {}
    for split in ("train", "validation"):
        rows = load_rows(data, split, *LAYOUTS)
        if rows is not None:
            check_rows(rows, split, data.text_column, tokenizer)
            splits[split] = rows
    if workers == 1:
        workers = 0
    try:
        tokenize(folder, splits, tokenizer, data.text_column, workers, shard_tokens)
    except (OSError, EOFError, RuntimeError) as error:  # the last two if a worker has died
        fix = "use another --out, or if a worker has died (out of memory?), fewer --workers"
        raise Failure(f"{folder} can't be written: {in_one_line(error)}; {fix}") from error


if __name__ == "__main__":
    sys.exit(main())
