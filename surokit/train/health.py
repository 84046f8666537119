"""`surokit.runs.health` under the name that it had before."""

from surokit.runs.health import Event, Health, Kind

__all__ = ["Event", "Health", "Kind"]
