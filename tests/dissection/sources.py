"""Models that processes of their own make."""

import threading


def fails():
    raise RuntimeError("no such weights")


def hangs():
    threading.Event().wait()
