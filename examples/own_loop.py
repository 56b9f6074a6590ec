"""Your own network, your own DataLoader, your own loop: a recurrent network reads digits row by row."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.data import load_dataset


class RowReader(nn.Module):
    """An ordinary torch module."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(8, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 10] of images [batch, 1, 8, 8]."""
        states, _ = self.rows(images.squeeze(1))
        return self.head(states[:, -1])


torch.manual_seed(0)  # for the initial weights and the loader's order; Credo does not use the global generator
digits = load_dataset("digits")
loader = DataLoader(TensorDataset(digits.train.x, digits.train.y), batch_size=64, shuffle=True)
model = RowReader()
posterior = credo.BBB(
    model, data_size=len(digits.train), lr=1e-2, prior=0.3, temperature=0.1, optimizer={"clip_norm": 5.0}
)

for epoch in range(12):
    posterior.train()
    for x, y in loader:
        terms = posterior.step(lambda net, x=x, y=y: F.cross_entropy(net(x), y))
    if epoch % 4 == 3:
        print(f"epoch {epoch + 1}: nll {terms.nll:.3f}, penalty {terms.penalty:.3f}, kl {terms.kl:.0f} nats")

posterior.eval()
with torch.no_grad():
    logits = posterior(digits.test.x)  # one draw for the whole batch
single = (logits.argmax(-1) == digits.test.y).double().mean().item()

prediction = credo.predict(posterior, digits.test.x, draws=50)
right = prediction.labels == digits.test.y
accuracy = right.double().mean().item()
print(f"accuracy of one draw {single:.3f}, of 50 averaged draws {accuracy:.3f}")
entropy = prediction.total
print(f"mean entropy of right predictions {entropy[right].mean():.2f}, of wrong ones {entropy[~right].mean():.2f}")
