"""What test_machine.py tests, with other features."""

import pytest
import torch

from dist_amp.errors import ConfigError
from dist_amp.scaling.compile import check_compile
from dist_amp.settings import CompileConfig
from dist_amp.world import World

# ---- Triton's compiler ----


@pytest.mark.bad_input(
    "`compile.blocks` on a GPU without a C compiler, or without Python's headers"
)
@pytest.mark.parametrize(
    ("cc", "found", "headers", "said"),
    [
        ("", [], True, "needs a C compiler for Triton (gcc or clang, or the one that CC names); "),
        ("", ["clang"], True, ""),
        ("mycc", ["gcc"], True, "needs a C compiler for Triton (mycc, or the one that CC names); "),
        ("", ["gcc"], False, "/Python.h for Triton (Debian: python3-dev); install it, or use"),
    ],
)
def test_inductor_on_a_gpu_needs_what_triton_compiles_with(
    cc, found, headers, said, monkeypatch, tmp_path
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("CC", cc)
    monkeypatch.setattr("shutil.which", lambda name: name if name in found else None)
    monkeypatch.setattr("sysconfig.get_path", lambda *names: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    world = World(device=torch.device("cuda", 0))
    if not said:
        check_compile(CompileConfig(blocks=True), "single", 1, world)
        return
    with pytest.raises(ConfigError) as error:
        check_compile(CompileConfig(blocks=True), "single", 1, world)
    assert said in str(error.value)
