"""Steps as CUDA graphs on a GPU: the eager run's losses, no wait for the device, and a run that goes on where capture fails.

With --rehearse the bodies run on the CPU, with the stand-in of tests/train/replay.py.
"""

import gc
import time

import pytest
import torch

import surokit as sk
from surokit.train.capture import WARMUP
from tests.gpu.noise import assert_near
from tests.train.replay import graphed
from tests.train.toys import Toy, make_batches

pytestmark = pytest.mark.gpu

RECIPES = {
    "bf16": sk.BF16,
    "bf16, adapter": sk.BF16.lora(rank=8),
    "fp8": sk.FP8,
    "fp8, adapter": sk.FP8.lora(rank=8),
    "fp8-block": sk.FP8_BLOCK,
    "qfp8": sk.QFP8,
    "qnf4": sk.QNF4,
    "fp4": sk.FP4,
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
# where that is what the test is about
said_off = pytest.mark.filterwarnings("ignore:Steps do not run as CUDA graphs")


def decoder_session(device, recipe, graphs="auto", **options):
    torch.manual_seed(0)
    config = sk.DecoderConfig(
        layers=2, width=128, heads=4, kv_heads=2, vocab=256, ffn=256, max_length=128, qk_norm=True
    )
    model = sk.Decoder(config).to(torch.bfloat16).to(device)
    g = torch.Generator().manual_seed(0)
    data = [{"input_ids": i, "labels": i} for i in torch.randint(256, (4, 2, 64), generator=g)]
    settings = {"optimizer": sk.AdamW(lr=torch.tensor(1e-3, device=device)), "compile": False, **options}
    session = sk.Session(model, data, recipe=recipe, graphs=graphs, **settings)
    return on_a_cpu(session) if graphs else session


def toy_session(device, model=None, graphs="auto", **options):
    session = sk.Session(
        (model or Toy()).to(device),
        make_batches(),
        optimizer=sk.AdamW(lr=torch.tensor(1e-2, device=device)),
        schedule=sk.Cosine(warmup=2, steps=20),
        compile=False,
        graphs=graphs,
        **options,
    )
    return on_a_cpu(session) if graphs else session


def on_a_cpu(session):
    """A rehearsal, where there are no graphs."""
    return graphed(session) if session.device.type == "cpu" else session


def losses(session):
    return session.records.column("loss")


def assert_follows(graphs, eager, again):
    """Noise in attention's gradient moves the loss of these runs by half a percent at most (FP4's); a batch that is not taken, an
    update that is left out, or parts that are all the first one move it by 3 % and more."""
    assert_near(losses(graphs), losses(eager), losses(again), floor=1e-2, most=4e-2)


@pytest.mark.parametrize("accumulate", [1, 3])
@each_recipe
def test_a_run_with_graphs_follows_the_eager_run(recipe, accumulate, device):
    eager, again, graphs = (
        decoder_session(device, recipe, mode, accumulate=accumulate) for mode in (False, False, "auto")
    )
    for session in (eager, again, graphs):
        session.run(12)
    print(f"{recipe.name}: {graphs.graphs}")
    assert graphs.graphs.state == "on", graphs.graphs
    assert "update is eager" not in graphs.graphs.why
    assert_follows(graphs, eager, again)
    early = [losses(session)[: WARMUP + 1] for session in (graphs, eager, again)]
    assert_near(early[0], early[1], early[2], floor=5e-3, most=1e-2)


def test_the_same_numbers_are_drawn(device):
    """Dropout: with other draws the losses differ in their second digit."""
    eager, graphs = (toy_session(device, graphs=mode, accumulate=2) for mode in (False, "auto"))
    for session in (eager, graphs):
        session.run(12)
    assert graphs.graphs.state == "on", graphs.graphs
    assert losses(graphs) == pytest.approx(losses(eager), rel=1e-4)


def test_moments_of_eight_bits_and_stochastic_rounding(device):
    runs = []
    for mode in (False, False, "auto"):
        optimizer = sk.AdamW8bit(lr=torch.tensor(1e-3, device=device), rounding="stochastic")
        session = decoder_session(device, sk.BF16, mode, optimizer=optimizer)
        session.run(8)
        runs.append(session)
    eager, again, graphs = runs
    assert graphs.graphs.state == "on", graphs.graphs
    assert "update is eager" not in graphs.graphs.why
    assert_follows(graphs, eager, again)


# torch says once that the mode is a prototype
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("graphs", [False, "auto"])
@each_recipe
def test_a_step_never_waits_for_the_device(recipe, graphs, cuda):
    session = decoder_session(cuda, recipe, graphs, accumulate=2)
    session.run(WARMUP + 2)
    assert session.graphs.state == ("on" if graphs else "off"), session.graphs
    batches = session.data.draw()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        record = session.step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert record.loss > 0


class Waits(Toy):
    def forward(self, input_ids, labels=None):
        assert int(input_ids.sum().item()) > 0
        return super().forward(input_ids, labels)


class Forbidden(Toy):
    """What no capture allows, though it is no read of a value: only recording itself shows it, and holds memory by then."""

    def forward(self, input_ids, labels=None):
        out = super().forward(input_ids, labels)
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize()
        elif torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return out


@said_off
@pytest.mark.parametrize("model", [Waits, Forbidden])
def test_where_it_fails_the_run_goes_on(model, device):
    """Dropout goes on too: a failed capture can leave torch's generator in capture."""
    eager, graphs = (toy_session(device, model(), mode) for mode in (False, "auto"))
    for session in (eager, graphs):
        session.run(6)
    print(graphs.graphs)
    assert graphs.graphs.state == "off"
    assert losses(graphs) == pytest.approx(losses(eager), rel=1e-4)
    after = toy_session(device)  # and others can record
    after.run(6)
    assert after.graphs.state == "on", after.graphs
    assert losses(after) == pytest.approx(losses(toy_run(device)), rel=1e-4)


@said_off
def test_memory_of_a_capture_that_fails_comes_back(cuda):
    """Each one that did not would cost a segment of 2 MiB at least. Workspaces are no part of it: a library keeps one a stream."""

    def fails(times):
        for _ in range(times):
            session = toy_session(cuda, Forbidden(), clip=None)
            session.run(6)
            assert session.graphs.state == "off", session.graphs
        del session
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # raises where a pool was given back twice
        return torch.cuda.memory_reserved(cuda)

    before = fails(2)
    assert fails(8) - before < 8 * 2**20


def test_what_holds_autograd_on_another_stream_delays_recording(cuda):
    session = toy_session(cuda)
    batch = {name: t.to(cuda) for name, t in make_batches(1)[0].items()}
    held = session.model(**batch).loss
    session.run(WARMUP + 1)
    print(session.graphs)
    assert session.graphs.state == "waiting", session.graphs
    del held
    session.run(WARMUP + 2)
    assert session.graphs.state == "on", session.graphs
    assert "1 step eager: autograd waits for another stream" in session.graphs.why


def toy_run(device):
    session = toy_session(device, graphs=False)
    session.run(6)
    return session


def test_shapes_watchers_evaluation_and_a_fork(device):
    runs = []
    for mode in (False, False, "auto"):
        session = decoder_session(
            device, sk.FP8, mode, meters=[sk.numerics(every=4)], eval=[*make_batches(1)], eval_every=3
        )
        short = [{name: t[:, :32] for name, t in batch.items()} for batch in session.data.source]
        session.data.source.extend(short)
        session.run(20)
        runs.append(session)
    eager, again, graphs = runs
    print(graphs.graphs)
    assert graphs.graphs.state == "on", graphs.graphs
    assert "of 2 shapes" in graphs.graphs.why
    assert "hooks on" in graphs.graphs.why
    assert_follows(graphs, eager, again)
    twin = on_a_cpu(graphs.fork())
    twin.run(6)
    graphs.run(6)
    assert twin.graphs.state == "on"
    assert losses(twin) == pytest.approx(losses(graphs)[-6:], rel=2e-2)


@pytest.mark.filterwarnings("ignore", "error:torch.compile failed")  # the compiler's own are not ours
def test_a_compiled_model_is_recorded_too(cuda):
    session = decoder_session(cuda, sk.BF16, compile=True)
    session.run(6)
    print(session.graphs)
    assert session.graphs.state == "on", session.graphs


def test_how_long_a_step_takes(cuda):
    """Printed, not judged: what graphs save where launches are what a step waits for."""
    for mode in (False, "auto"):
        session = decoder_session(cuda, sk.FP8.lora(rank=8), mode, accumulate=4)
        session.run(WARMUP + 4)
        torch.cuda.synchronize()
        start = time.perf_counter()
        session.run(20)
        torch.cuda.synchronize()
        print(f"graphs {session.graphs.state}: {(time.perf_counter() - start) / 20 * 1e3:.2f} ms a step")
