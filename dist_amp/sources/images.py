"""Image folders: a row per file, in the order of their names, with its folder as the label. Nothing is copied."""

import posixpath
from typing import Any

import datasets  # so this file is imported where images are read alone

from dist_amp.errors import DataError, in_one_line
from dist_amp.sources.files import Files


class NamedImage(datasets.Image):
    """An image column whose errors name the file."""

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:
        """A PIL image. Errors: DataError if it can't be decoded."""
        try:
            return super().decode_example(value, token_per_repo_id)
        except Exception as error:  # of PIL, or of the file system
            path = value.get("path") if isinstance(value, dict) else None
            raise DataError(f"the image {path or 'here'} can't be decoded: {in_one_line(error)}") from error


def image_rows(files: Files) -> Any:
    """A `datasets.DatasetDict` with the columns image and, if each image lies in the folder of its class, label."""
    paths = [path for inside in files.splits.values() for path in inside]
    top = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    below = 1 if len(files.splits) > 1 else 0  # the folders train, test ... are no classes
    class_of = {path: "/".join(posixpath.relpath(path, top or ".").split("/")[below:-1]) for path in paths}
    classes = sorted(set(class_of.values()))
    features = {"image": NamedImage()}
    if len(classes) > 1 and "" in classes:
        stray = next(path for path in paths if not class_of[path])
        raise DataError(f"the image {files.address(stray)} lies in no class's folder, as others do; move or remove it")
    if "" not in classes:
        features["label"] = datasets.ClassLabel(names=classes)
    rows = {}
    for split, inside in files.splits.items():
        columns: dict[str, list[Any]] = {"image": [files.address(path) for path in inside]}
        if "label" in features:
            columns["label"] = [classes.index(class_of[path]) for path in inside]
        rows[split] = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    return datasets.DatasetDict(rows)
