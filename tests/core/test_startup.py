"""What a start costs: the phases from the failure before it to the end of the first step."""

import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train import TINY
from tiny import Tiny, make_run

from dist_amp.telemetry.startup import PHASES
from dist_amp.world import World


def test_every_rank_logs_its_start_once(launch):
    words = ("--task.target", "tiny:Tiny", "--run.dir", "run", "--metrics.log_every", 1)
    ends = launch.each(2, *TINY, *words, "--train.steps", 3)
    assert {end.returncode for end in ends} == {0}, ends[0].stderr
    for rank in range(2):
        events = EventAccumulator(str(launch.folder / f"run/tensorboard/rank{rank:05d}")).Reload()
        tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("start/")}
        assert tags == {f"start/{phase}_seconds" for phase in PHASES}
        assert [event.step for event in events.Scalars("start/imports_seconds")] == [1]


def test_reading_a_dataset_is_counted_as_data_and_not_as_building_the_model():
    class SlowToRead(Tiny):
        def build_dataset(self, split):
            time.sleep(0.02)
            return super().build_dataset(split)

    run = make_run(World(), SlowToRead())
    assert run.world.clock.so_far()["data"] >= 0.02
