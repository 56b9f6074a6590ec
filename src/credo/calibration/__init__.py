"""Choose the scale of a posterior's noise, the temperature of its outputs and a map after them on held-out rows."""

from credo.calibration.choose import calibrate, calibrated_losses
from credo.calibration.recalibrate import recalibrate, recalibrate_probs, recalibrate_values

__all__ = ["calibrate", "calibrated_losses", "recalibrate", "recalibrate_probs", "recalibrate_values"]
