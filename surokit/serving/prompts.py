"""Make texts of a wanted number of tokens, as the server counts them: of words that each are one of its tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

_FREQUENT = """
the of and to in a is that for it was on with as be at by this had not are but from or have an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about
into than them can only other new some could time these two may then do first any my now such like our over
man me even most made after also did many before must through back years where much your way well down should
because each just those people how too little state good very make world still own see men work long get here
between both life being under never day same another know while last might us great old year off come since
against go came right used take three
"""
#: Frequent English words, of which most tokenizers make one token behind a space.
WORDS = tuple(_FREQUENT.split())

Count = Callable[[str], Awaitable[int]]


class Uncountable(ValueError):
    """The server's tokens could not be counted, or no text has the wanted number of them."""


async def single(count: Count, words: Sequence[str] = WORDS, least: int = 8) -> tuple[int, tuple[str, ...]]:
    """Return the tokens that a prompt has beside its words, and the words that are one token each.

    count: asks the server for the number of tokens of a text. Uncountable where fewer than `least` words are single tokens.
    """
    first = await count(words[0])
    beside = 2 * first - await count(
        " ".join([words[0], words[0]])
    )  # the frame around a chat, a token that begins a text
    if beside < 0:
        raise Uncountable(f"the server counts {first} tokens for one word, and more than twice that for two.")

    async def kept(some: Sequence[str]) -> list[str]:
        """Return the single ones; halves are asked apart where the whole has more tokens than words."""
        if await count(" ".join([words[0], *some])) == first + len(some):
            return list(some)
        if len(some) == 1:
            return []
        middle = len(some) // 2
        return [*await kept(some[:middle]), *await kept(some[middle:])]

    found = await kept(words[1:])
    if len(found) < least:
        raise Uncountable(f"the server makes one token each of {len(found)} of {len(words)} frequent words only.")
    # the first word of a text may be another token than behind a space: it is always the same one
    return first - 1, (words[0], *found)


def texts(words: Sequence[str], lengths: Sequence[int], seed: int | Sequence[int] = 0) -> list[str]:
    """Return texts of so many words each, drawn at random behind a first word that all of them share."""
    drawn = np.random.default_rng(seed)
    return [" ".join([words[0], *(words[i] for i in drawn.integers(1, len(words), n - 1))]) for n in lengths]


__all__ = ["WORDS", "Count", "Uncountable", "single", "texts"]
