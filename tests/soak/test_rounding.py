"""Error and bias of the roundings of NVFP4, over many draws; the raw result goes to docs/measurements/rounding.json."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from docs.measurements.rounding import ROUNDINGS, errors
from surokit.bench.result import write
from surokit.environment import environment

OUT = Path(__file__).parents[2] / "docs" / "measurements" / "rounding.json"
COUNTS = (1, 16, 256, 1024)


def matrices() -> dict[str, Tensor]:
    """What is rounded, 64 x 512 each: Gaussian; with large columns; and with few elements that are not zero."""
    g = torch.Generator().manual_seed(0)
    gaussian = torch.randn(64, 512, generator=g)
    outliers = torch.randn(64, 512, generator=g)
    outliers[:, ::64] *= 50
    sparse = torch.randn(64, 512, generator=g) * (torch.rand(64, 512, generator=g) < 0.03)
    return {"Gaussian": gaussian, "every 64th column x 50": outliers, "97 % zeros": sparse}


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_roundings_have_the_errors_that_the_docs_say():
    found = {
        matrix: {name: {str(n): e for n, e in errors(x, q, COUNTS).items()} for name, q in ROUNDINGS.items()}
        for matrix, x in matrices().items()
    }
    settings = {"matrices": "64 x 512 float32", "draws up to": COUNTS[-1]}
    data = {"benchmark": "relative squared error of the mean of draws", "rounding": found, "settings": settings}
    write({**data, "environment": environment()}, OUT)
    eden, roomy = (found["Gaussian"][name] for name in ("MS-EDEN (`quartet-ii`)", "stochastic, scales 17/16"))
    assert eden["1"] < 0.41 * roomy["1"]
    for each in (eden, roomy):
        assert 1024 * each["1024"] == pytest.approx(each["1"], rel=0.05)
