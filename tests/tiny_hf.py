"""Tiny models, tokenizers and data of Hugging Face's kind, written to disk as a user has them."""

import copy
import json

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

QUICK = "--train.micro_batch_size 2 --use_amp false --optim.warmup_steps 0 --eval.every 1".split()
BYTES = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
VOCABULARY = 4 + len(BYTES)
TRANSFORMER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2}
BERT = {"vocab_size": VOCABULARY, **TRANSFORMER, "pad_token_id": 0}
LLAMA = {**BERT, **IDS, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, **IDS}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
VIT = {**TRANSFORMER, "image_size": 16, "patch_size": 8, "num_labels": 3}
EXPERTS = {"num_experts": 12, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
MODELS = {
    "llama": (hf.AutoModelForCausalLM, hf.LlamaConfig(**LLAMA)),
    "llama_tied": (hf.AutoModelForCausalLM, hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "gpt2": (hf.AutoModelForCausalLM, hf.GPT2Config(**GPT2)),
    # More than 10 experts: their order counts.
    "mixtral": (hf.AutoModelForCausalLM, hf.MixtralConfig(**LLAMA, num_local_experts=12)),
    "qwen2_moe": (hf.AutoModelForCausalLM, hf.Qwen2MoeConfig(**LLAMA, **EXPERTS)),
    "t5": (hf.AutoModelForSeq2SeqLM, hf.T5Config(**T5, num_heads=4)),
    "bert": (hf.AutoModelForSequenceClassification, hf.BertConfig(**BERT)),
    "bert_masked": (hf.AutoModelForMaskedLM, hf.BertConfig(**BERT)),
    "bert_base": (hf.AutoModel, hf.BertConfig(**BERT)),
    "vit": (hf.AutoModelForImageClassification, hf.ViTConfig(**VIT)),
    "resnet": (hf.AutoModelForImageClassification, hf.ResNetConfig(**RESNET)),
}

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] "
    "+ '</s>' }}END{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATE = CHAT.replace("BEGIN", "").replace("END", "")
MARKED_TEMPLATE = CHAT.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")


def make_model(folder, name="llama", dtype=torch.float32, **options):
    """Write a model with random weights, also where a fresh model's are 0 or 1."""
    auto, config = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = auto.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer))
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def in_own_memory(model):
    """A copy, not mapped from its file: kernels round by the addresses of their operands."""
    return copy.deepcopy(model).eval()


def make_tokenizer(folder, template=TEMPLATE, extra=0):
    """Write a tokenizer of bytes, with `extra` tokens that the models here have no row for."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *BYTES, *(f"<extra{n}>" for n in range(extra))]
    tokenizer = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(count=24):
    rows = []
    for number in range(count):
        question = {"role": "user", "content": f"say {number}"}
        answer = {"role": "assistant", "content": "ab" * (1 + number % 5)}
        rows.append({"messages": [question, answer]})
    return rows
