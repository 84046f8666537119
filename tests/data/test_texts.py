"""The shipped texts are the ones that PROVENANCE.md describes."""

import hashlib
import re

import pytest

from surokit.texts import MOBY_DICK, SHAKESPEARE

PROVENANCE = (MOBY_DICK.parent / "PROVENANCE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [MOBY_DICK, SHAKESPEARE], ids=lambda path: path.name)
def test_checksum_and_size_are_the_stated_ones(path):
    content = path.read_bytes()
    row = re.search(rf"\| {path.name} \| (\d+) \| ([0-9a-f]{{64}}) \|", PROVENANCE)
    assert row is not None
    assert (str(len(content)), hashlib.sha256(content).hexdigest()) == row.groups()


def test_every_text_is_listed():
    assert sorted(re.findall(r"^\| (\S+\.txt) \|", PROVENANCE, re.M)) == sorted(
        path.name for path in MOBY_DICK.parent.glob("*.txt")
    )


def test_moby_dick_has_135_chapters_and_an_epilogue():
    parts = MOBY_DICK.read_text(encoding="utf-8").split("\n\n\n")
    assert len(parts) == 136
    assert parts[0].startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert all(part.startswith(f"CHAPTER {i}.") for i, part in enumerate(parts[:-1], 1))
    assert "Epilogue" in parts[-1][:20] or "EPILOGUE" in parts[-1][:20]


def test_shakespeare_has_the_three_plays():
    text = SHAKESPEARE.read_text(encoding="utf-8")
    assert text.startswith("HAMLET, PRINCE OF DENMARK")
    assert text.index("MACBETH\n\nby William Shakespeare") < text.index("THE TEMPEST\n")
