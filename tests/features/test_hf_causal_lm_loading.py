"""Pretrained weights go from their files into shards, bit for bit as from_pretrained loads them."""

import pytest
import torch
from messages import message_of
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from tiny import Tiny, make_run, save, take_steps, whole

pytest.importorskip("transformers")
from peft import LoraConfig, get_peft_model
from tiny_hf import LLAMA, MODELS, in_own_memory, make_model
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, LlamaConfig

from dist_amp.parallel import build_parallel
from dist_amp.precision import build_precision
from dist_amp.scaling.blocks import find_blocks
from dist_amp.scaling.meta import build_module, build_whole, load_parameters
from dist_amp.settings import ParallelConfig, PrecisionConfig
from dist_amp.tasks.pretrained import load_pretrained
from dist_amp.world import World

CPU = torch.device("cpu")
EXACT = {"rtol": 0, "atol": 0}
CLASSIFIER = AutoModelForSequenceClassification


class Pretrained:
    """A model of transformers from its folder; `lora`: with adapters on these layers."""

    def __init__(self, auto, folder, fresh_head=False, lora=(), trained=None, **options):
        self.auto, self.folder, self.options = auto, folder, options
        self.fresh_head, self.lora, self.trained = fresh_head, lora, trained

    def build_model(self):
        config = AutoConfig.from_pretrained(self.folder, **self.options)
        model = self.auto.from_config(config, dtype=torch.float32)
        if self.lora:
            config = LoraConfig(r=2, target_modules=list(self.lora), modules_to_save=self.trained)
            model = get_peft_model(model, config)
        return model

    def load(self, model):
        load_pretrained(model, self.folder, self.fresh_head)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(24).view(2, 12)).logits


SHARDS = {"dtype": torch.bfloat16, "max_shard_size": "20KB"}


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in MODELS), ("llama", SHARDS)])
def test_a_loaded_model_is_that_of_from_pretrained_bit_for_bit(name, options, tmp_path):
    """Files in bf16 fill float32 parameters, and one that the index does not list is not read."""
    auto, _ = MODELS[name]
    make_model(tmp_path, name, **options)
    if options:
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "consolidated.safetensors")
    ours = build_whole(Pretrained(auto, tmp_path), CPU)
    theirs = auto.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), **EXACT)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), **EXACT)


def laid_out(world, task, strategy):
    """The loaded model under a strategy: (its whole parameters and buffers, logits)."""
    torch.manual_seed(5)
    module = build_module(task)
    precision = build_precision(PrecisionConfig(use_amp=False), strategy == "fsdp", world)
    blocks = find_blocks(module)
    parallel = build_parallel(ParallelConfig(), strategy, module, blocks, precision, world)
    load_parameters(task, parallel.module, world)
    tensors = (*module.named_parameters(), *module.named_buffers())
    values = {name: whole(value) for name, value in tensors}
    return values, logits(parallel.model).clone()


def same_on_two_ranks(task):
    """What one process loads, after a check that DDP and FSDP load the same."""
    ((values, expected),) = on_ranks(1, laid_out, task, "single")
    for strategy in ("ddp", "fsdp"):
        for other, output in on_ranks(2, laid_out, task, strategy):
            torch.testing.assert_close(other, values, **EXACT)
            torch.testing.assert_close(output, expected, **EXACT)
    return values, expected


# A weight of [1, 32]: the second of two ranks has no part of it.
ONE_CLASS = (CLASSIFIER, LlamaConfig(**LLAMA, num_labels=1))


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        (MODELS["mixtral"], ()),
        (MODELS["llama_tied"], ("q_proj", "down_proj")),
        (ONE_CLASS, ()),
    ],
    ids=["mixtral", "llama with adapters", "one class"],
)
def test_ddp_and_fsdp_load_the_same_model_as_one_process(model, lora, tmp_path):
    auto, config = model
    made = auto.from_config(config)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.1)  # norms, too
    made.save_pretrained(tmp_path)
    _, found = same_on_two_ranks(Pretrained(auto, tmp_path, lora=lora))
    theirs = in_own_memory(auto.from_pretrained(tmp_path, dtype=torch.float32))
    torch.testing.assert_close(found, logits(theirs), **EXACT)


def test_a_new_head_and_adapters_are_the_same_under_every_strategy_and_begin_as_pefts(tmp_path):
    head = {"fresh_head": True, "lora": ("q_proj",), "trained": ["score"], "num_labels": 3}
    values, _ = same_on_two_ranks(Pretrained(CLASSIFIER, make_model(tmp_path), **head))
    own, copied = (value for name, value in values.items() if "score" in name)  # peft trains a copy
    torch.testing.assert_close(own, copied, **EXACT)
    assert own.std() > 0
    a, b = (
        next(value for name, value in values.items() if f"layers.0.self_attn.q_proj.{part}" in name)
        for part in ("lora_A", "lora_B")
    )
    assert b.count_nonzero() == 0
    bound = a.shape[1] ** -0.5  # of kaiming_uniform_ with a = sqrt(5)
    assert 0.9 * bound < a.abs().max() <= bound


