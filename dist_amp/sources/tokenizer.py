"""Open a tokenizer: bytes, a file of `tokenizers`, or whatever `transformers` can open."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.sources.files import stay_local_without_network
from dist_amp.sources.token_shards import short_hash

# A tokenizer.json does not say which token ends a document: the first of these that it has is used.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")


@dataclass(frozen=True)
class Tokenizer:
    name: str  # as in data.tokenizer, for messages
    vocabulary: int  # all ids are below it
    end: int | None  # the id that ends a document
    identity: str  # a hash of all that decides the ids; the same wherever the files are
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    chat: Any = None  # the transformers tokenizer, if it has a chat template


def open_tokenizer(name: str) -> Tokenizer:
    """Open what data.tokenizer names: "bytes", a file, a folder, or a model on the hub."""
    if name == "bytes":
        return Tokenizer(name, 256, 0, "bytes", _bytes_of, _text_of)  # the byte 0 ends a document
    path = Path(name).expanduser()
    is_folder = path.is_dir()
    file = path / "tokenizer.json" if is_folder else path
    try:
        if file.is_file() and not (path / "tokenizer_config.json").exists():
            return _from_file(file, name)
        if not is_folder:
            if name.startswith((".", "/", "~")) or name.count("/") > 1 or file.suffix == ".json":
                raise FileNotFoundError("it does not exist")
            stay_local_without_network()
        from transformers import AutoTokenizer

        source = path if is_folder else name
        return of_transformers(AutoTokenizer.from_pretrained(source), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.tokenizer={name} needs {error.name}; pip install {error.name}"
        ) from error
    except Exception as error:  # both libraries raise many types, with many lines
        raise DataError(
            f"data.tokenizer={name} can't be read: {first_line(error)}; give a tokenizer.json, a "
            "folder that a tokenizer's save_pretrained wrote, a model on the hub, or bytes"
        ) from error


def of_transformers(tokenizer: Any, name: str = "") -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = backend.to_str()
    else:  # a slow (Python) tokenizer, identified by its vocabulary
        rules = json.dumps({"kind": type(tokenizer).__name__, "tokens": tokenizer.get_vocab()})
    return Tokenizer(
        name or str(tokenizer.name_or_path),
        max(tokenizer.get_vocab().values()) + 1,
        tokenizer.eos_token_id,
        _identity(rules, tokenizer.eos_token_id, tokenizer.chat_template),
        partial(_encode, tokenizer),
        tokenizer.decode,
        tokenizer if tokenizer.chat_template else None,
    )


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Raises DataError if an embedding of `rows` rows lacks some of the tokenizer's ids."""
    if tokenizer.vocabulary > rows:
        fitting = -(-tokenizer.vocabulary // 64) * 64
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocabulary} tokens and the model's "
            f"embedding {rows} rows; use task.args.vocabulary={fitting}, or a smaller tokenizer"
        )


def _from_file(file: Path, name: str) -> Tokenizer:
    from tokenizers import Tokenizer as Rules

    rules = Rules.from_file(str(file))
    rules.no_truncation()
    rules.no_padding()
    vocabulary = max(rules.get_vocab().values(), default=-1) + 1
    if (largest := max(rules.encode("a").ids, default=0)) >= vocabulary:
        raise ValueError(f"its model has {vocabulary} tokens, too few for the id {largest}")
    ends = map(rules.token_to_id, ENDS)
    end = next((number for number in ends if number is not None), None)
    decode = partial(rules.decode, skip_special_tokens=False)
    identity = _identity(rules.to_str(), end, None)
    return Tokenizer(name, vocabulary, end, identity, partial(_ids_of, rules), decode)


# Named functions, not lambdas, because loader workers may receive them pickled.
def _ids_of(rules: Any, text: str) -> list[int]:
    return rules.encode(text).ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]  # verbose=True warns of long texts


def _bytes_of(text: str) -> list[int]:
    return list(text.encode())


def _text_of(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def _identity(rules: str, end: int | None, template: Any) -> str:
    content = json.loads(rules)
    for key in ("truncation", "padding"):  # not used here; transformers sets them at each call
        content.pop(key, None)
    return short_hash(json.dumps([content, end, template or None], sort_keys=True))
