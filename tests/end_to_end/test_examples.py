"""Every example is run, and what it shows is checked."""

import contextlib
import importlib.util
import io
import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gan_checks import check_gan as check_gan
from gan_checks import flat
from pages import ROOT, run_command
from PIL import Image
from torch import nn
from torch.nn import functional as F

import credo

pytestmark = [pytest.mark.usefixtures("own_place"), pytest.mark.slow]
MODULES = {"dcgan.py", "espcn.py"}  # networks that examples import; tests/models has their tests
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in MODULES)
# Examples that go with another library, if it is there.
NEEDED = {"transformers_ivon.py": "transformers", "serve_fastapi.py": "fastapi", "optuna_search.py": "optuna"}
# Examples that train for minutes and can be told to only show that they run; applications may be longer.
QUICK = {"gan.py", "segmentation.py", "super_resolution.py"}


@pytest.fixture(autouse=True)
def siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script can import the modules beside it; `runpy` does not see to that."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = path.name in QUICK
    assert len(path.read_text(encoding="utf-8").splitlines()) < (190 if quick else 60)
    monkeypatch.setattr(sys, "argv", [str(path), *(["--quick"] if quick else [])])
    needed = NEEDED.get(path.name)
    if needed and importlib.util.find_spec(needed) is None:
        with pytest.raises(SystemExit, match=f"pip install .*{needed}"):
            runpy.run_path(str(path), run_name="__main__")
        pytest.skip(f"{needed} is not installed")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        names = runpy.run_path(str(path), run_name="__main__")
    globals()[f"check_{path.stem}"](names, out.getvalue())


def check_segmentation(names: dict[str, Any], out: str) -> None:
    assert names["metrics"]["accuracy"] > 0.88  # of the pixels, of which 0.8 are background
    assert names["metrics"]["mean_iou"] > 0.45
    times = re.search(r"(\d+) times larger at wrong pixels", out)
    assert times is not None
    assert int(times[1]) >= 2
    with Image.open("segmentation.png") as picture:
        assert picture.size == (640, 480)


def check_optuna_search(names: dict[str, Any], out: str) -> None:
    study = names["study"]
    assert len(study.trials) == names["TRIALS"]
    assert math.isfinite(study.best_value)
    assert study.best_value == min(trial.value for trial in study.trials if trial.state.name == "COMPLETE")
    assert names["metrics"]["nll"] < 1.2  # of unit variance: a constant has 1.42
    assert "best settings" in out


def check_own_loop(names: dict[str, Any], out: str) -> None:
    assert names["accuracy"] > 0.93
    assert names["entropy"][~names["right"]].mean() > 2 * names["entropy"][names["right"]].mean()


def check_fit_and_predict(names: dict[str, Any], out: str) -> None:
    assert names["metrics"]["accuracy"] > 0.94
    assert "predicts the same: True" in out


def check_serve_fastapi(names: dict[str, Any], out: str) -> None:
    assert "400 of 400 answers" in out
    answer = names["together"][0]
    assert 0 <= answer[0]["label"] <= 9
    assert 0 < answer[0]["confidence"] <= 1


def check_optimizer_loop(names: dict[str, Any], out: str) -> None:
    for metrics in names["results"].values():
        assert metrics["accuracy"] > 0.95
        assert metrics["nll"] < 0.25
        assert metrics["ood"]["photographs"]["entropy"]["auroc"] > 0.85


def check_transformers_ivon(names: dict[str, Any], out: str) -> None:
    assert names["metrics"]["accuracy"] > 0.85  # of the labels, a tenth is wrong
    assert names["metrics"]["ece"] < 0.05


def check_regression(names: dict[str, Any], out: str) -> None:
    assert names["inside"] > 1.2 * names["outside"]
    # 200 test targets, more than half of them where there was data.
    assert 0.8 < names["metrics"]["interval_coverage"]["0.9"] <= 1
    assert Path("gap.png").stat().st_size > 5000


