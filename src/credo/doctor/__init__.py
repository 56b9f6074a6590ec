"""The doctor: measure a posterior and its predictions, and report what to change."""

from credo.doctor.diagnose import STAGES, diagnose
from credo.doctor.findings import Diagnosis, Finding

__all__ = ["STAGES", "Diagnosis", "Finding", "diagnose"]
