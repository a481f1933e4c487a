"""Core as test_script_run.py tests it, with export."""

from pathlib import Path

from test_script_run import Noisy, recorded, trained

from dist_amp.commands import export


def test_an_objects_class_and_arguments_are_recorded_so_that_commands_build_it_again(
    tmp_path, monkeypatch, capsys
):
    trained(tmp_path, Noisy(samples=32))
    assert recorded(tmp_path) == {
        "target": "test_script_run:Noisy",
        "args": {"samples": 32, "uneven": False, "depth": 2, "seed": 0},
    }
    assert capsys.readouterr().out.endswith(f"next: dist_amp export {tmp_path}/run --out model\n")
    monkeypatch.chdir(Path(__file__).parent)
    assert export.main([f"{tmp_path}/run", "--out", f"{tmp_path}/exported"]) == 0
    assert (tmp_path / "exported/model.safetensors").exists()