@pytest.mark.parametrize(
    ("stored", "built"),
    [("bert_base", "bert"), ("bert_base", "bert_masked"), ("bert", "bert_base")],
)
def test_files_of_a_base_model_fit_one_with_a_head_and_the_reverse(stored, built, tmp_path):
    """A pooler counts as part of a head: a masked language model has none."""
    auto, _ = MODELS[built]
    task = Pretrained(auto, make_model(tmp_path, stored), fresh_head=True)
    ours = build_whole(task, CPU).state_dict()
    theirs = auto.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    body = {name: value for name, value in ours.items() if ".layer.0." in name}
    assert body
    torch.testing.assert_close(body, {name: theirs[name] for name in body}, **EXACT)


def test_a_model_of_plain_modules_loads_from_safetensors(tmp_path):
    class Plain(Tiny):
        def load(self, model):
            load_pretrained(model, tmp_path)

    expected = Tiny().build_model().state_dict()
    save_file(expected, tmp_path / "model.safetensors")
    torch.testing.assert_close(build_whole(Plain(), CPU).state_dict(), expected, **EXACT)


class Zeros(Tiny):
    """Loads all parameters but the first `left`; `frozen`: the first layer is not trained."""

    def __init__(self, frozen=False, left=0):
        super().__init__()
        self.frozen, self.left, self.loads = frozen, left, 0

    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(not self.frozen)
        return model

    def load(self, model):
        self.loads += 1
        with torch.no_grad():
            for parameter in list(model.parameters())[self.left :]:
                parameter.fill_(0.01)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_resumed_run_loads_again_only_what_the_checkpoint_may_lack(frozen, tmp_path):
    words = "--train.steps 4 --train.micro_batch_size 8 --use_amp false --run.resume auto".split()
    run = make_run(World(), Zeros(frozen), *words, "--run.dir", tmp_path)
    take_steps(run, 2)
    save(run)
    assert run.task.loads == 1
    resumed = make_run(World(), Zeros(frozen), *words, "--run.dir", tmp_path)
    assert (resumed.step, resumed.task.loads) == (2, 1 if frozen else 0)
    torch.testing.assert_close(resumed.model.state_dict(), run.model.state_dict(), **EXACT)


@pytest.mark.bad_input("a `load(model)` that leaves parameters unset")
def test_what_load_leaves_unset_is_named():
    text = message_of(65, make_run, World(), Zeros(left=1))
    assert "leaves 1 of 6 parameters unset or nan: 0.0.weight; " in text


def refused(folder, auto=MODELS["llama"][0], **options):
    return message_of(65, build_whole, Pretrained(auto, folder, **options), CPU)


@pytest.mark.bad_input("a folder without safetensors weights, or with damaged ones")
def test_a_folder_without_weights_or_with_damaged_ones(tmp_path):
    AutoConfig.for_model("llama", **LLAMA).save_pretrained(tmp_path)
    assert "has no weights: neither model.safetensors nor" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle; convert it" in refused(tmp_path)
    file = make_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "can't be read" in refused(tmp_path)
    file.unlink()
    *_, missing = make_model(tmp_path, max_shard_size="20KB").glob("*.safetensors")
    missing.unlink()
    assert missing.name in refused(tmp_path)


@pytest.mark.bad_input("pretrained weights with other names, shapes or integers")
def test_weights_of_another_model_are_refused_by_name(tmp_path):
    file = make_model(tmp_path) / "model.safetensors"
    text = refused(tmp_path, vocab_size=300)
    assert f"lm_head.weight is F32 [260, 32] in {tmp_path} and torch.float32 [300, 32] in" in text
    text = refused(tmp_path, AutoModel, fresh_head=True, num_hidden_layers=1)
    assert "only in the files: model.layers.1." in text, "further layers are no head"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["lm_head.weight"].char()}, file)
    assert "lm_head.weight is I8 [260, 32] in " in refused(tmp_path)
    save_file({name.replace("mlp", "ffn"): value for name, value in weights.items()}, file)
    text = refused(tmp_path)
    assert "not those of LlamaForCausalLM: missing from the files: model.layers.0.mlp." in text
    assert "only in the files: model.layers.0.ffn.down_proj.weight, " in text
    assert "mlp" in refused(tmp_path, fresh_head=True), "a missing layer is no head"
