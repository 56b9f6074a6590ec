"""Natural-gradient posteriors in ordinary torch loops: IVON with a block around the pass, VOGN with a closure."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import credo
import credo.optim
from credo.data import load_dataset

EPOCHS = 12
torch.manual_seed(0)  # for the initial weights and the loader's order; Credo does not use the global generator
digits = load_dataset("digits")
size = len(digits.train)
loader = DataLoader(TensorDataset(digits.train.x, digits.train.y), batch_size=64, shuffle=True)


def network() -> nn.Module:
    """An ordinary torch network."""
    layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


model = network()
ivon = credo.optim.IVON(model, data_size=size, lr=0.5, curvature={"init": 0.1, "decay": 0.999}, clip=None)
scheduler = CosineAnnealingLR(ivon, EPOCHS * len(loader))
for _ in range(EPOCHS):
    for x, y in loader:
        with ivon.sampled_params(train=True):  # inside, the model has one draw of weights
            ivon.zero_grad()
            F.cross_entropy(model(x), y).backward()
        ivon.step()
        scheduler.step()

other = network()
vogn = credo.optim.VOGN(other, data_size=size, lr=0.01, curvature={"init": 0.1}, damping=0.01, temperature=0.1)
scheduler = CosineAnnealingLR(vogn, EPOCHS * len(loader))
for epoch in range(EPOCHS):
    for x, y in loader:
        vogn.step(lambda x=x, y=y: F.cross_entropy(other(x), y))  # the optimiser calls backward
        scheduler.step()
    if epoch % 4 == 3:
        print(f"VOGN, epoch {epoch + 1}: nll {vogn.terms.nll:.3f}, kl {vogn.terms.kl:.0f} nats")

results = {}
photographs = load_dataset("photo-patches", n=500).test.x
for name, optimizer in {"IVON": ivon, "VOGN": vogn}.items():
    outside = {"photographs": credo.predict(optimizer.posterior, photographs, draws=32)}
    prediction = credo.predict(optimizer.posterior, [(digits.test.x, digits.test.y)], draws=32)
    metrics = results[name] = credo.measure(prediction, outside=outside, intervals=False)
    print(f"{name}: accuracy {metrics['accuracy']:.3f}, NLL {metrics['nll']:.3f}, ECE {metrics['ece']:.3f}")
    print(f"  AUROC of entropy for detecting photographs {metrics['ood']['photographs']['entropy']['auroc']:.3f}")
    least = prediction.confidence.argmin()
    print(f"  least certain image {least}: predicted {prediction.labels[least]}, true {digits.test.y[least]}")
