"""What test_length_groups.py tests, with hf_classification."""

import json

import torch

from dist_amp.settings import DataConfig


def test_a_classifier_of_texts_groups_them_by_their_characters(tmp_path):
    from dist_amp.tasks.hf_classification import HFClassification

    lines = [json.dumps({"text": "a" * (n + 1), "label": 0}) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = HFClassification.__new__(HFClassification)  # without a model
    task.data = DataConfig(path=str(tmp_path / "rows.jsonl"), group_by_length=2)
    task.of = "text"
    task.classes = 2
    rows = task.build_dataset("train")
    order = rows.shuffled(4, 1)[1](0, 0)(torch.arange(len(rows)))
    for step in order.split(4):
        lengths = [len(rows[number]["text"]) for number in step.tolist()]
        assert lengths == sorted(lengths)
    assert not hasattr(task.build_dataset("validation"), "shuffled")
