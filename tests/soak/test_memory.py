"""Ten thousand steps: memory does not grow, and nothing else accumulates."""

import pytest
import torch

import surokit as sk
from surokit.bench.cpu import peak_mib


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8], ids=lambda r: r.name)
def test_memory_over_ten_thousand_steps(recipe, tmp_path):
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)
    ids = torch.randint(64, (1, 32))
    session = sk.Session(
        sk.Decoder(config).to(torch.bfloat16),
        [{"input_ids": ids, "labels": ids}],
        recipe=recipe,
        schedule=None,
        run_dir=tmp_path / "run",
        compile=False,
    )
    session.run(1_000)
    before_mib = peak_mib()
    session.run(9_000)
    grown_mib = peak_mib() - before_mib
    print(f"{recipe.name}: {before_mib:.1f} MiB after 1,000 steps, {grown_mib:+.1f} MiB after 10,000")
    assert grown_mib < 8  # the ring buffer of records reaches its full size of about 5 MiB
    assert session.steps == 10_000
