"""A run's folder as the main job writes it, without a main job: for what reads such folders."""

import json

from dist_amp.telemetry.writers import JsonlWriter


class WrittenRun:
    """Takes steps, is killed and resumed from a checkpoint, and ends, when it is told to."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.start(0)

    def start(self, step):
        """Start, or go on from the checkpoint of a step."""
        (self.folder / "config.toml").write_text('[train]\nsteps = 20\n[run]\ndir = "x"\n')
        self.log = JsonlWriter(self.folder / "metrics.jsonl", step, lambda message: None)

    def take(self, *steps, **more):
        for step in steps:
            self.log.append(
                {
                    "step": step,
                    "train/loss": 1 / step,
                    "ranks": [{"memory/peak_bytes": 2.0**20}],
                    **more,
                }
            )

    def end(self, stopped_by="completed", **more):
        (self.folder / "summary.json").write_text(
            json.dumps({"stopped_by": stopped_by, "steps": 20, **more})
        )
