"""The task: docstrings of four groups of modules, and the last block of a pretrained encoder with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from benchmarks.fine_tuning import GROUPS, LENGTH, PAD, _tokens, _weights

Rows = tuple[Tensor, Tensor]
ADAPTERS = {"rank": 8, "alpha": 16.0, "target": ["*query", "*value"], "train": "classifier.*"}


class LastBlock(nn.Module):
    """The last block of a BERT with its classifier, which reads the first position alone: only that is computed.

    Inputs are the states [batch, length, width + 1] that `lower` makes, 1 in the last channel where there is a word.
    """

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.block, self.pooler = bert.bert.encoder.layer[-1], bert.bert.pooler
        self.dropout, self.classifier = bert.dropout, bert.classifier

    def forward(self, states: Tensor) -> Tensor:
        """Logits of texts."""
        hidden, words = states[..., :-1], states[..., -1]
        attention, first = self.block.attention.self, hidden[:, :1]
        heads = (
            part.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
            for part in (attention.query(first), attention.key(hidden), attention.value(hidden))
        )
        rate = attention.dropout.p if self.training else 0.0
        found = F.scaled_dot_product_attention(*heads, attn_mask=words[:, None, None] > 0, dropout_p=rate)
        first = self.block.attention.output(found.transpose(1, 2).flatten(2), first)
        first = self.block.output(self.block.intermediate(first), first)
        logits: Tensor = self.classifier(self.dropout(self.pooler(first)))
        return logits


def encoder(seed: int) -> Any:
    """The pretrained encoder with a new classifier."""
    from transformers import AutoModelForSequenceClassification, logging, set_seed

    set_seed(seed)
    logging.set_verbosity_error()
    return AutoModelForSequenceClassification.from_pretrained(_weights(), num_labels=len(GROUPS))


def network(seed: int) -> nn.Module:
    """Its last block with adapters."""
    return credo.lora(LastBlock(encoder(seed)), **ADAPTERS, seed=seed)  # type: ignore[arg-type]


@torch.no_grad()
def lower(tokens: Tensor) -> Tensor:
    """What the frozen blocks make of texts, and which positions are words."""
    bert = encoder(0).bert.eval()
    parts = []
    for rows in tokens.split(64):
        mask = (rows != PAD).long()
        states = bert(input_ids=rows, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
        parts.append(torch.cat([states, mask[..., None].to(states)], -1))
    return torch.cat(parts)


def texts() -> list[Rows]:
    """Rows of training, validation, calibration and test."""
    parts = _tokens()
    found = [(lower(tokens), labels) for tokens, labels in parts]
    whole, tokens = encoder(0).eval(), parts[0][0][:8]
    with torch.no_grad():
        expected = whole(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits
        torch.testing.assert_close(LastBlock(whole).eval()(found[0][0][:8]), expected, rtol=1e-4, atol=1e-5)
    return found


def ood_texts() -> Tensor:
    """Paragraphs of descriptions of data sets."""
    import sklearn.datasets
    from transformers import AutoTokenizer

    files = sorted(Path(sklearn.datasets.__file__).parent.joinpath("descr").glob("*.rst"))
    paragraphs = [" ".join(part.split()) for file in files for part in file.read_text("utf-8").split("\n\n")]
    chosen = [text for text in paragraphs if len(text) > 100 and text[0].isalpha()]
    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    return lower(AutoTokenizer.from_pretrained(_weights())(chosen, **options)["input_ids"])
