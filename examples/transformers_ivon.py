"""A Hugging Face transformer with a posterior over all its weights: a plain loop with IVON, no download."""

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

import credo
import credo.optim

try:
    from transformers import BertConfig, BertForSequenceClassification
except ImportError:
    sys.exit("This example needs transformers: pip install transformers")

WORDS, LENGTH, STEPS = 40, 12, 300
PAD = 0  # the token that fills short sentences up


def sentences(count: int, *, seed: int) -> dict[str, Tensor]:
    """6 to 12 random words that include word 1 or word 2; the label is which of the two, wrong in 10 %."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=generator)
    kinds = torch.randint(2, (count, 1), generator=generator)
    positions = (torch.rand(count, 1, generator=generator) * lengths).long()
    wrong = torch.rand(count, generator=generator) < 0.1
    tokens = tokens.scatter(1, positions, kinds + 1).masked_fill(torch.arange(LENGTH) >= lengths, PAD)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": kinds.squeeze(1) ^ wrong}


torch.manual_seed(0)  # for the initial weights and the transformer's own dropout
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **sizes)
model = BertForSequenceClassification(config)
data = sentences(4000, seed=0)
optimizer = credo.optim.IVON(model, data_size=4000, lr=1.0, curvature=0.999, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=STEPS, cycle_momentum=False)
for step in range(STEPS):
    rows = torch.arange(64 * step, 64 * (step + 1)) % 4000
    batch = {name: tensor[rows] for name, tensor in data.items()}
    labels = batch.pop("labels")
    with optimizer.sampled_params(train=True):
        F.cross_entropy(model(**batch).logits, labels).backward()
    optimizer.step()
    scheduler.step()

prediction = credo.predict(optimizer.posterior, sentences(1000, seed=1), draws=16)  # batches as they come
metrics = credo.measure(prediction, intervals=False)
confidence = prediction.confidence.mean().item()
print(f"accuracy {metrics['accuracy']:.2f}, mean confidence {confidence:.2f}, ECE {metrics['ece']:.3f}")
