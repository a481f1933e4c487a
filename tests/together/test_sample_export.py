"""What test_export.py tests, with sample."""

import shutil

import pytest
import test_export_with_others
from test_export import exports, saved
from test_export_with_others import GPT, SMALL_GPT, refusal, reseal

from dist_amp.checkpoint.format import CONFIG
from dist_amp.commands import export, sample

# Fixtures.
draws = test_export_with_others.draws
text = test_export_with_others.text


@pytest.mark.parametrize("target", ["subprocess:Popen", "os:system"])
def test_a_hostile_config_starts_nothing_and_is_refused(tmp_path, draws, capsys, target):
    (draws / CONFIG).write_text(
        f'[task]\ntarget = "{target}"\n[task.args]\nargs = ["touch", "{tmp_path}/started"]\n'
    )
    reseal(draws)
    for command, argv in ((export, ["--out", "out"]), (sample, [])):
        status, line = refusal(capsys, command, draws, *argv)
        assert status == 64
        assert line.startswith(f"error: task.target={target}")
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_names_the_parameter_and_both_shapes(tmp_path, text, capsys):
    saved(tmp_path / "run", GPT, f"{SMALL_GPT} --data.path {text}")
    assert exports(tmp_path / "run", "--out", tmp_path / "out")
    capsys.readouterr()
    wider = ["--task.args.width", "32"]
    status, line = refusal(capsys, export, tmp_path / "run", "--out", tmp_path / "new", *wider)
    assert status == 65
    assert "embedding.weight is [256, 16] torch.float32 there and [256, 32] torch.float32" in line
    status, line = refusal(capsys, sample, tmp_path / "out", *wider)
    assert status == 65
    assert "size mismatch for " in line


def test_sample_says_the_same_from_run_checkpoint_and_export(tmp_path, draws, capsys):
    said = []
    assert exports(draws, "--out", "out")
    assert exports(draws, "--out", "half", "--dtype", "bf16")
    shutil.copytree(draws, "copied")
    capsys.readouterr()
    for path in ("run", "copied", "out", "half"):
        assert sample.main([path]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert "\x1b" not in said[0]
    assert said[0].endswith("\N{REPLACEMENT CHARACTER}[2J\n")
    first, _, _, half = (float(text.partition("\N{REPLACEMENT CHARACTER}")[0]) for text in said)
    assert first == pytest.approx(half, rel=0.05), "8 bits of mantissa, through three layers"


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_sample_writes_an_image(tmp_path, draws, capsys, channels, mode):
    from PIL import Image

    args = ["--task.args.kind", "image", "--task.args.channels", str(channels)]
    assert sample.main([str(draws), *args]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/sample.png: 4 x 3 pixels\n"
    with Image.open(tmp_path / "sample.png") as image:
        assert (image.mode, image.size) == (mode, (4, 3))
        assert image.getextrema() == ((0, 255) if channels == 1 else ((0, 255),) * channels)


def test_what_sample_can_not_show_is_refused(tmp_path, draws, capsys):
    saved(tmp_path / "plain", "tiny:Tiny")
    (tmp_path / "sample.png").mkdir()
    image = ("--task.args.kind", "image")
    for words, status, message in (
        ((draws, "--task.args.kind", "number"), 65, "returned int; return text, or an image"),
        ((draws, *image, "--task.args.channels", 2), 65, "returned [2, 3, 4]"),
        ((draws, *image), 1, f"{tmp_path}/sample.png can't be written"),
        ((tmp_path / "plain",), 64, "error: task.target=tiny:Tiny has no sample(model)"),
    ):
        reported, line = refusal(capsys, sample, *words)
        assert reported == status
        assert message in line


def test_a_damaged_export_is_refused(tmp_path, draws, capsys):
    assert exports(draws, "--out", "out")
    capsys.readouterr()
    file = tmp_path / "out/model.safetensors"
    for content in (file.read_bytes()[:-10], b"", b"\xff" * 100):
        file.write_bytes(content)
        status, line = refusal(capsys, sample, "out")
        assert status == 65
        assert line.startswith("error: out/model.safetensors can't be loaded")


def test_sample_refuses_bad_input_and_the_export_says_what_it_wrote(tmp_path, draws, capsys):
    status, line = refusal(capsys, sample, "nowhere")
    assert (status, line.endswith("RUN/checkpoints/step_N, or an export's folder")) == (65, True)
    assert exports("run", "--out", "out")
    written = f"153 parameters (model) in fp32, from step 2 ({draws.relative_to(tmp_path)})"
    assert capsys.readouterr().out.endswith(f"out: {written}\n")
