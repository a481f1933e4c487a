"""A network of 1 x 1 convolutions that draws a quantised two-dimensional sinusoid of 512 x 512, all of it in each step.

Hidden width 256, 2 hidden layers, 134,145 parameters; frequencies 4 and 2, 4 levels; 512 steps of Adam at 1e-3. Its
activations are 268 MB each in float32, so that the traffic to memory weighs as much as the arithmetic.
"""

from dist_amp.bench.amp.experiment import ADAM, INFERENCE, TRAIN, Experiment, Published, Target, words_of

SETTINGS = {
    "task.target": "dist_amp.tasks.sinusoid:Sinusoid",
    "task.args.size": 512,
    "task.args.crop": 512,
    "task.args.crops": 1,
    "train.steps": 512,
    "train.micro_batch_size": 1,
    **ADAM,
}
FULL = Experiment(
    "sinusoid",
    __doc__,
    words_of(SETTINGS),
    # On an AMD GPU. More memory for inference than for training: it had the autograd graph alive.
    published=(
        Published(TRAIN, "fp32", 13.98, 2061, 0.01),
        Published(TRAIN, "fp16", 7.50, 1035, 0.0083),
        Published(INFERENCE, "fp32", 4.24, 3338),
        Published(INFERENCE, "fp16", 2.87, 1676),
    ),
    targets=(Target(TRAIN, "fp16", 1.87, 0.49), Target(INFERENCE, "fp16", 1.48)),
    draws=True,
)
SMALLER = {
    "task.args.size": 32,
    "task.args.crop": 32,
    "task.args.width": 64,
    "train.steps": 200,
    "task.args.frequencies": (1, 0.5),
    "optim.lr": 4e-3,
}
REDUCED = FULL.reduced(SETTINGS | SMALLER)
