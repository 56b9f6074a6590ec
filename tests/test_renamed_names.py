"""Names of 0.1 still work for one minor version, with a warning that tells the new one."""

import pytest

import credo

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
