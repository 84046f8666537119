"""Profiles measure all of the process: what tests of other files left behind goes first.

Models that wait for Python's garbage collector still follow optimizers' steps (nn/delayed.py), and collecting them takes time of
whoever is measured just then.
"""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _nothing_left():
    gc.collect()
