"""Compare a plan with a measurement, or with published runs."""
