"""Names of 0.1 still work for one minor version, with a warning that tells the new one."""

import re
from pathlib import Path

import pytest

import credo
from credo.cli.moved import MOVED
from credo.continual import _RENAMED as OF_CONTINUAL
from credo.core.support.renamed import RenamedMethods
from credo.methods import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "upgrading.md"

RENAMED = {
    "Gaussian": credo.priors.Gaussian,
    "LayerL2": credo.priors.LayerL2,
    "ScaleMixture": credo.priors.ScaleMixture,
    "Team": credo.ProcessGroup,
}


@pytest.mark.parametrize("name", RENAMED)
def test_the_old_name_warns_and_is_the_same_thing(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"credo\.{name} is now credo\..*goes in 0\.3"):
        assert getattr(credo, name) is RENAMED[name]


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gausian'"):
        _ = credo.Gausian  # type: ignore[attr-defined]


def test_the_page_on_upgrading_has_every_old_name() -> None:
    text = PAGE.read_text(encoding="utf-8")
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}
    arguments = {
        old for name, cls in METHODS.items() if name != "hmc" for old in getattr(cls, "_renamed_arguments", ())
    }
    arguments -= {"prior_precision"}  # stays, as another form of `prior`
    assert len(arguments) > 30
    wanted = {
        *RENAMED,
        *OF_CONTINUAL,
        *RenamedMethods._renamed_methods,
        *MOVED,
        *arguments,
        "twin",
        "stacked",
        "batched",
    }
    assert sorted(wanted - words) == []
