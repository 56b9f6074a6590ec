"""Regression with a gap in the training data: learned noise, and epistemic uncertainty that is largest in the gap."""

import credo
from credo.data import Batches, load_dataset
from credo.models import build_model

data = load_dataset("gap", n=200)  # inputs in [-2, 2], none in (-0.7, 0.7); noise of standard deviation 0.1
model = build_model("mlp", inputs=(1,), classes=1, hidden=[50, 50], activation="tanh", seed=0)
noise = credo.GaussianNoise(0.2, learn=True)  # starts at 0.2
posterior = credo.BBB(model, data_size=len(data.train), lr=2e-2, temperature=0.2, likelihood=noise)
credo.fit(posterior, Batches(data.train, batch_size=100), epochs=150, schedule="cosine")

prediction = credo.predict(posterior, Batches(data.test, batch_size=200, shuffle=False), draws=150)
metrics = credo.measure(prediction, intervals=False)
print(f"RMSE {metrics['rmse']:.3f}, NLL {metrics['nll']:.3f}, CRPS {metrics['crps']:.3f}")
for level, fraction in metrics["interval_coverage"].items():
    print(f"{float(level):.0%} interval covers {fraction:.0%} of the test targets")

x = data.test.x.squeeze(1)
gap = x.abs() < 0.7
inside, outside = prediction.epistemic[gap].mean().item(), prediction.epistemic[~gap].mean().item()
print(f"epistemic standard deviation in the gap {inside:.2f}, elsewhere {outside:.2f}")

try:
    from matplotlib.figure import Figure
except ImportError:
    print("no matplotlib, no picture")
else:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    mean, total = prediction.mean.squeeze(1), prediction.total.squeeze(1)
    axes.fill_between(x, mean - 2 * total, mean + 2 * total, alpha=0.3, label="mean ± 2 standard deviations")
    axes.plot(x, mean, label="mean")
    axes.plot(data.train.x, data.train.y, ".", markersize=3, label="training data")
    axes.legend(loc="upper left")
    figure.savefig("gap.png")
    print("picture: gap.png")
