"""Say what one process needs to measure a cell, and build the model of it as its setting says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from surokit import convert
from surokit.applied import recipe_of
from surokit.dissection.settings import Setting, What
from surokit.environment import cores, cpu_model
from surokit.hardware.gpus import Gpu
from surokit.models import load
from surokit.models.config import DecoderConfig
from surokit.models.decoder import Decoder
from surokit.models.fuse import fuse
from surokit.offload import offload_weights
from surokit.racing.comparability import digest_of

Source = nn.Module | DecoderConfig | str | Path | Callable[[], nn.Module]


@dataclass(frozen=True)
class Tokens:
    """A Tokens holds what all cells read, one after the other: token ids and labels as int64 [n], on the CPU.

    ids: None draws random ones of the model's vocabulary, by `seed`.
    """

    ids: Tensor | None = None
    labels: Tensor | None = None
    seed: int = 0

    def batches(self, count: int, batch: int, length: int, vocabulary: int) -> list[dict[str, Tensor]]:
        """Return so many batches {"input_ids", "labels"} of int64 [batch, length], from the beginning again where they end."""
        if self.ids is None:
            drawn = torch.Generator().manual_seed(self.seed)
            ids = torch.randint(0, vocabulary, (count * batch * length,), generator=drawn)
            labels = ids
        else:
            places = torch.arange(count * batch * length) % len(self.ids)
            ids = self.ids[places]
            labels = ids if self.labels is None else self.labels[places]
        shape = (count, batch, length)
        return [{"input_ids": i, "labels": t} for i, t in zip(ids.view(shape), labels.view(shape))]


@dataclass(frozen=True)
class Job:
    """A Job is all that a process needs to measure a cell.

    steps: that are timed. gib: the limit that the cell shall fit into. gpu: the rates of this machine, for the planned time.
    only_timed: leaves out what a first round has found, memory, plan and profile.
    """

    setting: Setting
    source: Source
    tokens: Tokens
    steps: int
    seed: int
    lr: float
    gib: float | None
    device: str | None
    gpu: Gpu | None = None
    keep: str | None = None  # a file for the profile
    what: What = "train"
    only_timed: bool = False


def started(job: Job, device: torch.device) -> tuple[nn.Module, str]:
    """Build the model of a job and change it as the setting says; return it with a digest of the weights before that.

    All cells of a seed start from the same weights. TypeError for what is no decoder.
    """
    set_attention(job.setting)
    torch.manual_seed(job.seed)
    model = build(job.source)
    weights = digest_of(model.parameters())
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise TypeError(
            f"dissect(model): a {type(model).__name__} has no embedding of tokens, so it is no decoder: give a surokit.Decoder, or "
            "a causal language model of transformers."
        )
    change(model, job.setting, device)
    return model, weights


def change(model: nn.Module, setting: Setting, device: torch.device) -> None:
    """Change a model on the CPU as the setting says, where the session does not, and move it to the device.

    What is stored in fewer bits, or stays on the host, is so before anything moves: the device need not hold the whole.
    """
    if setting.attention in ("eager", "sdpa"):
        chosen = getattr(model, "set_attn_implementation", None)
        if chosen is None:
            raise ValueError(
                f"attention={setting.attention} chooses an implementation of transformers' models, and this is a "
                f"{type(model).__name__}: use 'math', 'flash', 'efficient' or 'cudnn'."
            )
        chosen(setting.attention)
    recipe, fused = setting.full_recipe, setting.full_fusion
    if recipe.storage is not None:
        convert.apply(model, replace(recipe, adapter=None))
    if setting.offload_weights:
        offload_weights(model, device)
    else:
        model.to(device)
    if fused != fused.OFF or device.type == "cuda":  # where a Decoder fuses by itself
        fuse(model, fused)
    if recipe != recipe_of(model) or recipe.storage is not None:  # where the weights are says which products there are
        convert.apply(model, recipe)


def build(source: Source) -> nn.Module:
    """Return the model of a configuration (bfloat16, random weights), a folder, or a function, or the module itself."""
    if isinstance(source, DecoderConfig):
        return Decoder(source, dtype=torch.bfloat16)
    if isinstance(source, str | Path):
        if Path(source).is_file():
            return Decoder(DecoderConfig.from_hf(json.loads(Path(source).read_text())), dtype=torch.bfloat16)
        return load(source, dtype=torch.bfloat16, device="cpu")
    made = source if isinstance(source, nn.Module) else source() if callable(source) else None
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"dissect(model): {source!r} makes a {type(made).__name__}, and not a torch.nn.Module: give a function that makes "
            "a model."
        )
    return made


def machine_of(device: torch.device) -> str:
    """Name a device as tables do: a GPU by its name, a processor by its model and cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu: {cpu_model()}, {cores()} cores"


def set_attention(setting: Setting) -> None:
    """Switch torch's attention kernels in this process."""
    named = setting.attention
    if named in ("auto", "eager", "sdpa"):
        return
    cuda = torch.backends.cuda
    for name, enable in (
        ("flash", cuda.enable_flash_sdp),
        ("efficient", cuda.enable_mem_efficient_sdp),
        ("cudnn", cuda.enable_cudnn_sdp),
    ):
        enable(name == named)
    cuda.enable_math_sdp(named == "math")
