"""What test_sources_findings.py tests, with tokenize."""

import os
import signal
import time
from contextlib import redirect_stderr

import pytest
from test_sources_findings import (
    own_cache,  # noqa: F401
    write_texts,
)

from dist_amp.commands import tokenize as command


@pytest.mark.bad_input("SIGTERM while `tokenize` works")
def test_tokenize_ends_by_sigterm_in_one_line_that_says_how_to_go_on(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", [f"text {n}" * 50 for n in range(30_000)])
    words = f"--data.path {path} --data.tokenizer bytes --out {tmp_path}/out --workers 0"
    if (child := os.fork()) == 0:
        with (tmp_path / "said").open("w") as file, redirect_stderr(file):
            status = command.main([*words.split(), "--shard_tokens", "100000"])
        os._exit(status)
    while not list(tmp_path.glob("out/train/*")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    said = (tmp_path / "said").read_text().splitlines()[-1]
    assert said == "error: stopped by SIGTERM; start the same command again to continue"
