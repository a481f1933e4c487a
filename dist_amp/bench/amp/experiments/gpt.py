"""A GPT of 124 M parameters on bytes of Python source, context 1024, micro-batches of 8: what people use AMP for.

50 steps of AdamW, clipped by norm, with weight decay and a warm-up of 10 steps.
"""

from dist_amp.bench.amp.experiment import Experiment, words_of

SETTINGS = {
    "task.target": "dist_amp.tasks.causal_lm:CausalLM",
    "task.args.context": 1024,
    "task.args.width": 768,
    "task.args.layers": 12,
    "task.args.heads": 12,
    "task.args.vocabulary": 50304,
    "train.steps": 50,
    "train.micro_batch_size": 8,
    "optim.lr": 6e-4,
    "optim.warmup_steps": 10,
    "optim.schedule": "constant",
}
FULL = Experiment("gpt", __doc__, words_of(SETTINGS))
SMALLER = {
    "task.args.context": 32,
    "task.args.width": 32,
    "task.args.layers": 2,
    "task.args.heads": 2,
    "task.args.vocabulary": 256,
    "train.micro_batch_size": 4,
    "train.steps": 30,
    "optim.lr": 4e-3,
}
REDUCED = FULL.reduced(SETTINGS | SMALLER)
