"""What is measured all the time at next to no cost: a loop's sustained rates, windows of a profile, the device's state."""
