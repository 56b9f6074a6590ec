"""What CONTRIBUTING.md tells somebody who adds a method."""

import re
from pathlib import Path

from torch import nn

import credo

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_every_method_is_a_name_of_the_package() -> None:
    names = {cls.__name__ for cls in credo.METHODS.values()}
    assert names <= set(credo.__all__)
    assert all(getattr(credo, cls.__name__) is cls for cls in credo.METHODS.values())


def test_the_reserved_names_are_those_of_the_base_class() -> None:
    class Plain(credo.Posterior):
        draw = step = config = None  # type: ignore[assignment]

    posterior = Plain(nn.Linear(2, 2), data_size=3)
    own = {*dir(credo.Posterior), *vars(posterior), *posterior._buffers, *posterior._modules} - set(dir(nn.Module()))
    paragraph = re.search(r"\*Reserved names\.\*(.*?)\n\n", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert paragraph is not None
    assert {name for name in own if not name.startswith("_")} == set(re.findall(r"`(\w+)`", paragraph[1]))
