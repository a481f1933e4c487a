"""What test_image_classification.py tests, with other features."""

import pytest
import torch

from dist_amp.config.load import load_config
from dist_amp.settings import DataConfig
from dist_amp.tasks.image_classification import ImageClassification
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell
from dist_amp.verify.reference import Reference
from dist_amp.world import World


def test_verify_computes_the_same_step_with_augmentation():
    pytest.importorskip("sklearn")
    task = ImageClassification(DataConfig(), width=4)
    reference = Reference(load_config([], environ={}), torch.device("cpu"), task)
    assert check_cell(World(), reference, Cell("single", "fp32")).cause == ""
