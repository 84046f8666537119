"""A loop of one's own under accelerate, and the panel that is given its model and optimizer."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from surokit.live import Live
from tests.test_live import View, Words


@pytest.mark.parametrize("prepared", [True, False], ids=["accelerate's optimizer", "torch's optimizer"])
def test_an_accumulating_loop_counts_steps(prepared):
    """Eight batches of two rows, four parts to a step: a loop that steps its optimizer after every part, as accelerate has it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    ids = torch.arange(8 * 2 * 4).reshape(16, 4)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = Words()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(
        model,
        inner,
        torch.utils.data.DataLoader(rows, batch_size=2),  # type: ignore[arg-type]
    )
    with Live(view=View(), model=model, optimizer=optimizer if prepared else inner) as live:
        for batch in live.batches(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    frame = live.frame()
    assert list(frame["step"]) == [1, 2]
    assert list(frame["tokens"]) == [32, 32]
    assert list(frame["targets"]) == [32, 32]
    assert list(frame["loss"]) == [float(part.float().mean()) for part in ids.split(8)]
    assert set(live.state.idle_causes) == {"data", "between steps"}
