"""Models that processes of their own make, and what they do with them."""

import threading

import surokit as sk
from surokit.dissection.measure import measure

CONFIG = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48, max_length=64)


def decoder():
    return sk.Decoder(CONFIG)  # in float32, where libraries differ by little


def fails():
    raise RuntimeError("no such weights")


def hangs():
    threading.Event().wait()


def all_measured(jobs):
    """The fields of a cell for each job, one after the other in the same processes."""
    return [measure(job) for job in jobs]
