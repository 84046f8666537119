"""This package holds two public-domain texts, so that everything can be tried without a download; grammar.py writes others.

PROVENANCE.md beside this file says where they come from, and gives their checksums.
"""

from pathlib import Path

__all__ = ["MOBY_DICK", "SHAKESPEARE"]

_FOLDER = Path(__file__).parent

MOBY_DICK: Path = _FOLDER / "moby_dick.txt"
"""Herman Melville, Moby-Dick (1851): 135 chapters and the epilogue, 1.2 MB; two blank lines between chapters."""

SHAKESPEARE: Path = _FOLDER / "shakespeare.txt"
"""William Shakespeare: Hamlet, Macbeth, The Tempest, 0.4 MB; two or more blank lines between most scenes."""
