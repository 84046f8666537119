"""This module gives `surokit.runs.health` the name that it had before."""

from surokit.runs.health import Event, Health, Kind

__all__ = ["Event", "Health", "Kind"]
