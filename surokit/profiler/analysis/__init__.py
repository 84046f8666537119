"""Compute tables from a Recording: who asked for each piece of work, what it was for, and what time was lost to which cause."""
