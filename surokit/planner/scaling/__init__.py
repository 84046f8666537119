"""This package holds published scaling laws, and fits a law to runs of your own."""

from surokit.planner.scaling.fit import ScalingFit, fit_scaling
from surokit.planner.scaling.laws import CHINCHILLA, CHINCHILLA_REPLICATED, KAPLAN, ScalingLaw

__all__ = ["CHINCHILLA", "CHINCHILLA_REPLICATED", "KAPLAN", "ScalingFit", "ScalingLaw", "fit_scaling"]
