"""Give each model the batch in the form that it takes, say what both were given, and refuse what cannot be compared.

B batch, T tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from surokit.agreement.observe import Batch, device_of
from surokit.nn.loss import IGNORED
from surokit.places import check_values


def check(a: nn.Module, b: nn.Module, batch: Batch) -> None:
    """Raise TypeError or ValueError where the models or the batch cannot be compared."""
    for model in (a, b):
        check_values(model, "parity")
    if a is b:
        raise ValueError("parity() got one model twice: make the other with copy.deepcopy(model) before it is changed.")
    if not hasattr(batch, "keys"):
        raise TypeError(
            f'parity() takes a batch of tensors, {{"input_ids": ..., "labels": ...}}, not a {type(batch).__name__}.'
        )
    if other := next((name for name, value in batch.items() if not isinstance(value, Tensor)), None):
        raise TypeError(
            f"parity() takes a batch of tensors, and its {other} is a {type(batch[other]).__name__}: make it a tensor, or leave it "
            "out of the batch."
        )
    if missing := [name for name in ("input_ids", "labels") if name not in batch]:
        raise ValueError(
            f"parity() compares a training step, and the batch has no {missing[0]}: give input_ids and labels, [B, T] each; "
            "the labels may be the input_ids."
        )
    if batch["labels"].shape != batch["input_ids"].shape or batch["input_ids"].ndim != 2:
        shapes = [list(batch[name].shape) for name in ("input_ids", "labels")]
        raise ValueError(f"parity() takes input_ids and labels of one shape [B, T], not {shapes[0]} and {shapes[1]}.")
    if not bool((batch["labels"][:, 1:] != IGNORED).any()):
        raise ValueError("No label of the batch counts, all but the first are -100: take a batch that has a loss.")
    devices = [device_of(model) for model in (a, b)]
    if devices[0] != devices[1]:
        raise ValueError(
            f"a is on {devices[0]} and b on {devices[1]}: move both to one device, b.to({str(devices[0])!r})."
        )
    sizes = [vocabulary(model) for model in (a, b)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            f"a has a vocabulary of {sizes[0]:,} tokens and b of {sizes[1]:,}: give both the same embedding, for example with "
            "resize_token_embeddings()."
        )
    top = int(batch["input_ids"].max())
    if sizes[0] is not None and top >= sizes[0]:
        raise ValueError(
            f"The batch has the token {top:,} and the vocabulary goes to {sizes[0] - 1:,}: use the models' own tokenizer."
        )


def seen_labels(batch: Batch) -> tuple[Batch, list[str]]:
    """Return the batch without the labels that hidden tokens predict, and in words how many these were.

    What a hidden token gives is not compared, so no loss may depend on it: the first label behind padding in front is such a one.
    """
    real_BT, labels = shown(batch), batch["labels"]
    unseen = ~real_BT[:, :-1].to(labels.device) & (labels[:, 1:] != IGNORED)
    count = int(unseen.sum())
    if not count:
        return batch, []
    kept = torch.cat((labels[:, :1], labels[:, 1:].masked_fill(unseen, IGNORED)), dim=1)
    if not bool((kept[:, 1:] != IGNORED).any()):
        raise ValueError(
            "Each label that counts is predicted by a token that the attention_mask hides: take another batch."
        )
    verb = "label is" if count == 1 else "labels are"
    return {**batch, "labels": kept}, [f"{count:,} {verb} predicted by hidden tokens: left out of the loss"]


def vocabulary(model: nn.Module) -> int | None:
    """Return how many tokens the model's first embedding has; None without an embedding."""
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)


def batch_for(model: nn.Module, batch: Batch, who: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the batch as `model` takes it, on its device, and what had to be left out, in words.

    A padding mask may be left out for a causal model where the padding stands at the end: no token sees it then. `documents` may
    where position_ids say the same.
    """
    taken: Any = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    device, given, notes = device_of(model), {}, []
    for name, value in batch.items():
        if name in taken or (open_ended and name != "documents"):
            given[name] = value.to(device)
        elif name == "attention_mask":
            rising = (value[:, 1:] > value[:, :-1]).any() if value.ndim == 2 else torch.ones(())
            if bool(rising):
                raise ValueError(
                    f"{who}, a {type(model).__name__}, takes no attention_mask, and this one hides more than padding at the end: "
                    "pad at the end, or give position_ids."
                )
            if not bool(value.all()):
                notes.append(f"{who} takes no attention_mask: its padding stands at the end, where no token sees it")
        elif name == "documents" and "position_ids" in batch:
            notes.append(f"{who} takes no documents: its position_ids say the same")
        else:
            raise ValueError(f"{who}, a {type(model).__name__}, takes no {name}: leave it out of the batch.")
    if "use_cache" in taken and "use_cache" not in given:
        given["use_cache"] = False  # type: ignore[assignment]  # a cache would be made for nothing
    return given, notes


def words_of(batch: Batch) -> list[str]:
    """Return what the batch holds, in lines: tokens, labels that count, masks, positions, and a label shift that is suspected."""
    ids, labels = batch["input_ids"], batch["labels"]
    counted = int((labels[:, 1:] != IGNORED).sum())
    lines = [f"batch: {ids.numel():,} tokens in {len(ids)} rows; {counted:,} labels count"]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None:
        lines[0] += f"; {int((mask == 0).sum()):,} tokens hidden" if mask.ndim == 2 else f"; a mask {list(mask.shape)}"
    lines[0] += "; positions given" if positions is not None else "; each model makes its positions"
    if shifted(batch):
        lines.append(
            "labels are the next tokens already, and models shift them once more: give labels as input_ids are"
        )
    return lines


def shifted(batch: Batch) -> bool:
    """Return whether the labels that count are the tokens that follow, and not the tokens themselves."""
    ids, labels = batch["input_ids"], batch["labels"]
    here, counts = labels[:, :-1], labels[:, :-1] != IGNORED
    if not bool(counts.any()):
        return False
    return bool((here == ids[:, 1:])[counts].all()) and not bool((here == ids[:, :-1])[counts].all())


def shown(batch: Batch) -> Tensor:
    """Return which tokens are real, bool [B, T]: those that a padding mask does not hide."""
    mask = batch.get("attention_mask")
    ids = batch["input_ids"]
    return mask != 0 if mask is not None and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
