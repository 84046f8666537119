"""Keep how long the rows and documents are that a run's tokens stand in: attention's FLOPs a token grow with it.

Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

NEAR = 0.02  # of the mean: FLOPs that were counted at a length so near stay


class Lengths:
    """A Lengths has the mean length of what tokens stand in, over all tokens so far."""

    def __init__(self) -> None:
        self._tokens, self._summed = 0, 0.0
        self._noted: int | None = None

    def add(self, tokens: int, length: float) -> None:
        """Add so many tokens of rows of this length."""
        self._tokens += tokens
        self._summed += tokens * length

    def add_batch(self, batch: Mapping[str, Tensor]) -> None:
        """Add the tokens of a batch, by its rows or, where it says on the host where documents begin, by its documents."""
        ids, documents = batch["input_ids"], batch.get("documents")
        length: float = ids.shape[-1]
        if documents is not None and documents.device.type == "cpu":
            lengths = documents.diff(append=documents.new_full((len(documents), 1), ids.shape[-1]))
            length = float(lengths.double().square().sum()) / ids.numel()
        self.add(ids.numel(), length)

    @property
    def mean(self) -> int | None:
        """Return the mean length; None before the first token."""
        return round(self._summed / self._tokens) if self._tokens else None

    def note(self) -> int | None:
        """Return the mean, and keep it as the length at which FLOPs were counted last."""
        self._noted = self.mean
        return self._noted

    @property
    def moved(self) -> bool:
        """Return whether the mean is not near what it was when FLOPs were counted."""
        return self.mean is not None and (self._noted is None or abs(self.mean - self._noted) > NEAR * self.mean)
