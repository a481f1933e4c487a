"""What test_ema.py tests, with other features."""

from optimizer_runs import words
from safetensors.torch import load_file
from test_ema import EMA, assert_equal, averages_of
from tiny import Tiny, make_run, parameters_of, save, take_steps

from dist_amp.commands import export, sample
from dist_amp.world import World


class Shows(Tiny):
    def sample(self, model):
        return f"{model[0][0].weight.sum().item():.6f}"


def test_export_and_sample_use_the_average_unless_the_parameters_are_asked_for(tmp_path, capsys):
    more = [*EMA, "--task.target", "test_ema_with_others:Shows"]
    run = make_run(World(), Shows(), *words(tmp_path / "run", "single", *more))
    take_steps(run, 3)
    save(run)
    averages, parameters = averages_of(run), parameters_of(run)
    assert averages["0.0.weight"].tolist() != parameters["0.0.weight"].tolist()
    for words_, expected, said in [
        ([], averages, "(ema)"),
        (["--weights", "model"], parameters, "(model)"),
    ]:
        assert export.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), *words_]) == 0
        assert said in capsys.readouterr().out
        assert_equal(load_file(tmp_path / "out/model.safetensors"), expected)
        assert sample.main([str(tmp_path / "run"), *words_]) == 0
        assert capsys.readouterr().out.strip() == f"{expected['0.0.weight'].sum().item():.6f}"
