"""Make tokens of any vocabulary from real text, the same on every machine: the two bundled books, packed into rows.

Words and punctuation marks are folded into the vocabulary by a checksum, so that no tokenizer has to be installed and every
system of a benchmark, in whatever process, sees the same tokens in the same order. Speed does not depend on a token's
meaning; the statistics of a language are kept.

S rows, T tokens a row, M documents a row at most.
"""

from __future__ import annotations

import re
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from surokit.data import sources
from surokit.data.batches import document_starts
from surokit.texts import MOBY_DICK, SHAKESPEARE

_TOKEN = re.compile(r"\w+|[^\w\s]")


def corpus(vocab: int, length: int, multiple: int = 1) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """Return (ids [S, T] below `vocab`, the first token of each document of a row [S, M], padded with T); S is a multiple
    of `multiple`.

    Each document ends with the last id of the vocabulary. Raises ValueError where the text does not fill `multiple` rows.
    """
    documents = [text for book in (MOBY_DICK, SHAKESPEARE) for text in sources.documents(book, None, "train")[1]]
    rows = [[crc32(token.encode()) % (vocab - 1) for token in _TOKEN.findall(text)] + [vocab - 1] for text in documents]
    ids_N = np.concatenate([np.array(row, np.uint32) for row in rows])
    count = len(ids_N) // (length * multiple) * multiple
    if not count:
        raise ValueError(
            f"The bundled books have {len(ids_N):,} tokens, too few for {multiple} rows of {length:,}: use a shorter length."
        )
    firsts = np.cumsum([0, *(len(row) for row in rows[:-1])])
    return ids_N[: count * length].reshape(count, length), document_starts(firsts, count, length)
