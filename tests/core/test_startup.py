"""What a start costs: the phases from the failure before it to the end of the first step."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train import TINY

from dist_amp.telemetry.startup import PHASES


def test_every_rank_logs_its_start_once(launch):
    words = ("--task.target", "tiny:Tiny", "--run.dir", "run", "--metrics.log_every", 1)
    ends = launch.each(2, *TINY, *words, "--train.steps", 3)
    assert {end.returncode for end in ends} == {0}, ends[0].stderr
    for rank in range(2):
        events = EventAccumulator(str(launch.folder / f"run/tensorboard/rank{rank:05d}")).Reload()
        tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("start/")}
        assert tags == {f"start/{phase}_seconds" for phase in PHASES}
        assert [event.step for event in events.Scalars("start/imports_seconds")] == [1]
