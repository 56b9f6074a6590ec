"""Choose the scale of a posterior's noise and the temperature of its outputs on held-out rows."""

from credo.calibration.choose import calibrate

__all__ = ["calibrate"]
