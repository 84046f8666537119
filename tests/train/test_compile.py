"""torch.compile: the same losses as eager, with products that are quantized and that are not."""

import pytest
import torch

import surokit as sk


# the compiler inspects tensors and modules in ways that torch warns about
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [pytest.param(sk.BF16, marks=pytest.mark.soak), sk.FP8], ids=lambda r: r.name)
def test_a_compiled_run_follows_the_eager_one(recipe):
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)
        ids = torch.randint(64, (2, 32))
        session = sk.Session(
            sk.Decoder(config).to(torch.bfloat16),
            [{"input_ids": ids, "labels": ids}],
            optimizer=sk.AdamW(lr=1e-2),
            recipe=recipe,
            schedule=None,
            compile=compiled,
        )
        session.run(4)
        losses.append(session.records.column("loss"))
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[0][-1] < losses[0][0]
