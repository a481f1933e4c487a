"""Which process reads the samples by which datasets are compared."""

import os

from tiny import Rows, make_run, save, take_steps, variant

from dist_amp.world import World


class OpensAtFirstRead(Rows):
    reader = None

    def __getitem__(self, index):
        self.reader = self.reader or os.getpid()
        return super().__getitem__(index)


def test_a_resume_leaves_it_to_the_loaders_workers_to_open_a_datasets_file(tmp_path):
    """A file that is open before they fork has one position for all of them."""

    def resumed(workers):
        task = variant(rows=OpensAtFirstRead)
        words = ["--run.dir", tmp_path, "--run.resume", "auto", "--data.workers", workers]
        return make_run(World(), task, *words)

    run = resumed(workers=0)
    take_steps(run, 1)
    save(run)
    for workers, readers in ((2, {None}), (0, {os.getpid()})):
        run = resumed(workers)
        assert run.step == 1
        assert {run.data.fetch.dataset.reader} == readers
        take_steps(run, 1)
        run.data.close()
