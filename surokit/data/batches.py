"""Serve fixed-length token sequences in a deterministic order, from a position that can be saved.

The tokens lie in one compact array; an epoch is a permutation of its sequences drawn from (seed, epoch); a position is
(epoch, batches handed out). So the order after a resume needs nothing but those two numbers. One thread prepares the
batch after the one in use; the position counts what was handed out, never what was prepared.

Dimensions: S sequences, B batch, T length, M documents (or conversations) a sequence at most.
"""

import hashlib
import math
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from surokit.data.example import Example, look_at
from surokit.data.tokenizer import Tokenizer

# Held-out sequences are drawn with a seed of their own: runs with different seeds are judged on the same text.
_SPLIT_SEED = 20240229


class Batches:
    """Batches is a re-iterable of {"input_ids": int64 [B, T], "labels": int64 [B, T]}; labels unshifted (the model shifts), -100
    where a token is not trained on. Where documents are kept apart, also "position_ids": int64 [B, T], starting anew with each
    document, and "documents": int32 [B, M], the first token of each, padded with T; no document's first token is trained on.

    Iteration goes on from the position and ends with the epoch: `for` after `for` gives epoch after epoch, each in its
    own order; a loop that was left early is continued by the next one. The half that `split` holds out is the exception:
    every loop over it starts at its first batch, in the same order, until a position is loaded into it. One loop at a
    time: starting another, or loading a position, ends the earlier one with an error; `fork()` gives an independent
    reader of the same tokens.

    Every batch is full; the sequences that do not fill the last batch of an epoch wait for another epoch's order.

    Args:
        ids_ST: token ids, [S, T], an unsigned integer type.
        trained_ST: True where a token is trained on, [S, T]; None for all of them.
        filled_S: tokens that are not padding in each sequence, [S]; None where there is no padding.
        starts_SM: first tokens of the documents of each sequence as `document_starts` gives them, [S, M], to keep documents
            apart; None for sequences that are seen as one text.
        firsts_N: first tokens of all documents in the row of all tokens, [N], ascending, for `example`; None where unknown.
        batch: sequences a batch, B.
        seed: of the order.
        shuffle: False keeps the sequences' own order in every epoch.
        tokenizer: that made the tokens; None for other tokens.
        chat_template: that conversations were rendered with; None for other text.
        name: what the data is, for messages.
        notes: what was left out, for `repr`.

    Raises:
        ValueError: batch not positive, or fewer sequences than one batch.
    """

    def __init__(
        self,
        ids_ST: NDArray[Any],
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        trained_ST: NDArray[np.bool_] | None = None,
        filled_S: NDArray[np.int64] | None = None,
        starts_SM: NDArray[np.int32] | None = None,
        firsts_N: NDArray[np.int64] | None = None,
        tokenizer: Tokenizer | None = None,
        chat_template: str | None = None,
        name: str = "tokens",
        notes: tuple[str, ...] = (),
    ) -> None:
        check_positive("batch", batch)
        check_positive("length", ids_ST.shape[1])
        check_seed(seed)
        self.batch, self.length, self.seed, self.shuffle = batch, int(ids_ST.shape[1]), seed, shuffle
        self.tokenizer, self.chat_template, self.name, self.notes = tokenizer, chat_template, name, notes
        self._firsts_N = firsts_N
        self._ids_ST, self._trained_ST, self._filled_S, self._starts_SM = ids_ST, trained_ST, filled_S, starts_SM
        self._rows_S = np.arange(len(ids_ST))
        self._restarts = False
        self._epoch = self._index = self._loop = 0
        self._check_one_batch()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._rows_S) // self.batch

    @property
    def sequences(self) -> int:
        """Return the number of sequences of `length` tokens, S."""
        return len(self._rows_S)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the sequences, padding not counted."""
        return self.sequences * self.length if self._filled_S is None else int(self._filled_S[self._rows_S].sum())

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over tokens, documents kept apart, what is trained on, tokenizer, length, batch, seed,
        shuffle."""
        digest = hashlib.blake2b(digest_size=8)
        tokenizer = None if self.tokenizer is None else self.tokenizer.fingerprint
        digest.update(
            repr((tokenizer, self.length, self.batch, self.seed, self.shuffle, self._ids_ST.dtype.str)).encode()
        )
        for part in (self._ids_ST, self._trained_ST, self._rows_S, self._starts_SM):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    # Position --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position: {"epoch", "index" (batches of this epoch handed out), "fingerprint"}."""
        return {"epoch": self._epoch, "index": self._index, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; the next batch is the one that would have followed.

        Raises:
            ValueError: not a position, or one in other data.
        """
        try:
            epoch, index, fingerprint = int(state["epoch"]), int(state["index"]), state["fingerprint"]
        except (KeyError, TypeError, ValueError):
            raise ValueError("this is not a position of Batches: epoch, index and fingerprint are expected") from None
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"this position belongs to other data (fingerprint {fingerprint}, here {self.fingerprint}): pass the same "
                "source, tokenizer, length, batch and seed as in the run that saved it"
            )
        if epoch < 0 or not 0 <= index < len(self):
            raise ValueError(f"there is no batch {index} of epoch {epoch}: an epoch has {len(self)} batches")
        self._epoch, self._index = epoch, index
        self._restarts = False  # who loads a position means to go on from it
        self._loop += 1

    def __iter__(self) -> Generator[dict[str, torch.Tensor], None, None]:
        self._loop += 1
        if self._restarts:
            self._epoch = self._index = 0
        return self._iterate(self._loop, self._epoch, self._index)

    def _iterate(self, loop: int, epoch: int, start: int) -> Generator[dict[str, torch.Tensor], None, None]:
        order_S = self._order(epoch)
        pin = torch.cuda.is_available()
        # Leaving the block (the loop's end, a break, an interrupt) waits for the batch in the making and ends the thread.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="surokit-batches") as thread:
            ahead = thread.submit(self._make, order_S, start, pin)
            for index in range(start, len(self)):
                batch = ahead.result()
                if index + 1 < len(self):
                    ahead = thread.submit(self._make, order_S, index + 1, pin)
                if loop != self._loop:
                    raise RuntimeError(
                        "this loop over the batches was ended by a later one, or by load_state_dict: use fork() to read the "
                        "same data twice at a time"
                    )
                last = index + 1 == len(self)
                self._epoch, self._index = (epoch + 1, 0) if last else (epoch, index + 1)
                yield batch

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return self._rows_S
        return np.random.default_rng((self.seed, epoch)).permutation(self._rows_S)

    def _make(self, order_S: NDArray[np.int64], index: int, pin: bool) -> dict[str, torch.Tensor]:
        made = self._arrays(order_S[index * self.batch : (index + 1) * self.batch])
        tensors = {key: torch.from_numpy(array) for key, array in made.items()}
        return {key: tensor.pin_memory() for key, tensor in tensors.items()} if pin else tensors

    def _arrays(self, rows_B: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        ids_BT = self._ids_ST[rows_B].astype(np.int64)
        labels_BT = ids_BT.copy() if self._trained_ST is None else np.where(self._trained_ST[rows_B], ids_BT, -100)
        made: dict[str, NDArray[Any]] = {"input_ids": ids_BT, "labels": labels_BT}
        if self._starts_SM is not None:
            starts_BM = self._starts_SM[rows_B]
            made |= {"position_ids": _positions(starts_BM, self.length), "documents": starts_BM}
            labels_BT[made["position_ids"] == 0] = -100  # its own document holds nothing to predict it from
        return made

    # Looking ---------------------------------------------------------------------------------------------------------

    def example(self, index: int = 0) -> Example:
        """Show one packed sequence: its text, which tokens count in the loss, where documents begin.

        The result prints as text and shows itself as HTML in a notebook. The position of the batches stays where it is.

        Args:
            index: of the sequence, from 0 on, in the data's own order.

        Raises:
            IndexError: there is no such sequence.
        """
        if not 0 <= index < self.sequences:
            raise IndexError(f"there is no sequence {index}: {self.name} has {self.sequences}, numbered from 0")
        row = int(self._rows_S[index])
        made = self._arrays(self._rows_S[index : index + 1])
        filled = self.length if self._filled_S is None else int(self._filled_S[row])
        firsts_N, unit = np.zeros(0, np.int64), ""
        if self._firsts_N is not None:
            firsts_N, unit = self._firsts_N, "document" if self.chat_template is None else "conversation"
        here = slice(*np.searchsorted(firsts_N, [row * self.length, (row + 1) * self.length]))
        return look_at(
            made["input_ids"][0, :filled],
            made["labels"][0, :filled] != -100,
            (firsts_N[here] - row * self.length).tolist(),
            padding=self.length - filled,
            tokenizer=self.tokenizer,
            unit=unit,
            title=f"{self.name}, sequence {index} of {self.sequences}",
        )

    # Derived ---------------------------------------------------------------------------------------------------------

    def fork(self, restarts: bool = False) -> Self:
        """Return an independent reader of the same tokens, at the same position.

        restarts: every loop over it starts at the first batch of the first epoch, as those over a held-out half do.
        """
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._restarts |= restarts
        return twin

    def split(self, held_out: float = 0.05) -> tuple[Self, Self]:
        """Return (train, held-out): disjoint sequences, each at its beginning.

        The held-out sequences are drawn from all over the data, whole batches of them (one at least), the same ones for
        every seed; they keep one order.

        Args:
            held_out: share of the sequences to hold out, between 0 and 1.

        Raises:
            ValueError: the share is out of range, or either half would have less than one batch.
        """
        if not 0.0 < held_out < 1.0:
            raise ValueError(f"held_out={held_out} must lie between 0 and 1, for instance 0.05")
        count = self.batch * max(1, math.floor(self.sequences * held_out / self.batch + 0.5))
        if self.sequences - count < self.batch:
            raise ValueError(
                f"{self.sequences} sequences cannot be split into two parts of at least one batch ({self.batch}) with "
                f"held_out={held_out}: use a smaller batch, a shorter length, or more text"
            )
        drawn_S = np.random.default_rng(_SPLIT_SEED).permutation(self.sequences)
        train, held = self._subset(np.sort(drawn_S[count:])), self._subset(np.sort(drawn_S[:count]))
        held.name, held.shuffle, held._restarts = f"{self.name}, held out", False, True
        return train, held

    def _subset(self, rows: NDArray[np.int64]) -> Self:
        part = self.fork()
        part.__dict__.pop("fingerprint", None)  # cached for the whole
        part._rows_S, part._restarts = self._rows_S[rows], False
        part._epoch = part._index = part._loop = 0
        part._check_one_batch()
        return part

    def _check_one_batch(self) -> None:
        if len(self) == 0:
            raise ValueError(
                f"{self.name} has {self.sequences} sequences of {self.length} tokens, fewer than one batch of {self.batch}: "
                "use a smaller batch, a shorter length, or more text"
            )

    def __repr__(self) -> str:
        rest = self.sequences % self.batch
        parts = [
            f"{self.name}: {self.tokens:,} tokens in {self.sequences:,} x {self.length:,}",
            f"{len(self):,} batches of {self.batch} an epoch",
        ]
        if self._trained_ST is not None:
            trained = int(self._trained_ST[self._rows_S].sum())
            parts.append(f"{trained / self.tokens:.0%} trained on")
        parts += self.notes
        if rest:
            parts.append(f"{rest} sequence{'s' * (rest > 1)} left out of each epoch")
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in order"
        parts += [order, f"next: epoch {self._epoch} batch {self._index}"]
        return f"Batches({'; '.join(parts)})"


def document_starts(firsts: NDArray[np.int64], sequences: int, length: int) -> NDArray[np.int32]:
    """Return the first tokens of the documents of each sequence, ascending and padded with `length`, [S, M].

    Args:
        firsts: of all documents in the row of all tokens, [N], ascending. A document that goes on in the next sequence
            starts there anew.
        sequences: S; what starts behind them is left out.
        length: of a sequence, T.
    """
    all_firsts = np.union1d(firsts[firsts < sequences * length], np.arange(sequences) * length)
    row_N, at_N = np.divmod(all_firsts, length)
    count_S = np.bincount(row_N, minlength=sequences)
    starts_SM = np.full((sequences, int(count_S.max())), length, dtype=np.int32)
    starts_SM[row_N, np.arange(len(row_N)) - np.repeat(count_S.cumsum() - count_S, count_S)] = at_N
    return starts_SM


def _positions(starts_BM: NDArray[np.int32], length: int) -> NDArray[np.int64]:
    """Return each token's place in its document, [B, T]."""
    first_BT = np.zeros((len(starts_BM), length + 1), dtype=np.int64)
    np.put_along_axis(first_BT, starts_BM, starts_BM, axis=1)
    positions_BT: NDArray[np.int64] = np.arange(length) - np.maximum.accumulate(first_BT[:, :length], axis=1)
    return positions_BT


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive whole number")


def check_seed(seed: Any) -> None:
    """Raise ValueError unless `seed` is a whole number that is not negative."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed={seed!r} must be a whole number, zero or more")
