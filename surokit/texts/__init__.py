"""Two public-domain texts that ship with the package, so that everything can be tried without a download.

Where they come from and their checksums: PROVENANCE.md beside this file.
"""

from pathlib import Path

__all__ = ["MOBY_DICK", "SHAKESPEARE"]

_FOLDER = Path(__file__).parent

MOBY_DICK: Path = _FOLDER / "moby_dick.txt"
"""Herman Melville, Moby-Dick (1851): 135 chapters and the epilogue, 1.2 MB; two blank lines between chapters."""

SHAKESPEARE: Path = _FOLDER / "shakespeare.txt"
"""William Shakespeare: Hamlet, Macbeth, The Tempest, 0.4 MB; two or more blank lines between most scenes."""
