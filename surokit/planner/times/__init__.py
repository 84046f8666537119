"""Predict how long a step and a run take at given rates, and what they cost."""
