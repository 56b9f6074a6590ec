"""Search settings with Optuna: `credo.train` yields a record after each epoch, by which bad trials are stopped.

Trials are compared by the NLL of validation rows; the test rows are looked at once, with the best settings.
"""

from collections.abc import Iterator

import torch
from torch import nn

import credo
from credo.data import Batches, Split, load_dataset, split_validation
from credo.training import EpochRecord

try:
    import optuna
except ImportError:
    raise SystemExit("This example needs Optuna: pip install optuna") from None

TRIALS, EPOCHS = 6, 15
data = load_dataset("gap")
train, validation = split_validation(data.train, size=0.2, seed=0)


def training(rows: Split, lr: float, prior: float) -> tuple[credo.Posterior, Iterator[EpochRecord]]:
    """A posterior, and its epochs, which train it one by one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(train.x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    posterior = credo.BBB(net, data_size=len(rows), lr=lr, prior=prior, likelihood="gaussian")
    return posterior, credo.train(posterior, Batches(rows, batch_size=32), epochs=EPOCHS)


def objective(trial: optuna.Trial) -> float:
    """NLL of the validation rows."""
    lr = trial.suggest_float("lr", 1e-3, 3e-2, log=True)
    posterior, epochs = training(train, lr, trial.suggest_float("prior", 0.05, 1.0, log=True))
    nll = float("inf")
    for epoch, _ in enumerate(epochs):
        found = credo.predict(posterior.eval(), [(validation.x, validation.y)], draws=8)
        posterior.train()
        nll = float(credo.measure(found, intervals=False)["nll"])
        trial.report(nll, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return nll


optuna.logging.set_verbosity(optuna.logging.WARNING)
pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=5)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
study.optimize(objective, n_trials=TRIALS)
print("best settings:", {name: round(value, 4) for name, value in study.best_params.items()})
best, epochs = training(data.train, **study.best_params)  # on all training rows
for _ in epochs:
    pass
metrics = credo.measure(credo.predict(best.eval(), [(data.test.x, data.test.y)], draws=32), intervals=False)
print(f"validation NLL {study.best_value:.3f}, test NLL {metrics['nll']:.3f}")
