"""Export makes a model's folder of a run's checkpoint, in one process without a GPU, whoever wrote the checkpoint."""

from __future__ import annotations

from pathlib import Path

from surokit.models.adapter import save_adapter
from surokit.models.checkpoint import save
from surokit.train import checkpoint_files as checkpoints
from surokit.train.peers import ALONE
from surokit.train.resharding import divided_tensors, load_model
from surokit.train.setup import adapters_of, rebuild_model


def export(run: str | Path, folder: str | Path, base: str | None = None, shard_gib: float = 5.0) -> Path:
    """Write the model of a run's latest checkpoint, or of one checkpoint, as `surokit.save` does; return the folder.

    A model with an adapter is written as `surokit.save_adapter` does: the adapter alone, over `base`. Meanwhile the whole
    model is in the host's memory. shard_gib: size of a file at most.

    FileNotFoundError where there is no checkpoint, CheckpointError where it is damaged, ResumeError for a model that is no Decoder.
    """
    found = checkpoints.find(Path(run), verify=True)
    model = rebuild_model(found, "cpu")
    if found.sharded:
        load_model(found, model, divided_tensors(found.path), ALONE)
    else:
        checkpoints.load_model(found, model)
    if adapters_of(model):
        return save_adapter(model, folder, base)
    return save(model, folder, shard_gib)
