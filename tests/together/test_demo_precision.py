"""Core as test_machine_precision.py tests it, with demo."""

import os
import sys

import pytest
import test_machine_precision

from dist_amp.commands import demo
from dist_amp.files import shipped_folder

# Fixtures.
cpu = test_machine_precision.cpu

EMULATED = ["--use_amp", "false"]


@pytest.mark.parametrize(
    ("words", "environ", "chosen"),
    [
        (["--use_amp", "true"], {}, []),
        (["--use-amp=false"], {}, []),
        (["--precision.scaler.init_scale", "8"], {}, []),
        (["--config", "mine.toml"], {}, []),
        (["--config", "missing.toml"], {}, []),
        ([], {"DIST_AMP_PRECISION__DTYPE": "fp16"}, []),
        ([], {"DIST_AMP_USE_AMP": "true"}, []),
        (["--config", "other.toml", "--optim.lr", "1"], {}, EMULATED),
        ([], {"DIST_AMP_RUN__SEED": "1"}, EMULATED),
    ],
)
def test_the_demo_chooses_a_precision_unless_a_setting_does(
    cpu, tmp_path, monkeypatch, words, environ, chosen
):
    cpu(bf16=30)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("precision.dtype = 'bf16'")
    (tmp_path / "other.toml").write_text("[train]\nsteps = 5")
    assert demo.precision_settings(words, environ) == chosen


@pytest.fixture
def started(monkeypatch):
    """started(*words): what the demo replaces its process with."""

    def run(*words):
        calls = []
        monkeypatch.setattr(os, "execv", lambda path, argv: calls.append((path, argv)))
        assert demo.main(words) == 0
        ((path, argv),) = calls
        assert path == argv[0] == sys.executable
        return argv[1:]

    return run


@pytest.mark.parametrize(
    ("native_one", "passed", "said"),
    [
        (("float32", "this CPU emulates bf16"), "--use_amp false ", "float32: this CPU emulates"),
        (("bf16", "native on this CPU"), "", "bf16: native on this CPU"),
        (("fp16", "native on this GPU"), "--precision.dtype fp16 ", "fp16: native on this GPU"),
    ],
)
def test_the_demo_takes_the_native_precision_and_says_why_in_one_line(
    started, monkeypatch, capsys, native_one, passed, said
):
    monkeypatch.setattr(demo, "native_precision", lambda device_type: native_one)
    config = shipped_folder() / "configs/demo.toml"
    words = started("--train.steps", "5")
    before = f"-m dist_amp.launch --config {config} "
    assert words == f"{before}{passed}--train.steps 5".split()
    line = capsys.readouterr().err
    assert line.startswith(f"precision  {said}")
    assert line.endswith("; choose with --precision.dtype bf16|fp16 or --use_amp false\n")
    assert line.count("\n") == 1


def test_the_demo_says_nothing_of_a_precision_that_is_set(started, capsys):
    assert started("--use_amp", "false")[-2:] == ["--use_amp", "false"]
    assert capsys.readouterr().err == ""
