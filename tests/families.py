"""Small models of many families, each as a task that a user would write, without the network.

One family stands for each thing that could mislead `verify`. NOTES and FAILS have what it must say
of those that couple samples, draw random numbers or keep a state.
"""

import copy

import torch
import torch.nn.functional as F
from tiny import Rows
from torch import distributed as dist
from torch import nn

SAMPLES = 250  # five steps of 48
TOKENS = 64
LENGTH = 8


class Samples:
    """A task whose samples are columns of random numbers; each counts 1."""

    def build_dataset(self, split):
        if split != "train":
            return None
        return Rows(**self.columns(torch.Generator().manual_seed(0)))

    def weight(self, batch):
        return len(next(iter(batch.values())))


# ---- models of transformers with random weights ----


class OfTransformers(Samples):
    def __init__(self, family, head, **settings):
        self.family = family
        self.head = head
        self.settings = settings

    def build_model(self):
        import transformers

        config = getattr(transformers, f"{self.family}Config")(**self.settings)
        return getattr(transformers, f"{self.family}{self.head}")(config)

    def columns(self, generator):
        return {"input_ids": torch.randint(3, TOKENS, (SAMPLES, LENGTH), generator=generator)}

    def loss_sum(self, model, batch):
        return model(**batch).loss * self.weight(batch)

    def weight(self, batch):
        return (batch["labels"] != -100).sum()


class Language(OfTransformers):
    def loss_sum(self, model, batch):
        tokens = batch["input_ids"]
        logits = model(input_ids=tokens).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    def weight(self, batch):
        return batch["input_ids"][:, 1:].numel()


class Balanced(Language):
    """With the mixture's auxiliary loss, which depends on what shares a micro-batch."""

    def loss_sum(self, model, batch):
        output = model(**batch, labels=batch["input_ids"], output_router_logits=True)
        return output.loss * self.weight(batch)


class Translation(OfTransformers):
    """Padded inputs with a mask, and labels of different lengths."""

    def columns(self, generator):
        tokens = super().columns(generator)["input_ids"]
        lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        labels = tokens.flip(1).where(mask.bool(), -100)
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


# ---- plain torch ----


class Denoising(Samples):
    """The noise of a sample comes from `augment`, which is the same on every reading."""

    def build_model(self):
        down = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU()]
        return nn.Sequential(*down, nn.ConvTranspose2d(16, 1, 2, stride=2))

    def columns(self, generator):
        return {"image": torch.randn(SAMPLES, 1, 8, 8, generator=generator)}

    def augment(self, sample, rng):
        return {**sample, "noise": torch.randn(sample["image"].shape, generator=rng)}

    def loss_sum(self, model, batch):
        noise = self.noise(batch)
        return F.mse_loss(model(batch["image"] + noise).float(), noise, reduction="sum")

    def noise(self, batch):
        return batch["noise"]

    def weight(self, batch):
        return batch["image"].numel()


class RandomDenoising(Denoising):
    """Draws in its loss, as most code that one finds does."""

    def noise(self, batch):
        return torch.randn_like(batch["image"])


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Noisy(Denoising):
    """The model draws, in evaluation mode too."""

    def build_model(self):
        return nn.Sequential(Noise(), super().build_model())


class GraphNetwork(nn.Module):
    """Messages along edges; the graphs of a batch are one large graph."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.head = nn.Linear(32, 1)

    def forward(self, nodes, edges, graph_of_node, graphs):
        x = F.silu(self.first(nodes))
        messages = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        scores = self.head(torch.cat((x, messages), dim=1))
        return scores.new_zeros(graphs, 1).index_add(0, graph_of_node, scores)


class Graphs(Samples):
    """Graphs of different sizes: `collate` joins nodes and shifts edges."""

    def build_model(self):
        return GraphNetwork()

    def columns(self, generator):
        return {
            "nodes": torch.randn(SAMPLES, 5, 8, generator=generator),
            "edges": torch.randint(0, 3, (SAMPLES, 2, 6), generator=generator),
            "y": torch.randn(SAMPLES, generator=generator),
        }

    def collate(self, samples):
        sizes = [3 + int(sample["y"] > 0) for sample in samples]
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
        return {
            "nodes": torch.cat([s["nodes"][:n] for s, n in zip(samples, sizes, strict=True)]),
            "edges": torch.cat([s["edges"] + n for s, n in zip(samples, starts, strict=True)], 1),
            "graph_of_node": torch.arange(len(samples)).repeat_interleave(torch.tensor(sizes)),
            "y": torch.stack([sample["y"] for sample in samples]),
        }

    def loss_sum(self, model, batch):
        graphs = len(batch["y"])
        out = model(batch["nodes"], batch["edges"], batch["graph_of_node"], graphs)
        return F.mse_loss(out.squeeze(1).float(), batch["y"], reduction="sum")

    def weight(self, batch):
        return len(batch["y"])


class BootstrapLatent(nn.Module):
    """BYOL: a target network follows the trained one, by a step in each forward while training."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU())
        self.predictor = nn.Linear(16, 16)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, one, other):
        pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
        with torch.no_grad():
            for target, online in pairs if self.training else ():
                target.lerp_(online, 0.1)
        predicted = self.predictor(self.online(one))
        with torch.no_grad():
            target = self.target(other)
        return predicted, target


