"""What a recorded step rests on: seen where it changes, and quickly where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.train import AdamW
from surokit.train.fingerprint import Fingerprint
from tests.train.toys import Toy


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after one step, with frozen weights under an adapter, scales of the past and an optimizer's state."""
    torch.manual_seed(0)
    model = Toy(width=32).bfloat16()
    sk.apply(model, sk.FP8.lora(rank=4, targets=("hidden",)))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=torch.tensor(1e-2))
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def hidden(model: nn.Module) -> Any:
    return model.get_submodule("hidden")


def another_address(p: torch.Tensor) -> None:
    p.data = p.data.clone()


def in_place(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.mul_(1)


def in_place_of_another(module: nn.Module) -> None:
    del module.inplace
    module.other = 1  # type: ignore[assignment]


def anew(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def first_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return next(iter(optimizer.state.values()))


CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "a setting": lambda m, o: setattr(m.get_submodule("drop"), "p", 0.7),
    "a new attribute": lambda m, o: setattr(hidden(m), "extra", 1),
    "an attribute less": lambda m, o: delattr(m.get_submodule("drop"), "inplace"),
    "another attribute in place of one": lambda m, o: in_place_of_another(m.get_submodule("drop")),
    "a mode": lambda m, o: m.get_submodule("drop").eval(),
    "a module": lambda m, o: setattr(m, "drop", nn.AlphaDropout(0.1)),
    "one more module": lambda m, o: setattr(m, "more", nn.Identity()),
    "a parameter's address": lambda m, o: another_address(next(m.parameters())),
    "a frozen weight's values": lambda m, o: in_place(next(p for p in m.parameters() if not p.requires_grad)),
    "what is trained": lambda m, o: next(p for p in m.parameters() if p.requires_grad).requires_grad_(False),
    "a buffer": lambda m, o: m.register_buffer("late", torch.ones(1)),
    "the past's scales": lambda m, o: sk.convert.load_scaling_state(m, sk.convert.scaling_state(m)),
    "weight decay": lambda m, o: o.param_groups[0].update(weight_decay=0.5),
    "a rate in another tensor": lambda m, o: o.param_groups[0].update(lr=torch.tensor(1e-2)),
    "an optimizer's state, all of it": lambda m, o: anew(o),
    "a moment's address": lambda m, o: another_address(first_of(o)["exp_avg"]),
    "a moment": lambda m, o: first_of(o).update(exp_avg=first_of(o)["exp_avg"].clone()),
    "a parameter less": lambda m, o: o.param_groups[0]["params"].pop(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_is_seen(change: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
    model, optimizer = trained()
    before = Fingerprint(model, optimizer)
    assert before.unchanged()
    assert before == Fingerprint(model, optimizer)
    change(model, optimizer)
    assert not before.unchanged()
    assert before != Fingerprint(model, optimizer)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: hidden(m).register_forward_hook(lambda *_: None),
    "before forward": lambda m: hidden(m).register_forward_pre_hook(lambda *_: None),
    "backward": lambda m: hidden(m).register_full_backward_hook(lambda *_: None),
    "a parameter's": lambda m: next(p for p in m.parameters() if p.requires_grad).register_hook(lambda g: g),
    "after accumulation": lambda m: next(
        p for p in m.parameters() if p.requires_grad
    ).register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("add", HOOKS.values(), ids=list(HOOKS))
def test_a_hook_is_seen(add: Callable[[nn.Module], Any]) -> None:
    model, optimizer = trained()
    before = Fingerprint(model, optimizer)
    assert before.hooked == ""
    hook = add(model)
    assert not before.unchanged()
    assert Fingerprint(model, optimizer).hooked
    hook.remove()
    assert Fingerprint(model, optimizer) == before


def test_what_every_step_changes_is_no_change() -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 1e-2
    before = Fingerprint(model, optimizer)
    optimizer.param_groups[0]["lr"] = 2e-2  # a number is the host's, which fills a tensor with it
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert before.unchanged()
    assert before == Fingerprint(model, optimizer)


def test_an_equal_setting_of_another_identity_is_looked_at_again() -> None:
    """Not the same object, but the same setting: no proof of a change, and none."""
    model, optimizer = trained()
    before = Fingerprint(model, optimizer)
    drop: Any = model.get_submodule("drop")
    drop.p = float(str(drop.p))
    assert not before.unchanged()
    assert before == Fingerprint(model, optimizer)
