"""Layouts of four processes, by name."""

import surokit as sk

RANKS = 4
LAYOUTS = {
    "copies": sk.Parallel(shard=1),
    "shards": sk.Parallel(communicate="codes"),
    "zero-2": sk.Parallel(reshard=False),
    "both": sk.Parallel(shard=2, replicate=2, communicate="codes"),
}
