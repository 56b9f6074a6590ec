"""Make a trained deterministic network Bayesian: keep its weights as means, learn their standard deviations."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.data import Batches, load_dataset

torch.manual_seed(0)
digits = load_dataset("digits")
loader = Batches(digits.train, batch_size=64, seed=0)
test = Batches(digits.test, batch_size=512, shuffle=False)
photographs = load_dataset("photo-patches", n=500).test.x

# A network trained in the ordinary way until it is overconfident.
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(25):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

# `MAP` wraps the network unchanged; a copy, to compare both afterwards.
baseline = credo.MAP(copy.deepcopy(model), data_size=len(digits.train))
prior = credo.priors.Gaussian(mean={name: p.detach().clone() for name, p in model.named_parameters()}, std=0.1)
posterior = credo.BBB.from_pretrained(
    model, relative_std=0.1, data_size=len(digits.train), prior=prior, lr=1e-3, temperature=0.1, noise="lrt"
)
credo.fit(posterior, loader, epochs=6)

results = {}
for name, one in {"deterministic": baseline, "Bayesian": posterior}.items():
    outside = {"photo-patches": credo.predict(one, photographs, draws=50)}
    results[name] = credo.measure(credo.predict(one, test, draws=50), outside=outside, intervals=False)
    numbers = "  ".join(f"{key} {results[name][key]:.3f}" for key in ("accuracy", "nll", "ece"))
    print(f"{name:13}  {numbers}  OOD AUROC {results[name]['ood']['photo-patches']['entropy']['auroc']:.3f}")
