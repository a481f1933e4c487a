"""The short form of chaos.py: real runs, broken; their ends are compared with runs left alone."""

import random
import shutil
import signal
from functools import partial

import chaos
import pytest
from chaos import LAYOUTS, Chaos, as_options, differences

from dist_amp.checkpoint.format import all_checkpoints

SHORT = {"train.steps": 30, "eval.every": 10}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), random.randrange(1000), **SHORT)


def test_a_run_whose_rank_is_killed_in_the_middle_of_a_checkpoint_ends_bit_identical(world, launch):
    words = as_options(world.words | LAYOUTS["fsdp"])
    killed = launch.each(2, *words, DIE_AT="in the midst of a shard:20:1")
    assert killed[1].returncode == -signal.SIGKILL
    assert killed[0].returncode > 0
    again = launch.each(2, *words)
    assert [rank.returncode for rank in again] == [0, 0], again[0].stderr[-3000:]
    # The checkpoint of step 20 was never complete.
    assert ", resumed from step 10" in again[0].stdout
    assert differences(launch.folder / "run", world.through(**LAYOUTS["fsdp"])) == []


@pytest.mark.slow
def test_the_comparison_sees_one_bit(world, tmp_path):
    one = world.through()
    assert differences(one, one) == []
    other = tmp_path / "other"
    shutil.copytree(one, other)
    text = (other / "metrics.jsonl").read_text()
    text = text.replace('"train/grad_norm": ', '"train/grad_norm": 1', 1)
    (other / "metrics.jsonl").write_text(text)
    assert [difference[:15] for difference in differences(one, other)] == ["line 0, step 1:"]
    job = world.job(**LAYOUTS["ddp"], **{"optim.lr": 3.0001e-4})
    assert job.end() == 0
    names = differences(one, job.run)
    assert "model.0.weight" in names
    assert "ranks.0.random.torch" not in names, "the same numbers were drawn"
    assert all_checkpoints(one)[-1].name == all_checkpoints(job.run)[-1].name


def test_a_trial_that_the_quick_form_lacks_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["chaos.py", "--quick", "hail"])
    with pytest.raises(SystemExit):
        chaos.main()
    assert "unknown name hail; there are sigkills, any_world" in capsys.readouterr().err


# The long form in parts that a sample can hold, with fewer kills and signals; `bash
# launch/chaos.sh` has all of them.
PARTS = {name: chaos.LONG[name] for name in ("flips", "orphans", "disks", "hangs", "mishaps")}
for cell in chaos.CELLS:
    PARTS[f"sigkills {' '.join(cell)}"] = partial(chaos.sigkills, kills=3, cells=[cell])
PARTS["hail"] = partial(chaos.hail, kills=4, shortest=3.0, longest=12.0)
PARTS["any_world"] = partial(chaos.any_world, kills=4)
for strategy in LAYOUTS:
    for point in chaos.POINTS:
        part = partial(chaos.points, some=[point], strategies=[strategy])
        PARTS[f"{point}, {strategy}"] = part
for target in chaos.TARGETS:
    for phase in chaos.PHASES:
        where = {"targets": [target], "workers": [2], "phases": [phase]}
        part = partial(chaos.signals, numbers=["SIGTERM"], **where)
        PARTS[f"SIGTERM to {target} in {phase}"] = part


@pytest.mark.bad_input("torchrun killed, or a signal to it or any rank")
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost(tmp_path, part):
    rows = list(PARTS[part](Chaos(tmp_path, seed=random.randrange(1000))))
    assert all(row.good == row.tried > 0 for row in rows), chaos.table(rows)
