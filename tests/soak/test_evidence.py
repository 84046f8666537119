"""The study of what each recipe costs in held-out loss, run to its end and held to its gates: hours, which go on where they ended.

The plan, with its gates and numbers of seeds, was written before: docs/measurements/evidence-plan.json.
"""

from pathlib import Path

import pytest

from surokit.bench import evidence
from surokit.bench.evidence_plan import GATES
from surokit.bench.evidence_table import rows as rows_of

OUT = Path(__file__).parents[2] / "docs" / "measurements" / "evidence.json"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_recipes_stay_within_their_gates():
    data = evidence.run(OUT, Path("runs/evidence"), minutes=12 * 60)
    rows = rows_of(data)
    assert {row["recipe"] for row in rows} >= set(GATES)
    missed = [
        (row["size"], row["recipe"], row["verdict"]) for row in rows if row["gate"] and row["verdict"] != "inside"
    ]
    assert not missed
