"""Plans of layers that are computed together: kept while nothing changes that they depend on, and made anew when something does.

A plan is made of its key and of what it asked about the weights' memory, and of nothing else. So it cannot go stale if each of
these is read in every forward. Here each of them changes alone, and it is shown that the old plan would have been wrong.
"""

import copy
import gc
import itertools
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import surokit as sk
from surokit.convert import roll_scales, scaling_state
from surokit.nn import grouping, stages
from surokit.nn.delayed import banks_of
from surokit.nn.fusion import OFF, Fusion
from surokit.nn.grouping import KEPT_PLANS, LayerState, PlanKey
from surokit.nn.joint import lay_layers, lie_side_by_side
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import Precision
from surokit.nn.norm import RMSNorm
from surokit.nn.stages import Gated, Normed, Plain, fused_linear

K, ROWS = 128, (128, 256)
FULL = sk.FP8
DELAYED = sk.FP8.lora(4, targets=("q", "k"))
BLOCK = sk.FP8_BLOCK.lora(4, targets=("q", "k"))
STORED = sk.QFP8.lora(4, targets=("q", "k"))


class Readers(nn.Module):
    """Two layers that read one x, and how they are called."""

    def __init__(self, recipe=BLOCK):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.q, self.k = RMSNorm(K), Linear(K, ROWS[0]), Linear(K, ROWS[1])
        sk.apply(self, recipe)
        for layer in self.both:
            if layer.has_adapter:
                nn.init.normal_(layer.lora_B.weight, std=0.3)
        lay_layers(self.both)
        self.fusion, self.source, self.grad = Fusion(), "normed", True

    @property
    def both(self):
        return [self.q, self.k]

    @property
    def plan(self):
        plans = self.both[0].plans
        return plans[0] if plans else None

    def forward(self, step=0):
        """Outputs and gradients of one forward and backward."""
        torch.manual_seed(step)
        like = self.norm.weight
        first, second, joint = (torch.randn(6, n * len(like)).to(like.dtype).requires_grad_() for n in (1, 1, 2))
        gate, up = joint.chunk(2, -1)
        sources: dict[str, Normed | Gated | Plain] = {
            "normed": Normed(first, self.norm, second),
            "first": Normed(first, self.norm),
            "gated": Gated(first, second),
            "joint": Gated(gate, up, joint),
            "plain": Plain(first),
        }
        with torch.set_grad_enabled(self.grad):
            stream, parts, _ = fused_linear(sources[self.source], self.both, self.fusion)
        made = [y for y in (*parts, stream) if y is not None]
        if self.grad:
            torch.stack([y.float().square().sum() for y in made]).sum().backward()
        grads = [t.grad for t in (first, second, joint, *self.parameters()) if t.grad is not None]
        self.zero_grad()
        return [*(y.detach() for y in made), *grads]

    def outcome(self, step):
        """All that a forward and backward changes or gives, as tensors."""
        made = self(step)
        frozen = [getattr(layer, "frozen", None) for layer in self.both]
        kept = [0 if codes is None else codes.nbytes for codes in frozen]
        scales = [bank.state_dict() for bank in banks_of(self)]
        return [*made, torch.tensor(kept), *(t for state in scales for t in state.values())]


def same(a, b):
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b)
    )


def twin_of(readers):
    """A copy that has made no plan yet, with weights that lie as the original's do."""
    twin = copy.deepcopy(readers)
    assert twin.plan is None
    if lie_side_by_side([layer.weight for layer in readers.both]):
        lay_layers(twin.both)
    return twin


@pytest.fixture
def made(monkeypatch):
    """Keys of the plans that were made."""
    keys: list[PlanKey] = []
    real = grouping.plan_of

    def counting(key, lie):
        keys.append(key)
        return real(key, lie)

    monkeypatch.setattr(grouping, "plan_of", counting)
    return keys


def differences(a, b):
    """Names of the components in which two plans' keys differ, "lies" where only the weights' memory does."""
    found = {name for name in PlanKey._fields if name != "layers" and getattr(a.key, name) != getattr(b.key, name)}
    for x, y in zip(a.key.layers, b.key.layers):
        if x is None or y is None:
            found |= {"layers"} if x is not y else set()
        else:
            found |= {name for name in LayerState._fields if getattr(x, name) != getattr(y, name)}
    return found | ({"lies"} if a.key == b.key and a.lies != b.lies else set())


