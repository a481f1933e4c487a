"""What test_verify.py tests, with other features."""

import pytest
import test_verify

# Fixtures.
verify = test_verify.verify

SINUSOID = "--task.target dist_amp.tasks.sinusoid:Sinusoid --task.args.crop 8 --task.args.width 16"


def test_dtypes_prints_what_autocast_makes_of_each_module(verify):
    status, output, errors = verify(f"--dtypes {SINUSOID}")
    assert status == 0, errors
    assert "autocast to bf16 on cpu" in output
    assert "Conv2d" in output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--world_sizes two", "--world_sizes=two must be whole numbers above 0"),
        ("--world_sizes 0", "--world_sizes=0 must be whole numbers above 0"),
        ("--precisions fp64", "--precisions=fp64: 'fp64' is none of fp32, bf16, fp16"),
        ("--strategies ddp,fsdb", "'fsdb' is none of single, ddp, fsdp, hsdp"),
        ("--strategies single --world_sizes 2", "to compare: single takes --world_sizes 1"),
        ("--world_sizes", "expected one argument; see python -m dist_amp.verify --help"),
        ("--task.taget x:Y", "task.target"),
        ("--task.target nowhere:Task", "task.target=nowhere:Task"),
    ],
)
def test_a_mistake_on_its_command_line_is_rejected(verify, args, words):
    status, output, errors = verify(f"{SINUSOID} {args}")
    assert status == 64, output + errors
    assert words in errors
    assert len(errors.splitlines()) == 1
