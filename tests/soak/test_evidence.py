"""The study of what each recipe costs in held-out loss, run to its end and held to its gates: hours, which go on where they ended.

The plan, with its gates and numbers of seeds, was written before: docs/measurements/evidence-plan.json.
"""

from pathlib import Path

import pytest

from surokit.bench import evidence
from surokit.bench.evidence_plan import GATES
from surokit.bench.evidence_table import ALL, by_recipe

OUT = Path(__file__).parents[2] / "docs" / "measurements" / "evidence.json"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_recipes_stay_within_their_gates():
    data = evidence.run(OUT, Path("runs/evidence"), minutes=12 * 60)
    judged = {recipe: of_sizes[ALL]["verdict"] for (_, recipe), of_sizes in by_recipe(data).items()}
    assert judged.keys() >= set(GATES)
    assert {recipe: judged[recipe] for recipe in GATES if judged[recipe] != "inside"} == {}