# -- what changes


def precision(readers, **changed):
    own = readers.k.precision
    known = {name: getattr(own, name) for name in ("recipe", "scales", "first_slot")}
    readers.k.precision = Precision(**known | changed)
    if own.scales is not None:
        readers.k.precision.scales.layers.add(readers.k)


def other_scales(readers):
    precision(readers, scales=copy.deepcopy(readers.k.precision.scales))


def sized(readers, rows=256, columns=K):
    """Smaller layers in the same modules."""
    for layer, n in zip(readers.both, (128, rows)):
        layer.weight = nn.Parameter(layer.weight[:n, :columns].detach().clone(), requires_grad=False)
        layer.lora_A.weight = nn.Parameter(layer.lora_A.weight[:, :columns].detach().clone())
        layer.lora_B.weight = nn.Parameter(layer.lora_B.weight[:n].detach().clone())
        layer.out_features, layer.in_features = n, columns
    readers.norm = RMSNorm(columns)
    lay_layers(readers.both)


def stored_otherwise(readers):
    storage = sk.Quantizer(sk.E4M3, sk.MX(32))
    readers.k.set_stored(sk.quantize(readers.k.dense_weight(torch.float32), storage))


def apart(readers):
    readers.k.weight.data = readers.k.weight.detach().clone()
    readers.q.weight.data = readers.q.weight.detach().clone()


def another_parameter(readers):
    apart(readers)
    readers.k.weight = nn.Parameter(2 * readers.k.weight.detach(), requires_grad=False)
    lay_layers(readers.both)


def hooked(readers):
    readers.k.register_forward_hook(lambda _, args, y: y * 2)


def adapter_hooked(readers):
    readers.k.lora_A.register_forward_hook(lambda _, args, h: h * 2)


def nothing(readers):
    pass


def moved(readers):
    apart(readers)
    lay_layers(readers.both)


def sets(**values):
    return lambda readers: readers.__dict__.update(values)


def on_k(**values):
    return lambda readers: readers.k.__dict__.update(values)


def calls_k(name, *arguments):
    return lambda readers: getattr(readers.k, name)(*arguments)


@dataclass(frozen=True)
class Change:
    """What happens to layers between two forwards, and the components of the key that differ then."""

    change: Any
    differs: tuple[str, ...]
    recipe: Any = BLOCK
    before: Any = nothing
    harmless: bool = False  # the old plan would give the same, or there is none