class Pairs(Samples):
    def columns(self, generator):
        return {name: torch.randn(SAMPLES, 16, generator=generator) for name in ("one", "other")}


class Byol(Pairs):
    def build_model(self):
        return BootstrapLatent()

    def loss_sum(self, model, batch):
        predicted, target = model(batch["one"], batch["other"])
        return (1 - F.cosine_similarity(predicted.float(), target.float())).sum()


class TwoTowers(nn.Module):
    """Unit vectors of images and texts."""

    def __init__(self):
        super().__init__()
        self.image = nn.Linear(16, 8)
        self.text = nn.Linear(16, 8)

    def forward(self, image, text):
        return F.normalize(self.image(image).float()), F.normalize(self.text(text).float())


class Gather(torch.autograd.Function):
    """x [B, D] of all ranks, with gradients: [ranks x B, D]; as docs/recipes.md has it."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Contrastive(Pairs):
    """Each image finds its text among those of all ranks."""

    couples_samples = True

    def build_model(self):
        return TwoTowers()

    def loss_sum(self, model, batch):
        image, text = model(batch["one"], batch["other"])
        labels = torch.arange(len(image), device=image.device)
        if dist.is_initialized():
            text = Gather.apply(text)
            labels += dist.get_rank() * len(image)
        return F.cross_entropy(image @ text.T / 0.1, labels, reduction="sum")


class Undeclared(Contrastive):
    couples_samples = False


LANGUAGE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LANGUAGE |= {"vocab_size": TOKENS, "num_hidden_layers": 2, "num_key_value_heads": 2}
LANGUAGE["max_position_embeddings"] = 16
EXPERTS = {**LANGUAGE, "num_local_experts": 4}
T5 = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MAMBA = {"vocab_size": TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
CAUSAL = "ForCausalLM"

TASKS = {
    "t5": lambda: Translation("T5", "ForConditionalGeneration", **T5, decoder_start_token_id=0),
    "mixtral": lambda: Language("Mixtral", CAUSAL, **EXPERTS),
    "mixtral_balanced": lambda: Balanced("Mixtral", CAUSAL, **EXPERTS),
    "mamba": lambda: Language("Mamba", CAUSAL, **MAMBA, time_step_rank=2),
    "albert": lambda: Language("Albert", "ForMaskedLM", **LANGUAGE, embedding_size=16),
    "denoising": Denoising,
    "denoising_random": RandomDenoising,
    "noisy": Noisy,
    "gnn": Graphs,
    "byol": Byol,
    "contrastive": Contrastive,
    "contrastive_undeclared": Undeclared,
}


# What `verify` notes besides dropout and parameters that no sample reaches, in order.
NOTES = {
    "t5": [
        "the result is drawn at random in training mode; every T5Attention is compared in "
        "evaluation mode"
    ],
    "byol": ["forward changes target.0.weight"],
    "contrastive": ["the task has couples_samples=True"],
}

# What it fails, with the cause and the remedy.
FAILS = {
    "mixtral_balanced": ["their gradients differ by", "verify with a coefficient of 0"],
    "contrastive_undeclared": ["a contrastive loss (docs/recipes.md shows one that verify can"],
    "denoising_random": ["the task's loss_sum: the result is drawn", "augment(sample, rng)"],
    "noisy": ["0 (Noise): the result is drawn", "in evaluation mode too", "augment(sample, rng)"],
}

ALSO_IN_FP16 = ("gnn", "contrastive")
