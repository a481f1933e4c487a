"""Methods of tasks: schedules, helpers, metrics and weights, of shipped tasks and the recipes'."""

import re
import textwrap

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from messages import message_of
from tiny import Tiny, make_run, take_steps, variant
from torch.utils.data import default_collate

from dist_amp.checkpoint.format import all_checkpoints
from dist_amp.supervise.callbacks import misspelt_methods, train_metrics
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.tasks.hf_causal_lm import HFCausalLM
from dist_amp.tasks.hf_classification import HFClassification
from dist_amp.world import World


@pytest.mark.bad_input("a `schedule(step)` that depends on what changes in training")
def test_a_schedule_that_changes_later_is_refused_in_a_script_too(tmp_path):
    shares = [1.0]
    task = variant(schedule=lambda step: shares[-1])
    run = make_run(World(), task, "--eval.every", 1, "--run.dir", tmp_path)
    take_steps(run, 2)
    shares.append(0.5)
    said = "schedule(2) makes the learning rate 0.00015 now, and 0.0003 when the run was built"
    assert said in message_of(64, run.save)
    assert all_checkpoints(tmp_path), "the steps so far are saved"


class Helpers(Tiny):
    """Helpers of a task, some with names much like an optional method's."""

    def collate(self, samples):
        return self.collated(samples)

    def collated(self, samples): ...
    def tokenize(self, text): ...
    def load_rows(self, path): ...
    def _metric(self): ...


def test_helpers_of_a_task_are_not_warned_of():
    for kind in (Helpers, CausalLM, HFCausalLM, HFClassification):
        assert misspelt_methods(kind.__new__(kind)) == {}


def shown_in_recipes(pattern, **names):
    """What a class's body on the page defines."""
    (example,) = re.findall(pattern, (ROOT / "docs/recipes.md").read_text())
    exec(textwrap.dedent(example), names)
    return names


def test_the_metrics_that_the_recipes_show_compare_with_the_runs_own():
    shown = shown_in_recipes(r"(?sm)^    def train_metrics.*?^        }\n")
    shown["share"] = 0.25  # the page's loss_sum sets it
    task = type("Shown", (Tiny,), {name: shown[name] for name in ("share", "train_metrics")})()
    run = make_run(World(), task, "--train.max_grad_norm", 1e-3)
    (report,) = take_steps(run, 1)
    values = train_metrics(run, report)
    assert values["train/share"] == 0.25
    assert values["train/clipped"] == 1
    assert values["train/loss_of_this_rank"] == report.loss_sum / report.weight


def test_the_weights_of_classes_that_the_recipes_show_give_torchs_weighted_mean():
    pattern = r"(?sm)^    class_weights = .*?(?=^```)"
    shown = shown_in_recipes(pattern, F=F, torch=torch, default_collate=default_collate)
    task = type("Shown", (), shown)()
    scores = torch.randn(6, 3, 4)
    labels = torch.randint(3, (6, 4)).index_fill_(1, torch.tensor([2]), -100)
    batch = task.collate([{"x": x, "y": y} for x, y in zip(scores, labels, strict=True)])
    mean = task.loss_sum(lambda x: x, batch) / task.weight(batch)
    expected = F.cross_entropy(scores, labels, task.class_weights, ignore_index=-100)
    torch.testing.assert_close(mean, expected)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("pack", ["off", "best_fit"])
def test_the_shipped_model_trains_on_rows_of_each_kind_and_its_shares_are_metrics(tmp_path, pack):
    rows = "".join(f'{{"text": "{"ab" * (5 + n // 2)}"}}\n' for n in range(60))
    (tmp_path / "texts.jsonl").write_text(rows)
    words = "--task.args.context 31 --task.args.width 16 --task.args.heads 2 --task.args.layers 1"
    words += f" --data.path {tmp_path}/texts.jsonl --use_amp false --data.pack {pack}"
    run = make_run(World(), None, *words.split())
    (report,) = take_steps(run, 1)
    values = train_metrics(run, report)
    batch = run.data.last_step[0][0]
    counted, tokens = batch["counted"], batch["tokens"]
    padding = 100 - 100 * tokens / batch["labels"].numel()
    assert float(values["train/counted_pct"]) == pytest.approx(100 * counted / tokens)
    assert float(values["train/padding_pct"]) == pytest.approx(padding)
    assert torch.isfinite(report.losses[0])
    assert float(report.weight) == counted
    assert ("position_ids" in batch) == (pack == "best_fit")