CHANGES = {
    "rows": Change(lambda r: sized(r, rows=128), ("rows",)),
    "columns": Change(lambda r: sized(r, columns=64), ("columns",), before=hooked),
    "another recipe": Change(lambda r: precision(r, recipe=sk.FP8_ROWWISE), ("recipe",)),
    "no recipe": Change(on_k(precision=None), ("recipe",)),
    "other scales": Change(other_scales, ("scales_number",), DELAYED),
    "another slot": Change(lambda r: precision(r, first_slot=0), ("first_slot",), DELAYED),
    "decoded once": Change(calls_k("keep_decoded", True), ("storage", "scale_count"), STORED),
    "another storage": Change(stored_otherwise, ("storage",), STORED),
    "evaluation": Change(calls_k("eval"), ("training",), DELAYED),
    "a weight that trains": Change(lambda r: r.k.weight.requires_grad_(True), ("trains",)),
    "weights that train no more": Change(
        lambda r: [layer.weight.requires_grad_(False) for layer in r.both], ("trains",), FULL, harmless=True
    ),
    "a bias": Change(lambda r: setattr(r.k, "bias", nn.Parameter(torch.randn(256))), ("has_bias",), sk.BF16),
    "no adapter": Change(calls_k("remove_adapter"), ("is_adapted", "scale")),
    "another alpha": Change(on_k(lora_alpha=3.0), ("scale",)),
    "a hook": Change(hooked, ("is_shown_x",)),
    "an adapter's hook": Change(adapter_hooked, ("is_adapted", "is_shown_x")),
    "an adapter's hook beside one": Change(adapter_hooked, ("is_adapted",), before=hooked),
    "a hook before": Change(calls_k("register_forward_pre_hook", lambda _, args: (args[0] * 2,)), ("layers",)),
    "a hook in backward": Change(calls_k("register_full_backward_hook", lambda *_: None), ("layers",), harmless=True),
    "a hook that is always called": Change(
        lambda r: r.k.register_forward_hook(lambda _, args, y: y * 2, always_call=True), ("layers",)
    ),
    "another forward": Change(on_k(forward=lambda x: x[..., :1]), ("layers",)),
    "another class": Change(lambda r: setattr(r.k, "__class__", nn.Linear), ("layers",)),
    "memory": Change(apart, ("lies",), sk.FP8_CURRENT),
    "another source": Change(
        sets(source="plain"), ("source",), before=sets(source="joint", fusion=Fusion(recompute="selective"))
    ),
    "a joint gate": Change(sets(source="joint"), ("tensors",), before=sets(source="gated")),
    "a norm of no sum": Change(sets(source="first"), (), harmless=True),
    "no joint products": Change(sets(fusion=Fusion().without("joint")), ("fusion",), sk.FP8_CURRENT),
    "codes of w' too": Change(sets(fusion=Fusion(frozen="transposed")), ("fusion",)),
    "no codes": Change(sets(fusion=Fusion().without("frozen")), ("fusion",)),
    "no gradients": Change(sets(grad=False), ("grad",), DELAYED),
    "bfloat16": Change(lambda r: r.to(torch.bfloat16), ("dtype",)),
    "the same weights in other memory": Change(moved, (), harmless=True),
    "a step of the optimizer": Change(lambda r: r.k.weight.data.mul_(2), (), FULL, harmless=True),
    "a frozen weight that changes": Change(lambda r: r.k.weight.detach().mul_(2), (), harmless=True),
    "another parameter": Change(another_parameter, (), harmless=True),
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def changed(change):
    """Layers that had a plan, which is given too, and were changed."""
    readers = Readers(change.recipe)
    change.before(readers)
    readers(0)
    old = readers.plan
    assert old is not None
    readers(0)
    assert readers.plan is old
    roll_scales(readers)
    change.change(readers)
    return readers, old


@every_change
def test_a_change_makes_another_plan_and_nothing_else_does(change, made):
    readers, old = changed(change)
    assert len(made) == 1
    twin = twin_of(readers)
    assert same(readers.outcome(1), twin.outcome(1))
    assert differences(old, readers.plan) == set(change.differs)
    assert (readers.plan is old) == (not change.differs)
    now = readers.plan
    readers.q.plans = None
    readers(2)
    assert readers.plan == now  # a fresh one is the same


def test_every_component_changes_alone():
    alone = {change.differs[0] for change in CHANGES.values() if len(change.differs) == 1}
    # the scales of a stored weight are those of its storage
    assert alone | {"scale_count"} == {*PlanKey._fields, *LayerState._fields, "lies"}


@pytest.mark.parametrize("change", [c for c in CHANGES.values() if not c.harmless], ids=lambda c: " ".join(c.differs))
def test_the_old_plan_would_be_wrong(change, monkeypatch):
    """As it would be used if its key had no such component: what it gives is another thing, or an error."""
    readers, old = changed(change)
    right = twin_of(readers).outcome(1)
    monkeypatch.setattr(stages, "plan_for", lambda *_: old)
    try:
        wrong = readers.outcome(1)
    except (RuntimeError, IndexError, AttributeError, ValueError, TypeError, AssertionError, KeyError):
        return
    assert not same(wrong, right)


def test_each_way_to_call_it_has_its_own(made):
    """Training, evaluation between its steps, and the forward without gradients that backward computes again."""
    readers = Readers(DELAYED)
    ways = [(True, True), (False, False), (True, False)]

    def called(training, grad):
        readers.train(training)
        readers.grad = grad
        readers()
        return readers.q.plans

    kept = called(*ways[0])
    assert all(called(*way) is kept for _ in range(3) for way in ways)
    assert len(made) == len(set(made)) == len(ways)


def test_few_are_kept(made):
    readers = Readers(DELAYED)
    for fusion in (
        Fusion(adapters=a, joint=j, frozen=f) for a in (True, False) for j in (True, False) for f in ("no", "codes")
    ):
        readers.fusion = fusion
        readers()
    assert len(made) == 8
    assert [plan.key for plan in readers.q.plans or ()] == made[: -KEPT_PLANS - 1 : -1]


def test_a_plan_in_use_stays(made):
    """Whatever else is tried meanwhile, once each: the one of training is not the first to go."""
    readers = Readers(DELAYED)
    for joint, adapters in itertools.product((True, False), repeat=2):
        for frozen in ("no", "codes", "transposed"):
            readers.fusion = Fusion(joint=joint, adapters=adapters, frozen=frozen)
            readers()
            readers.fusion = Fusion(gate=False)
            readers()
    assert len(made) == 12 + 1


# -- what a plan holds, and who has it


def test_a_plan_holds_no_memory():
    readers = Readers(FULL)
    readers()
    dropped = [weakref.ref(t) for t in (readers.k.weight, *banks_of(readers))]
    plan = readers.plan
    sk.apply(readers, sk.FP8_BLOCK)
    another_parameter(readers)
    gc.collect()
    assert readers.plan is plan
    assert [ref() for ref in dropped] == [None, None]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_no_copy_has_it(copied):
    readers = Readers(DELAYED)
    readers()
    assert readers.plan is not None
    assert copied(readers.q).plans is None
    assert not any("plan" in name for name in readers.state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_the_same(reentrant):
    found = []
    for again in (False, True):
        readers = Readers(DELAYED)
        for step in range(2):
            torch.manual_seed(step)
            x = torch.randn(6, K).requires_grad_()

            def forward(x):
                return torch.cat(fused_linear(Plain(x), readers.both, Fusion())[1], -1)  # noqa: B023

            y = checkpoint(forward, x, use_reentrant=reentrant) if again else forward(x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *scaling_state(readers).values()])
    assert same(found[0], found[2])
    assert same(found[1], found[3])


@pytest.mark.parametrize("most", [1, KEPT_PLANS])
def test_threads_that_call_one_layer_each_in_its_way(most, monkeypatch):
    """With gradients and without, by turns: each thread makes its plan anew or finds its own, and computes by it."""
    monkeypatch.setattr(grouping, "KEPT_PLANS", most)
    readers, rounds = Readers(BLOCK), 20
    x = torch.randn(6, K)
    start, wrong = threading.Barrier(4), []

    def call(grad, fusion):
        with torch.set_grad_enabled(grad):
            return fused_linear(Plain(x), readers.both, fusion)[1]

    ways = [(grad, fusion) for grad in (False, True) for fusion in (Fusion(), Fusion().without("joint"))]
    expected = [call(*way) for way in ways]

    def worker(way, right):
        start.wait()
        for _ in range(rounds):
            made = call(*way)
            if not same([y.detach() for y in made], [y.detach() for y in right]) or made[0].requires_grad != way[0]:
                wrong.append(way)

    threads = [threading.Thread(target=worker, args=(way, right)) for way, right in zip(ways, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_step_plans_nothing(made):
    """Over all recipes, a second step of a decoder makes no plan; nothing is planned where nothing is fused."""
    config = sk.DecoderConfig(layers=2, width=64, heads=2, kv_heads=1, vocab=32, ffn=128, qk_norm=True)
    ids = torch.randint(32, (1, 8))
    for recipe in (sk.BF16, sk.FP8.keep_small(0), sk.QFP8.keep_small(0).lora(4), sk.FP4.keep_small(0)):
        for fusion, plans in ((Fusion(), 2 * 4), (Fusion(recompute="full"), 2 * 4), (OFF, 0)):
            model = sk.Decoder(config, dtype=torch.bfloat16)
            sk.apply(model, recipe)
            sk.fuse(model, fusion)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for step in range(3):
                made.clear()
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                assert len(made) == (plans if step == 0 else 0)
