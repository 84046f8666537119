"""Measure at next to no cost all the time: a loop's sustained rates, windows of a profile, the device's state."""
