"""Serve a posterior: a FastAPI endpoint that eight clients call at once, with answers that never depend on the others.

FastAPI runs plain `def` endpoints in a pool of threads. `credo.predictor` draws its networks once and answers from any
number of threads. To run this as a service: `uvicorn serve_fastapi:app` in this folder.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import credo
from credo.data import Batches, load_dataset

try:
    from fastapi import FastAPI, HTTPException
except ImportError:
    raise SystemExit("This example needs FastAPI: pip install fastapi httpx2 uvicorn") from None

digits = load_dataset("digits")
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
posterior = credo.BBB(net, data_size=len(digits.train), lr=1e-2, temperature=0.1)
credo.fit(posterior, Batches(digits.train, batch_size=128), epochs=4)
predictor = credo.predictor(posterior, draws=32, seed=0)

app = FastAPI()


@app.post("/predict")
def predict(images: list[list[float]]) -> list[dict[str, int | float]]:
    """Label, confidence and epistemic uncertainty of each image, 64 grey values in 0 … 1."""
    if not images or any(len(image) != 64 or not 0 <= min(image) <= max(image) <= 1 for image in images):
        raise HTTPException(422, "Send a list of images, 64 values in 0 … 1 each.")
    try:
        found = predictor(torch.tensor(images).view(-1, 1, 8, 8))
    except credo.NonFiniteError as error:
        raise HTTPException(422, str(error)) from error
    rows = zip(found.labels.tolist(), found.confidence.tolist(), found.epistemic.tolist(), strict=True)
    return [{"label": label, "confidence": confidence, "epistemic": epistemic} for label, confidence, epistemic in rows]


if __name__ == "__main__":
    from fastapi.testclient import TestClient

    images = [digits.test.x[row : row + 1].flatten(1).tolist() for row in range(40)]
    with TestClient(app) as client:

        def ask(index: int) -> object:
            """What one client gets."""
            return client.post("/predict", json=images[index % 40]).json()

        alone = [ask(index) for index in range(40)]
        with ThreadPoolExecutor(8) as clients:  # eight clients, fifty questions each
            together = list(clients.map(ask, range(400)))
    equal = sum(answer == alone[index % 40] for index, answer in enumerate(together))
    print(f"{equal} of {len(together)} answers under load are those of a single client")
    print("first answer:", together[0])
