"""Files as rows of the `datasets` library, which converts them once into memory-mapped ones in its cache."""

import errno
import glob
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dist_amp.errors import DataError, Failure
from dist_amp.settings import SourceConfig
from dist_amp.sources.files import Files

# Format -> (the loader of the library, its options).
LOADERS: dict[str, tuple[str, dict[str, str]]] = {
    "text": ("text", {"sample_by": "document"}),
    "json": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t"}),
    "parquet": ("parquet", {}),
}


def from_files(config: SourceConfig, files: Files) -> Any:
    """All splits that the files have. Errors: DataError that names the file, and the line if that is known."""
    import datasets

    fix = "check the files"
    try:
        with without_its_errors(), _in_reach(files):
            if files.format == "images":
                from dist_amp.sources.images import image_rows

                return image_rows(files)
            if files.format == "saved":
                fix = "write the folder again with save_to_disk, of a Dataset or DatasetDict"
                saved = datasets.load_from_disk(files.address(files.root))
                return saved if isinstance(saved, dict) else datasets.DatasetDict(train=saved)
            return _loaded(files, files.splits)
    except Exception as error:
        if "ompression type zstd not supported" in str(error):
            fix = "install it with `pip install zstandard`"
        broken = _first_broken(files) if files.format in LOADERS and not is_full(error) else ""
        which = f": {files.address(broken)}" if broken and broken != config.path else ""
        raise not_loaded(f"data.path={config.path}{which}", error, _place(files, broken) + fix) from error


def _loaded(files: Files, splits: dict[str, list[str]]) -> Any:
    """A `datasets.DatasetDict`; the library converts the files to memory-mapped ones in its cache, once."""
    import datasets

    loader, options = LOADERS[files.format]
    # The library takes names for patterns.
    named = {
        split: [glob.escape(path) if files.is_local else files.address(path) for path in paths]
        for split, paths in splits.items()
    }
    return datasets.load_dataset(loader, data_files=named, **options)


def _first_broken(files: Files) -> str:
    """The first file that can't be read, or not together with the first one; "" if there is none."""
    paths = [path for inside in files.splits.values() for path in inside]
    for path in paths:
        try:
            with without_its_errors(), _in_reach(files):
                _loaded(files, {"train": sorted({paths[0], path})})
        except Exception:
            return path
    return ""


def _place(files: Files, path: str) -> str:
    """Where a file has its first line that is no UTF-8, or no JSON, in words; "" if that is not the cause."""
    if not path or files.format == "parquet":
        return ""
    try:
        with files.fs.open(path, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.decode().strip() and ".jsonl" in path:
                        json.loads(line)
                except json.JSONDecodeError as error:
                    return f"the first broken line is {number}, at column {error.colno}; "
                except UnicodeDecodeError:
                    return f"the first line that is not UTF-8 is {number}; "
    except Exception:  # it is compressed and damaged, or gone
        return ""
    return ""


def not_loaded(source: str, error: Exception, fix: str) -> Failure:
    """The error in place of one of the library's."""
    import datasets

    cause = error.__cause__ or error  # the library wraps the error in a general one
    text = " ".join(str(cause).split()) or type(cause).__name__
    if is_full(error):
        cache = datasets.config.HF_DATASETS_CACHE
        return Failure(f"{source}: the disk of the cache {cache} is full; make room, or set HF_DATASETS_CACHE")
    if "scripts are no longer supported" in text:  # nor by us: they would run a stranger's code
        fix = "convert it to Parquet elsewhere, with a release of datasets below 4, and set data.path to the files"
    return DataError(f"{source} could not be loaded: {text if len(text) < 400 else f'{text[:400]} ...'}; {fix}")


def is_full(error: BaseException | None) -> bool:
    """Whether a disk without room is the cause."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "Not enough disk space" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def without_its_errors() -> Iterator[None]:
    """The library logs what it raises as well; inside, it only raises."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _in_reach(files: Files) -> Iterator[None]:
    """HF_HUB_OFFLINE makes the library refuse every address; inside, it refuses those of the hub alone."""
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline and "hf" in files.fs.protocol
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
