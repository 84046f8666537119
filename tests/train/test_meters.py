"""numerics: figures of every quantized layer during training, no trace in the training, and the first bad layer by name."""

import math

import pytest
import torch

import surokit as sk
from surokit.train.meters import GemmReading, Numerics, numerics
from surokit.widgets.panel import Panel
from surokit.widgets.picture import picture, summary_text
from surokit.widgets.state import PanelState
from tests.conftest import Tiny
from tests.refusals import refused, warned
from tests.train.toys import assert_same_state

COLUMNS = ["step", *GemmReading._fields]


def session(recipe="fp8", meters=(), width=32, blocks=4, plant=None, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = Tiny(width=width, blocks=blocks, dtype=dtype)
    if plant:
        plant(model)
    ids = torch.randint(32, (4, 4, 16), generator=torch.Generator().manual_seed(1))
    options = {"schedule": None, "optimizer": sk.AdamW(lr=1e-3), **options}
    return sk.Session(model, [{"input_ids": i, "labels": i} for i in ids], recipe=recipe, meters=meters, **options)


def losses(s):
    return [record.loss for record in s.records]


@pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise", "fp8-block", "mxfp8", "fp4", "mxfp4"])
def test_training_is_bit_for_bit_the_same_with_it(recipe):
    plain, measured = session(recipe), session(recipe, [numerics(every=2, tokens=8)])
    for s in (plain, measured):
        s.run(4)
    assert losses(plain) == losses(measured)
    assert_same_state(plain, measured)
    frame = measured.layers()
    assert list(frame.columns) == COLUMNS
    assert set(frame.step) == {2, 4}
    quantized = sum(bool(row.converted) for row in measured.report.rows)
    assert len(frame) == 2 * 3 * quantized
    assert frame.sqnr_db.between(10, 45).all()
    assert frame.in_force_a.isna().all() == (recipe != "fp8")


def test_a_stored_weight_is_judged_as_it_is_held():
    plain, measured = (session(sk.FP4.store(sk.QFP4).lora(rank=2), m) for m in ([], [numerics(every=2)]))
    for s in (plain, measured):
        s.run(2)
    assert losses(plain) == losses(measured)
    frame = measured.layers()
    assert set(frame.gemm) == {"forward", "grad_input"}
    assert frame.sqnr_db.between(12, 25).all()
    assert measured.first_bad == ""


def test_autocast_changes_nothing():
    def run(meters):
        s = session("fp8-current", meters, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            s.run(2)
        return s

    plain, measured = run([]), run([numerics(every=1)])
    assert losses(plain) == losses(measured)
    assert_same_state(plain, measured)
    assert measured.layers().sqnr_db.between(20, 32).all()


class ByName(Tiny):
    """Calls a layer with its input by name, which a hook does not see."""

    def forward(self, input_ids, labels=None):
        self.get_submodule("layers.0.up_proj")(x=self.embed(input_ids))
        return super().forward(input_ids, labels)


def test_a_layer_that_cannot_be_measured_does_not_stop_the_step():
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    meters = [numerics(every=1)]
    s = sk.Session(ByName(), [{"input_ids": ids, "labels": ids}], recipe="fp8", schedule=None, meters=meters)
    with warned(UserWarning):
        s.run(2)
    assert s.steps == 2


def test_no_other_step_pays_for_it():
    s = session(meters=[numerics(every=3)])
    hooks = []

    def count(session):
        hooks.append(sum(len(m._forward_hooks) for m in session.model.modules()))
        return {}

    s.measuring.meters.insert(0, count)
    s.run(6)
    assert hooks == [0] * 6  # gone when the step is over
    sampled = [not math.isnan(v) for v in s.records.column("worst_sqnr_db")]
    assert sampled == [False, False, True] * 2


def test_figures_are_those_of_compare():
    s = session("fp8-current", [numerics(every=1, tokens=10_000)], blocks=2)
    batch = next(iter(s.data.source))
    expected = sk.compare(s.model, batch, "fp8-current").set_index(["layer", "gemm"])
    s.step(batch)
    frame = s.layers().set_index(["layer", "gemm"])
    forward = [key for key in frame.index if key == ("layers.0.up_proj", "forward")]  # above it inputs differ a little
    for column in ("sqnr_db", "clipped", "underflow", "amax_a", "amax_b", "scale_spread"):
        assert frame.loc[forward, column].tolist() == pytest.approx(expected.loc[forward, column].tolist(), rel=1e-5)
        assert frame[column].to_numpy() == pytest.approx(
            expected.loc[frame.index, column].to_numpy(), rel=0.1, abs=1e-3
        )


def test_a_part_of_the_tokens_knows_the_whole_tensors_scale():
    whole, part = (session("fp8-current", [numerics(every=1, tokens=n)]) for n in (64, 4))
    for s in (whole, part):
        s.run(1)
    assert whole.layers().amax_a.tolist() == part.layers().amax_a.tolist()
    assert (whole.layers().sqnr_db - part.layers().sqnr_db).abs().max() < 6


def outlier_in_a_weight(model):
    with torch.no_grad():
        model.layers[2]["up_proj"].weight[0, 0] = 3e5


def test_a_planted_outlier_is_named_first():
    sound = session(meters=[numerics(every=2)])
    sound.run(4)
    assert sound.first_bad == ""
    assert (sound.layers().bad == "").all()
    s = session(meters=[numerics(every=2)], plant=outlier_in_a_weight)
    panel = Panel(PanelState("run"), view=Nothing())
    s.subscribe(panel)
    s.run(4)
    assert s.first_bad.startswith("layers.2.up_proj forward, step 2: ")
    bad = s.layers().query("bad != ''")
    assert bad.iloc[0].layer == "layers.2.up_proj"
    text = summary_text(panel.state)
    assert "layers.2.up_proj forward · " in text.partition("Least accurate products, step 4\n")[2].splitlines()[0]
    assert f"! first to go bad: {s.first_bad}" in text
    assert "Least accurate products, step 4" in picture(panel.state)


class Nothing:
    every_s = 0.0

    def show(self, states, final):
        pass


def test_an_amax_beyond_the_one_in_force_is_seen_as_clipped():
    s = session("fp8", [numerics(every=1)])
    s.run(3)
    with torch.no_grad():
        s.model.layers[1]["up_proj"].weight.mul_(64)
    s.run(1)
    assert s.first_bad.startswith("layers.1.up_proj forward, step 4: ")
    assert "clipped" in s.first_bad
    row = s.layers().query("step == 4 and layer == 'layers.1.up_proj' and gemm == 'forward'").iloc[0]
    assert row.amax_b > 50 * row.in_force_b > 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_bad(value):
    def plant(model):
        with torch.no_grad():
            model.layers[1]["down_proj"].weight[3, 3] = value

    s = session("fp8-current", [numerics(every=1)], plant=plant)
    with warned(UserWarning):
        s.run(1)
    assert s.first_bad.startswith("layers.1.down_proj forward, step 1: not finite")


def test_thresholds_decide():
    usual = GemmReading("layers.0.a", "forward", 28.0, 0.0, 0.01, 1.0, 1.0, 0.0, math.nan, math.nan)
    second, third = usual._replace(layer="layers.1.a"), usual._replace(layer="layers.2.a")
    rows = [usual, second, third._replace(sqnr_db=23.0, clipped=0.005, underflow=0.05)]
    assert Numerics().judged(1, rows).first_bad == ""
    assert Numerics(below_db=4).judged(1, rows).first_bad == "layers.2.a forward, step 1: SQNR 23.0 dB, median 28.0 dB"
    assert Numerics(clipped=0.001).judged(1, rows).first_bad == "layers.2.a forward, step 1: 0.5 % clipped"
    assert Numerics(underflow=0.02).judged(1, rows).first_bad == "layers.2.a forward, step 1: 5 % underflow, median 1 %"
    exact = [usual._replace(sqnr_db=math.inf), second._replace(sqnr_db=math.inf)]
    assert [row.layer for row in Numerics().judged(1, exact).worst()] == ["layers.0.a", "layers.1.a"]


def rows_of(kind, count, **figures):
    usual = GemmReading("", "forward", 28.0, 0.0, 0.01, 1.0, 1.0, 0.0, math.nan, math.nan)._replace(**figures)
    return [usual._replace(layer=f"layers.{i}.{kind}") for i in range(count)]


@pytest.mark.parametrize(
    ("blocks", "limit"), [(4, 0.1), (3, 0.1), (2, 0.2), (1, 0.2)], ids=["many", "enough", "two", "one"]
)
def test_a_layer_is_held_against_its_kind(blocks, limit):
    """A kind may differ from the others as much as it likes; where it has fewer than three layers, by twice the limits."""
    plain = rows_of("q", blocks) + rows_of("k", blocks) + rows_of("v", blocks)
    for beyond in (-0.02, 0.02):
        own = 0.5 if blocks >= 3 else 0.01  # of the whole kind
        down = rows_of("down", blocks, underflow=own)
        down[-1] = down[-1]._replace(underflow=own + limit + beyond)
        found = Numerics().judged(1, plain + down).first_bad
        assert found.startswith(f"layers.{blocks - 1}.down forward") == (beyond > 0)
        down = rows_of("down", blocks)
        down[-1] = down[-1]._replace(sqnr_db=28 - 120 * limit - 10 * beyond)
        found = Numerics().judged(1, plain + down).first_bad
        assert found.startswith(f"layers.{blocks - 1}.down forward") == (beyond > 0)


def test_what_is_not_finite_outweighs_what_is_unusual():
    rows = rows_of("up", 4)
    rows[0] = rows[0]._replace(underflow=0.3)
    unusual = Numerics().judged(1, rows)
    assert unusual.first_bad.startswith("layers.0.up forward, step 1: 30 % underflow")
    rows[2] = rows[2]._replace(amax_a=math.nan)
    lost = Numerics().judged(2, rows)
    assert lost.first_bad == "layers.2.up forward, step 2: not finite"
    later = Numerics().judged(3, [row._replace(amax_a=math.nan) for row in rows])
    said = ""
    for sample, expected in ((unusual, unusual), (lost, lost), (later, lost), (unusual, lost)):
        said = sample.first_bad_after(said)
        assert said == expected.first_bad


def test_outgrowing_the_amax_in_force_is_no_alarm_but_clipping_is():
    rows = rows_of("up", 4, in_force_a=2.0, in_force_b=2.0)
    for figures, bad in (
        ({"amax_a": 3.0}, False),
        ({"amax_b": 3.0}, False),
        ({"amax_a": 3.0, "clipped": 0.02}, True),
        ({"amax_a": 2.0}, True),  # covered: then it is the layer's own fault
        ({"amax_a": 3.0, "in_force_a": 0.0}, True),  # nothing seen yet: quantized by its own
    ):
        odd = rows[1]._replace(sqnr_db=10.0, **figures)
        assert bool(Numerics().judged(1, [rows[0], odd, *rows[2:]]).first_bad) == bad


def decoder_session(recipe, seed, blocks):
    torch.manual_seed(seed)
    config = sk.DecoderConfig(layers=blocks, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    ids = torch.randint(64, (12, 2, 16), generator=torch.Generator().manual_seed(seed))
    batches = [{"input_ids": i, "labels": i} for i in ids]
    return sk.Session(
        model, batches, recipe=recipe, meters=[numerics(every=1)], schedule=None, optimizer=sk.AdamW(lr=1e-3)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
@pytest.mark.parametrize("recipe", ["fp4", "mxfp4", "fp8", "mxfp8"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_healthy_run_gives_no_alarm(recipe, seed, blocks):
    s = decoder_session(recipe, seed, blocks)
    s.run(12)
    assert s.first_bad == ""


@pytest.mark.parametrize("recipe", ["fp4", "fp8"])
def test_a_nan_is_named_whatever_was_unusual_before(recipe):
    s = decoder_session(recipe, 0, 4)
    s.measuring.watchers[0].first_bad = "model.layers.0.mlp.down_proj forward, step 1: 19 % underflow, median 8 %"
    panel = Panel(PanelState("run"), view=Nothing())
    panel.state.first_bad = s.first_bad
    s.subscribe(panel)
    s.run(2)
    assert "step 1: 19 %" in s.first_bad
    with torch.no_grad():
        s.model.get_submodule("model.layers.1.mlp.up_proj").weight[0, 0] = math.nan
    with warned(UserWarning):
        s.run(1)
    assert s.first_bad == panel.state.first_bad == "model.layers.1.mlp.up_proj forward, step 3: not finite"


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"recipe": sk.FP8.lora(rank=2)}, {"dtype": torch.float32}])
def test_accumulation_adapters_and_float32(options):
    plain, measured = session(**options), session(meters=[numerics(every=2)], **options)
    for s in (plain, measured):
        s.run(2)
    assert losses(plain) == losses(measured)
    frame = measured.layers()
    products = 2 if "recipe" in options else 3
    # nothing below the first adapted layer trains, so its frozen weight may see no gradient
    assert len(frame) in (8 * products, 8 * products - 1)
    assert len(frame[["layer", "gemm"]].drop_duplicates()) == len(frame)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from inside the compiler
@pytest.mark.parametrize("recipe", ["fp8", "fp4"])
def test_compiled_sessions_are_measured_aside(recipe, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiler(model, backend="eager", **options))
    plain, measured = (session(recipe, m, compile=True) for m in ([], [numerics(every=2)]))
    for s in (plain, measured):
        s.run(3)
        assert s.engine.compiled
    assert losses(plain) == losses(measured)
    assert_same_state(plain, measured)
    assert set(measured.layers().step) == {2}
    assert len(measured.layers()) == 3 * sum(bool(row.converted) for row in measured.report.rows)


def test_a_meter_that_fails_is_dropped_and_the_step_is_done():
    s = session(meters=[numerics(every=1)])
    s.measuring.watchers[0]._judge = lambda *args: 1 / 0
    with warned(UserWarning):
        s.run(2)
    assert s.steps == 2
    with refused(ValueError):
        s.layers()


def test_one_value_serves_several_sessions_and_forks():
    meter = numerics(every=1, layers="*.up_proj")
    a, b = session(meters=[meter]), session(meters=[meter])
    a.run(2)
    twin = a.fork()
    twin.run(1)
    assert set(a.layers().step) == {1, 2}
    assert set(twin.layers().step) == {3}
    assert len(b.layers()) == 0
    assert a.layers().layer.str.endswith("up_proj").all()


def test_a_fork_takes_meters_of_its_own():
    start = session(recipe="bf16")
    twin = start.fork(recipe="fp8", meters=[sk.numerics(every=1)])
    twin.run(1)
    assert len(twin.layers()) > 0
    with refused(ValueError):
        twin.fork(meters=()).layers()


def test_memory_is_bounded():
    s = session(meters=[numerics(every=1, keep=2)])
    s.run(4)
    assert set(s.layers().step) == {3, 4}


@pytest.mark.parametrize("options", [{"every": 0}, {"tokens": 1.5}, {"keep": True}])
def test_what_cannot_be(options):
    with refused(ValueError):
        numerics(**options)