def check_pretrained(names: dict[str, Any], out: str) -> None:
    plain, bayesian = names["results"]["deterministic"], names["results"]["Bayesian"]
    assert bayesian["accuracy"] > plain["accuracy"] - 0.02
    assert bayesian["nll"] < plain["nll"] + 0.01


def check_add_a_method(names: dict[str, Any], out: str) -> None:
    assert float(out.split()[-1]) > 0.9
    credo.save(names["posterior"], "sgld.safetensors")
    loaded = credo.load(
        "sgld.safetensors", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    x = names["digits"].test.x[:20]
    assert torch.equal(credo.predict(loaded, x).probs, credo.predict(names["posterior"], x).probs)
    check_sgld_steps(names["PathSGLD"])


def check_super_resolution(names: dict[str, Any], out: str) -> None:
    (result,) = names["results"].values()
    bicubic, bayesian = result["bicubic"], result["bayesian"]
    # After 392 small steps. One that does not learn stays below bicubic by the noise of its first weights.
    assert bayesian > bicubic + 0.05
    # What is smooth is left so: a network that saw sharp squares only loses 0.8 dB here, and more as it learns on.
    smooth = F.avg_pool2d(F.avg_pool2d(names["original"], 5, 1, 2, count_include_pad=False), 5, 1, 2)[..., 6:-6, 6:-6]
    small = names["reduced"](smooth, 3)
    mean = credo.predict(names["posterior"], small, draws=8).mean
    assert names["psnr"](mean, smooth) > names["psnr"](names["enlarged"](small, 3), smooth) - 0.2
    original, mean = names["original"], names["prediction"].mean
    assert bayesian == pytest.approx(10 * math.log10(1 / float(((mean.clamp(0, 1) - original) ** 2).mean())), rel=1e-5)
    assert float(names["prediction"].epistemic.min()) > 0
    assert "better on 1 of 1" in out
    assert out.endswith("picture: super_resolution.png, of grace_hopper.jpg\n")
    assert Path("super_resolution.png").stat().st_size > 5000
    check_deep_images(names["photographs"])
    check_squares_are_bounded(names["shared_out"], names["evenly"])
    check_large_folder(names["photographs"])


def check_squares_are_bounded(shared_out: Any, evenly: Any) -> None:
    for count, most in ((0, 3), (1, 3), (3, 3), (4, 3), (1400, 1333)):
        taken = evenly(count, most)
        assert len(taken) == len(set(taken)) == min(count, most)
        assert all(0 <= index < count for index in taken)
    assert evenly(10, 4) == [0, 2, 5, 7]
    # Images of 1, 4 and 9 squares, each of a brightness of its own.
    images = [torch.full((1, 1, 51 + 21 * more, 51 + 21 * more), float(more)) for more in range(3)]
    for most, expected in {14: [1, 4, 4], 9: [1, 3, 3], 3: [1, 1, 1], 2: [1, 1, 0], 1: [1, 0, 0]}.items():
        squares = shared_out(images, most)
        assert squares.shape[1:] == (1, 51, 51)
        assert [int((squares[:, 0, 0, 0] == bright).sum()) for bright in range(3)] == expected
    assert len(shared_out([torch.zeros(1, 1, 51, 51)] * 1400, 1333)) == 1333


def check_large_folder(photographs: Any) -> None:
    for number in range(500):
        save_noise(Path("many", f"{number:03}.png"), 51, 51)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        found = photographs(Path("many"), 2)
    assert len(found) == 400
    assert list(found)[:5] == ["000.png", "001.png", "002.png", "003.png", "005.png"]
    assert list(found)[-1] == "498.png"
    assert "many has 500 images: 400 of them are taken, evenly spaced" in out.getvalue()


def check_deep_images(photographs: Any) -> None:
    """The same picture in 16 bits, in 32 and in floats; those whose white is not known are left out and named."""
    ramp = np.arange(51 * 51).reshape(51, 51) * 25
    Path("deep").mkdir()
    for name, pixels in {
        "bits16.png": ramp.astype(np.uint16),
        "bits32.tif": ramp.astype(np.int32),
        "floats.tif": (ramp / 65535).astype(np.float32),
        "floats_to_255.tif": (ramp / 255).astype(np.float32),
        "negative.tif": (ramp - 1).astype(np.int32),
        "too_large.tif": (2 * ramp).astype(np.int32),
        "unknown.tif": np.full((51, 51), math.nan, dtype=np.float32),
    }.items():
        Image.fromarray(pixels).save(Path("deep", name))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        found = photographs(Path("deep"), 1)
    assert list(found) == ["bits16.png", "bits32.tif", "floats.tif"]
    for image in found.values():
        torch.testing.assert_close(image[0, 0], torch.from_numpy(ramp / 65535).float())
    assert (
        "negative.tif is left out: its pixels go from -1 to 64999, in mode I 0 to 65535 can be used" in out.getvalue()
    )
    assert "floats_to_255.tif is left out: its pixels go from 0 to 254.9" in out.getvalue()


def super_resolution(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The script with a training of one epoch, for tests that do not need what is learned."""
    script, asked = str(ROOT / "examples" / "super_resolution.py"), []

    def fit(posterior: credo.Posterior, loader: Any, *, epochs: int, **options: Any) -> credo.Posterior:
        asked.append(epochs)
        return credo.training.fit(posterior, loader, epochs=1, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments, "--quick"])
        patch.setattr(credo, "fit", fit)
        names = runpy.run_path(script, run_name="__main__")
    assert asked[0] * len(names["batches"]) >= 264
    return names


def save_noise(path: Path, width: int, height: int) -> None:
    """An image that no network can enlarge; the suffix says in which format."""
    path.parent.mkdir(exist_ok=True)
    pixels = torch.randint(256, (height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)


def test_super_resolution_takes_what_it_can_of_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.JPG", "c.png", "d.gif", "e.tif", "f.bmp"):
        save_noise(Path("images", name), 51, 53)
    save_noise(Path("images/a.png"), 700, 60)
    save_noise(Path("images/icon.png"), 300, 50)
    for name in (".DS_Store", "._c.png", "notes.txt"):
        Path("images", name).write_bytes(b"not an image")
    names = super_resolution(monkeypatch, "images", "--seed", "3", "--json", "records/numbers.json")
    out = capsys.readouterr().out
    assert re.findall(r"^(\S+) is left out", out, flags=re.MULTILINE) == ["._c.png", "icon.png"]
    assert "300x50 pixels, less than 51x51" in out
    assert list(names["results"]) == ["a.png", "f.bmp"], "the first and the sixth of six"
    assert len(names["known"]) == 4
    with Image.open("images/a.png") as image:
        middle = torch.tensor(list(image.crop((30, 0, 669, 60)).tobytes())).reshape(1, 1, 60, 639) / 255
    torch.testing.assert_close(names["unseen"]["a.png"], middle)
    means = [sum(result[key] for result in names["results"].values()) / 2 for key in ("bicubic", "bayesian")]
    shown = re.search(r"mean PSNR bicubic (\S+) dB, Bayesian ESPCN (\S+) dB", out)
    assert shown is not None
    assert [float(number) for number in shown.groups()] == pytest.approx(means, abs=0.006)
    assert out.endswith("picture: super_resolution.png, of f.bmp, the last of 2\n")
    assert torch.equal(names["pictures"]["original"], names["unseen"]["f.bmp"])
    check_stored_psnrs(json.loads(Path("records/numbers.json").read_text(encoding="utf-8")), names, means)


def check_stored_psnrs(stored: dict[str, Any], names: dict[str, Any], means: list[float]) -> None:
    assert {key: stored[key] for key in ("folder", "test", "seed", "quick")} == {
        "folder": "images",
        "test": None,
        "seed": 3,
        "quick": True,
    }
    assert stored["images"] == names["results"]
    assert list(stored["images"]["a.png"]) == ["bicubic", "bayesian", "error", "doubtful_error"]
    assert [stored["mean"]["bicubic"], stored["mean"]["bayesian"]] == means
    assert stored["learned_from"] == 4
    assert stored["squares"] == len(names["large"]) == 3 * 4
    assert stored["steps"] == names["posterior"].steps == len(names["batches"])
    assert stored["versions"]["credo"] == credo.__version__
    assert set(stored["versions"]) == {"credo", "torch", "python", "pillow"}


def test_super_resolution_is_tried_on_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    save_noise(Path("one/known.png"), 51, 51)
    save_noise(Path("other/unseen.png"), 54, 51)
    names = super_resolution(monkeypatch, "one", "--test", "other")
    assert list(names["results"]) == ["unseen.png"]
    assert [list(image.shape) for image in names["known"]] == [[1, 1, 51, 51]]


def test_super_resolution_explains_unusable_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_noise(Path("images/one.png"), 60, 60)
    save_noise(Path("images/small.png"), 50, 60)
    Path("images/.DS_Store").write_bytes(b"not an image")
    Path("empty").mkdir()
    for arguments, words in {
        ("images",): "images has 1 images that can be used, at least 2 are needed: add some",
        ("empty",): "empty has 0 images that can be used, at least 2",
        ("--test", "empty"): "empty has 0 images that can be used, at least 1",
        ("images/one.png",): "one.png is not a folder: give one",
    }.items():
        with pytest.raises(SystemExit) as ended:
            super_resolution(monkeypatch, *arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_gan_stores_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / "examples" / "gan.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--seed", "3", "--json", "records/gan.json"])
    names = runpy.run_path(script, run_name="__main__")
    stored = json.loads(Path("records/gan.json").read_text(encoding="utf-8"))
    assert (stored["data"], stored["seed"], stored["quick"], stored["steps"]) == ("digits", 3, True, 4)
    assert stored["scores"] == names["results"]
    assert (stored["images"], stored["features"], stored["judge_accuracy"]) == (179, 17, names["accuracy"])
    assert all(set(result) == {"inception", "distance"} for result in stored["scores"].values())
    assert stored["versions"]["credo"] == credo.__version__
    fresh = names["make_discriminators"](len(names["data"]), 3)
    for name, discriminator in names["discriminators"].items():
        moved = (flat(discriminator.model) - flat(fresh[name].model)).abs()
        assert moved.max() < 4 * 5e-4 * 2, "four steps of Adam from the weights of seed 3"
    moved = (flat(names["generator"]) - flat(names["dcgan_generator"](100, width=4, size=32, seed=3))).abs()
    assert moved.max() < 4 * 5e-4 * 2
    assert torch.equal(names["images"], names["samples"](names["generator"], len(names["images"]), 3))


def check_sgld_steps(sgld: Any) -> None:
    """Against the rule by hand, with the same random numbers."""
    torch.manual_seed(0)
    posterior = sgld(nn.Linear(3, 2, bias=False), data_size=10, lr=0.3, temperature=0.4, every=2, keep=2)
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    numbers, visited = torch.Generator().manual_seed(0), []
    for _ in range(6):
        before = posterior.model.weight.detach().clone().requires_grad_()
        objective = F.cross_entropy(x @ before.T, y) + 0.4 * before.square().sum() / (2 * 10)
        (gradient,) = torch.autograd.grad(objective, before)
        noise = torch.randn(2, 3, generator=numbers) * math.sqrt(2 * 0.3 * 0.4 / 10)
        posterior.step(lambda net: F.cross_entropy(net(x), y))
        torch.testing.assert_close(posterior.model.weight.detach(), before.detach() - 0.3 * gradient + noise)
        visited.append(posterior.model.weight.detach().flatten().clone())
    assert {tuple(row.tolist()) for row in posterior.visited} == {tuple(visited[i].tolist()) for i in (3, 5)}


def test_example_experiment() -> None:
    run_command(f"credo train {ROOT / 'examples' / 'experiment.toml'} --run run", "examples/experiment.toml")
    run_command("credo evaluate run --draws 8", "examples/experiment.toml")
    assert Path("run/evaluation.json").exists()
