"""A plan of a live model, or of its session: what was applied, fused and frozen, against what torch allocates for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.applied import Trainer
from surokit.bench.memory import Setting, measure, model_of
from surokit.nn.linear import Linear
from surokit.planner import Gpu, plan
from surokit.train.capture import Capture
from surokit.train.engine import Engine
from surokit.train.run_info import batch_sizes
from tests.refusals import refused

CONFIG = sk.DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=256, ffn=256)
RUN: dict[str, Any] = {"batch": 2, "length": 64}
LONE = Setting("", layers=4, vocab=512)  # layers outweigh the loss
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def decoder(recipe: sk.Recipe | None = None, fusion: dict[str, Any] | None = None, config: Any = CONFIG) -> Any:
    torch.manual_seed(0)
    model = sk.Decoder(config, dtype=torch.bfloat16)
    if recipe is not None:
        sk.apply(model, recipe)
    if fusion is not None:
        sk.fuse(model, **fusion)
    return model


def with_peft(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    autocast = options.pop("autocast_adapter_dtype", True)
    config = peft.LoraConfig(**{"r": 8, "target_modules": TARGETS, **options})
    return peft.get_peft_model(model, config, autocast_adapter_dtype=autocast)


def theirs(setting: Setting = LONE) -> Any:
    pytest.importorskip("transformers")
    return model_of(Setting(**{**vars(setting), "family": "llama"}))


def checkpointed(model: Any) -> Any:
    model.get_base_model().activation_checkpointing_enable()
    return model


def test_what_was_applied_and_fused_is_planned():
    recipe = sk.QFP8.lora(rank=16).decode_once(False)
    model = decoder(recipe, {"recompute": "full"})
    found = plan(model, **RUN)
    said = plan(CONFIG, recipe=recipe, fusion=sk.Fusion(recompute="full"), gpu="cpu", **RUN)
    assert found.recipe == recipe
    assert found.memory.gib == said.memory.gib
    assert (found.setup.fusion, found.setup.recompute) == (said.setup.fusion, "full")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.trained_parameters == trained
    assert found.source == (
        f"Taken from the live Decoder: recipe qfp8, adapters of rank 16, {trained:,} parameters train, "
        "fused (norm gate joint adapters qk frozen=codes recompute=full), bf16, on a CPU"
    )
    assert str(found).splitlines()[1].strip() == found.source
    assert found.source in found._repr_html_()
    assert not any("as given" in note for note in found.notes)
    assert plan(decoder(), **RUN).source.startswith("Taken from the live Decoder: no recipe, ")
    assert plan(CONFIG, **RUN).source == ""
    assert found.but(batch=4).source == found.source


def test_what_is_given_goes_before_what_the_model_has():
    model = decoder(sk.QFP8.lora(rank=16), {"recompute": "full"})
    given = plan(model, recipe="fp8", fusion="none", recompute="none", dtype="fp32", gpu="cpu", **RUN)
    assert given.memory.gib == plan(CONFIG, recipe="fp8", dtype="fp32", gpu="cpu", **RUN).memory.gib
    assert given.source == ""
    fused = "norm gate joint adapters qk frozen=codes recompute=full"
    assert given.notes[:3] == (
        "recipe fp8 is planned as given; the live Decoder has qfp8 with adapters of rank 16",
        f"the fusion is planned as given; the live Decoder has: {fused}",
        "fp32 is planned as given; the live Decoder is in bf16",
    )
    same = plan(model, recipe=sk.QFP8.lora(rank=16), fusion=sk.Fusion(), dtype=torch.bfloat16, **RUN)
    assert not any("as given" in note for note in same.notes)
    assert same.setup.recompute == "none"  # a Fusion's own word
    assert plan(model, recompute="none", **RUN).setup.recompute == "none"
    assert plan(model, transposed="cached", **RUN).setup.fusion.frozen == "transposed"
    assert "recipe fp8 is planned as given; the live Decoder has none" in plan(decoder(), recipe="fp8").notes


def test_adapters_are_those_of_the_layers():
    model = decoder(sk.FP8.lora(rank=4))
    sk.apply(model, "bf16")  # the adapters stay
    found = plan(model, **RUN)
    assert found.recipe == sk.BF16
    assert found.notes[0].startswith("adapters train beside all weights")
    assert found.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    assert plan(model, **RUN).recipe == sk.BF16.lora(4)
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.merge_adapter()
    merged = plan(model, **RUN)
    assert merged.recipe == sk.BF16
    assert "no parameter of this model requires a gradient" in merged.notes[0]


def test_what_is_frozen_by_hand():
    model = decoder()
    model.model.embed_tokens.requires_grad_(False)
    named = plan(model, recipe="bf16", **RUN)  # which is what the model computes without a recipe
    assert named.memory == plan(model, **RUN).memory
    assert named.notes == plan(model, **RUN).notes
    found, rest = plan(model, **RUN), sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.memory["gradients"].most == 2 * rest
    assert found.memory["optimizer"].bytes == 4 * rest
    assert found.notes[0].startswith("1 of 20 parameter tensors are frozen: ")
    lora = decoder(sk.BF16.lora(4))
    before = plan(lora, **RUN)
    lora.model.norm.weight.requires_grad_(True)
    after = plan(lora, **RUN)
    assert after.trained_parameters - before.trained_parameters == CONFIG.width
    assert after.notes[0].startswith("1 of 20 parameter tensors train beside the adapters")


def test_what_is_frozen_by_hand_is_so_in_each_part_of_a_run():
    model = decoder(sk.FP8.then(sk.BF16, at=0.5))
    model.model.embed_tokens.requires_grad_(False)
    rest = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = plan(model, tokens=1e6, **RUN)
    for _, part in found.parts:
        assert part.trained_parameters == rest
        assert part.memory["optimizer"].bytes == 4 * rest


def test_what_is_frozen_by_hand_is_so_where_a_model_is_divided():
    model = decoder()
    divided: dict[str, Any] = {"gpu": "H100", "gpus": 2, "tensor_parallel": 2, "fusion": "none", **RUN}
    everything = plan(model, **divided)
    assert not any("spread evenly" in note for note in everything.notes)
    model.model.embed_tokens.requires_grad_(False)
    every, rest = (sum(p.numel() for p in model.parameters() if p.requires_grad or of_all) for of_all in (True, False))
    found = plan(model, **divided)
    share = rest / every
    assert found.trained_parameters == rest
    optimizer = [p.memory["optimizer"].bytes for p in (found, everything)]
    assert optimizer[0] == pytest.approx(share * optimizer[1], rel=1e-4)
    updates = [
        sum(row.bytes for row in p.estimate.rows if row.group == "optimizer") for p in (found, everything) if p.estimate
    ]
    assert updates[0] == pytest.approx(share * updates[1], rel=1e-4)
    assert any("spread evenly" in note for note in found.notes)


@pytest.mark.parametrize("recipe", [None, sk.BF16.lora(64)], ids=str)
def test_the_most_layers_train_as_those_of_the_model_do(recipe):
    def live(layers: int) -> Any:
        return plan(decoder(recipe, config=replace(CONFIG, layers=layers)), **RUN)

    assert live(2).largest("layers", gib=live(9).memory.gib) == 9


def test_weights_that_another_library_quantized_are_said_to_be_planned_in_full():
    def says(model: Any, **given: Any) -> bool:
        return any("another library quantized" in note for note in plan(model, **given, **RUN).notes)

    model = decoder()
    assert not says(model)
    assert not says(decoder(sk.QNF4.lora(4)))
    for layer in model.model.layers:
        codes = torch.zeros(CONFIG.width * CONFIG.ffn // 2, 1, dtype=torch.uint8)
        layer.mlp.up_proj.weight = torch.nn.Parameter(codes, requires_grad=False)
    assert says(model)
    assert not says(model, recipe=sk.QNF4.lora(4))


def test_adapters_of_peft():
    model = with_peft(theirs())
    found = plan(model, **RUN)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert found.recipe == sk.BF16.lora(8, targets=tuple(TARGETS))
    assert found.memory["adapter"].bytes == sum(p.nbytes for p in trained)
    assert found.memory["gradients"].most == sum(p.nbytes for p in trained)
    assert found.memory["optimizer"].bytes == 2 * sum(p.nbytes for p in trained)
    assert (found.setup.dtype, found.setup.state_dtype, found.setup.layers) == ("bf16", "fp32", "transformers")
    assert "PEFT's adapters of rank 8" in found.source
    assert (
        "adapters of several ranks are planned with rank 8, that of most"
        in plan(with_peft(theirs(), rank_pattern={"q_proj": 4}), **RUN).notes
    )


def test_adapters_in_some_layers():
    recipe = sk.BF16.lora(4, targets=("layers.1.*",))
    model = decoder(recipe)
    found = plan(model, **RUN)
    assert found.recipe == recipe
    assert found.compute == plan(CONFIG, recipe=recipe, **RUN).compute
    # as if they came from elsewhere
    sk.apply(model, "bf16")
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    other = plan(model, **RUN)
    assert other.recipe.adapter.targets == tuple(f"layers.1.*.{name}" for name in TARGETS)
    assert (other.compute, other.memory) == (found.compute, found.memory)
    assert not any("target" in note for note in other.notes)


def test_adapters_of_peft_in_some_layers():
    model = with_peft(theirs(), layers_to_transform=[1, 3])
    found = plan(model, attention="full", **RUN)
    assert found.recipe.adapter.targets[:2] == ("layers.1.*.q_proj", "layers.3.*.q_proj")
    trained = [p for p in model.parameters() if p.requires_grad]
    assert found.memory["adapter"].bytes == sum(p.nbytes for p in trained)
    alike = plan(model.config, recipe=sk.BF16.lora(8, targets=("layers.1.*", "layers.3.*")), attention="full", **RUN)
    assert found.compute == alike.compute
    assert found.trained_parameters == alike.trained_parameters


LIVE = {
    "fp8 + LoRA": lambda: decoder(sk.FP8.lora(8), config=_config()),
    "fused fp8 + LoRA": lambda: decoder(sk.FP8.lora(8), {}, _config()),
    "fused qfp8 + LoRA, recompute full": lambda: decoder(
        sk.QFP8.lora(8).decode_once(False), {"recompute": "full"}, _config()
    ),
    "fused bf16": lambda: decoder(None, {"recompute": "selective"}, _config()),
    "PEFT in float32": lambda: with_peft(theirs()),
    "PEFT in bf16": lambda: with_peft(theirs(), autocast_adapter_dtype=False),
    "PEFT in some layers": lambda: with_peft(theirs(), layers_to_transform=[2, 3]),
    "PEFT, checkpointed": lambda: checkpointed(with_peft(theirs())),
    "PEFT, fused": lambda: with_peft(_fused(theirs())),
    "qnf4 llama + LoRA": lambda: _applied(theirs(), sk.QNF4.lora(8).decode_once(False)),
    "qnf4 llama + LoRA, decoded once": lambda: _applied(theirs(), sk.QNF4.lora(8).decode_once()),
}


def _config() -> sk.DecoderConfig:
    sizes = ("layers", "width", "heads", "kv_heads", "ffn", "vocab")
    return sk.DecoderConfig(**{name: getattr(LONE, name) for name in sizes}, qk_norm=True)


def _fused(model: Any) -> Any:
    sk.fuse(model)
    return model


def _applied(model: Any, recipe: sk.Recipe) -> Any:
    sk.apply(model, recipe)
    return model


@pytest.mark.parametrize("name", LIVE)
def test_the_peak_of_a_step_of_a_live_model(name):
    predicted = plan(LIVE[name](), batch=LONE.batch, length=LONE.length).memory.peak_gib * 2**30
    assert predicted == pytest.approx(measure(LONE, model_of=LIVE[name]).peak, rel=0.08)


def test_what_a_session_decodes_once_is_planned(monkeypatch):
    model = decoder()
    recipe = sk.QNF4.lora(8)
    session = sk.Session(model, [], recipe=recipe, schedule=None)
    assert (session.recipe, plan(session).recipe) == (recipe, recipe.decode_once())
    assert plan(CONFIG, recipe=recipe, gpu="cpu").recipe == recipe.decode_once()
    for told in (recipe.decode_once(False), recipe.decode_once()):
        assert plan(CONFIG, recipe=told, gpu="cpu").recipe == told
    assert plan(CONFIG, recipe=recipe, gpu="cpu", training=False).recipe == recipe, "that is a session's alone"
    monkeypatch.setattr("surokit.hardware.machine.machine_gib", lambda: 1e-6)
    assert plan(CONFIG, recipe=recipe, gpu="cpu").recipe == recipe == plan(CONFIG, recipe=recipe, gpu="H100").recipe
    server = Gpu("server", memory_gib=512, device="cpu")
    assert plan(CONFIG, recipe=recipe, gpu=server).recipe == recipe.decode_once(), (
        "its memory counts, not this machine's"
    )


def test_checkpointing_of_transformers_is_recompute():
    model = theirs()
    assert plan(model, **RUN).setup.recompute == "none"
    model.activation_checkpointing_enable()
    found = plan(model, **RUN)
    assert found.setup.recompute == "full"
    assert "recompute full" in found.source


def test_a_decoder_on_a_gpu_is_fused_unless_it_was_told_otherwise():
    model = decoder()
    assert not plan(model, **RUN).setup.fusion.fuses
    found = plan(model, gpu="H100", **RUN)
    assert found.setup.fusion.fuses
    assert "fused (as a Decoder on CUDA is)" in found.source
    sk.fuse(model, sk.Fusion.OFF)
    off = plan(model, gpu="H100", **RUN)
    assert not off.setup.fusion.fuses
    assert "not fused" in off.source
    assert not plan(theirs(), gpu="H100", **RUN).setup.fusion.fuses
    assert not plan(CONFIG, gpu="H100", **RUN).setup.fusion.fuses


class Batches(list[Any]):
    """Batches that say their sizes."""

    batch, length = 3, 32


def test_a_session_says_its_step_too():
    ids = torch.randint(CONFIG.vocab, (2, 32))
    batches = [{"input_ids": ids, "labels": ids}] * 8
    model = decoder(sk.FP8.lora(4), {})
    session = sk.Session(model, batches, optimizer=sk.AdamW8bit(lr=1e-3), accumulate=2, schedule=None)
    for steps in (0, 1):  # by the data, and by the records
        if steps:
            session.run(steps)
        found = plan(session)
        s = found.setup
        assert (s.batch, s.length, s.accumulate, s.optimizer, s.graphs) == (2, 32, 2, "adamw8bit", False)
        assert found.source.startswith("Taken from the session: recipe fp8, adapters of rank 4, ")
        assert found.source.endswith("on a CPU, optimizer adamw8bit, 2 x 32 tokens, accumulate 2")
        assert found.memory.gib == plan(model, optimizer="adamw8bit", accumulate=2, batch=2, length=32).memory.gib
    other = plan(session, batch=4, optimizer="sgd", accumulate=1)
    assert (other.setup.batch, other.setup.length, other.setup.optimizer, other.setup.accumulate) == (4, 32, "none", 1)
    assert other.source.endswith("on a CPU")
    assert plan(session).check(session).measured.tokens == 2 * 2 * 32
    unknown = sk.Session(decoder(), Batches(batches), schedule=None)
    assert (plan(unknown).setup.batch, plan(unknown).setup.length) == (2, 32)


@pytest.mark.parametrize("ids", [torch.zeros(32, dtype=torch.int64), [1, 2, 3], None], ids=["row", "list", "nothing"])
def test_batches_that_say_no_sizes_are_left_alone(ids):
    assert batch_sizes([{"input_ids": ids}]) == {}


class Trains(Trainer):
    """A session as far as a plan asks it."""

    def __init__(self, **arguments: Any) -> None:
        self.model, self.compile, self.arguments = decoder(), False, arguments

    def plan_arguments(self) -> dict[str, Any]:
        return self.arguments


def test_a_session_that_records_its_steps_is_planned_in_graphs():
    optimizer = sk.AdamW(lr=1e-3)
    session = Trains(optimizer=optimizer, accumulate=1, graphs=True)
    found = plan(session, gpu="H100", **RUN)
    assert found.setup.graphs
    assert found.source.endswith("accumulate 1, in CUDA graphs")
    assert not plan(session, gpu="H100", graphs=False, **RUN).setup.graphs
    assert not plan(session, **RUN).setup.graphs  # a CPU has none
    assert not plan(Trains(optimizer=optimizer, accumulate=1), gpu="H100", **RUN).setup.graphs


@pytest.mark.parametrize(("state", "graphs"), [("waiting", True), ("on", True), ("off", False)])
def test_a_session_says_whether_it_records_its_steps(state, graphs, monkeypatch):
    monkeypatch.setattr(Engine, "capture", Capture(state, ""))
    assert sk.Session(decoder(), [], schedule=None).plan_arguments().get("graphs", False) is graphs


@pytest.mark.parametrize("how", ["session", "model"])
def test_what_is_compiled_is_planned_with_nothing_fused(how):
    model = decoder(None, {})
    what: Any = (
        torch.compile(model, backend="eager") if how == "model" else sk.Session(model, [], schedule=None, compile=True)
    )
    for gpu in ("cpu", "H100"):
        found = plan(what, gpu=gpu, **RUN)
        assert not found.setup.fusion.fuses
        assert found.notes[0].startswith("torch.compile is not planned")
        assert plan(what, gpu=gpu, fusion="fused", **RUN).setup.fusion.fuses
    eager = plan(sk.Session(model, [], schedule=None), gpu="H100", **RUN)
    assert eager.setup.fusion.fuses
    assert not any("torch.compile" in note for note in eager.notes)


@pytest.mark.parametrize("what", [sk.Decoder, torch.nn.LazyLinear(4)], ids=["class", "lazy"])
def test_what_has_no_shape_is_said_to_have_none(what):
    with refused(TypeError):
        plan(what)


def test_what_no_plan_of_a_session_knows():
    class Endless:
        def __iter__(self):
            yield {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "labels": torch.zeros(1, 8, dtype=torch.int64)}

    session = sk.Session(decoder(), Endless(), schedule=None, optimizer=lambda ps: torch.optim.Rprop(ps, lr=1e-3))
    with refused(ValueError):
        plan(session)
    found = plan(session, optimizer="adamw")
    assert found.setup.batch is None
    assert any("give batch= and length=" in note for note in found.notes)


def test_a_session_with_momentum_is_planned_with_another_optimizer_or_without_training():
    session = sk.Session(
        decoder(), [], schedule=None, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True)
    )
    with refused(ValueError):
        plan(session, **RUN)
    assert plan(session, training=False, **RUN).memory.gib == plan(session.model, training=False, **RUN).memory.gib
    for named in ("adamw", "sgd"):
        assert (
            plan(session, optimizer=named, **RUN).memory.gib == plan(session.model, optimizer=named, **RUN).memory.gib
        )


def test_recompute_of_a_fused_model_is_what_the_model_does():
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=64, heads=4, kv_heads=2, vocab=64, ffn=128, max_length=64))
    sk.fuse(model)
    step: dict[str, Any] = {"batch": 1, "length": 16, "gpu": "H100"}
    assert sk.plan(model, **step).setup.recompute == "none"
    vars(model)["gradient_checkpointing"] = True  # as transformers has it
    assert sk.plan(model, **step).setup.recompute == "full"
    vars(model)["gradient_checkpointing"] = False
    sk.fuse(model, recompute="selective")
    assert sk.plan(model, **step).setup.recompute == "selective"
    assert (
        sk.plan(model, fusion="none", **step).setup.recompute == "none"
    )  # of fused layers, which are not planned here
