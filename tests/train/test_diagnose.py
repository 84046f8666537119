"""The first bad place is named: weight, activation, gradient or weight gradient, with its product."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surokit.train.diagnose import find_first_bad, first_of
from tests.train.toys import Toy, make_batches


class Overflow(torch.autograd.Function):
    """The identity, whose backward is infinite: grad_input, grad_weight or both of a layer built on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float("inf")


class BadInput(nn.Linear):
    """A linear layer whose grad_input overflows."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(Overflow.apply(input))


class BadWeight(nn.Linear):
    """A linear layer whose grad_weight overflows."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, Overflow.apply(self.weight), self.bias)


class Net(nn.Module):
    """in -> middle -> head; a middle layer of choice; optionally something between middle and head."""

    def __init__(self, middle: type[nn.Linear] = nn.Linear, between: Any = None, inplace: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), middle(8, 8)])
        self.head = nn.Linear(8, 32)
        self.register_buffer("count", torch.zeros(()))
        self.between, self.inplace = between, inplace

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.get_buffer("count").add_(1)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
            if self.inplace:
                x.mul_(2.0)
        if self.between is not None:
            x = self.between(x)
        logits = self.head(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def find(model: nn.Module) -> Any:
    return find_first_bad(model, make_batches(2), step=7)


@pytest.mark.parametrize(
    ("model", "kind", "module", "product"),
    [
        (Net(BadInput), "gradient", "blocks.1's input", "grad_input"),
        (Net(BadWeight), "weight gradient", "blocks.1.weight", "grad_weight"),
        (Net(between=Overflow.apply), "gradient", "blocks.1's output", ""),
        (Net(between=lambda x: x * float("nan")), "activation", "head", "forward"),
        (Net(), "not reproduced", "", ""),
        # a module whose output is changed in place takes no backward hooks: what is left is the weights' gradients
        (Net(BadInput, inplace=True), "weight gradient", "blocks.0.bias", ""),
        (Net(inplace=True), "not reproduced", "", ""),
    ],
)
def test_where(model: nn.Module, kind: str, module: str, product: str) -> None:
    finding = find(model)
    assert (finding.kind, finding.module, finding.product) == (kind, module, product)
    assert str(finding).startswith("step 7: ")
    assert module in str(finding)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_weight_comes_before_everything(bad: float) -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[0].get_parameter("bias")[3] = bad
    assert str(find(model)) == "step 7: the weight blocks.0.bias is not finite"


def test_an_activation_is_blamed_on_the_innermost_first_module() -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[0].get_parameter("weight").fill_(3e38)
    finding = find(model)
    assert (finding.kind, finding.module, finding.product) == ("activation", "blocks.0", "forward")


def test_a_loss_of_nothing() -> None:
    batch = make_batches(1)[0]
    batch["labels"][:] = -100
    assert find_first_bad(Toy(), [batch], step=1).kind == "loss"


def test_a_later_part_of_an_accumulated_step() -> None:
    calls: list[int] = []

    def second_time(x: Tensor) -> Tensor:
        calls.append(1)
        return x * (float("nan") if len(calls) > 1 else 1.0)

    model = Net(between=second_time)
    assert find(model).kind == "activation"


def test_nothing_is_left_behind() -> None:
    model = Net(BadInput)
    find(model)
    assert all(p.grad is None for p in model.parameters())
    assert float(model.get_buffer("count")) == 0
    assert not any(m._forward_hooks or m._backward_hooks or m._backward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_part_without_labels_is_not_what_went_wrong() -> None:
    """The mean over its labels is NaN in a Toy, and counts for nothing in a step of several parts."""
    empty, other = make_batches(2)
    empty["labels"].fill_(-100)
    model = Toy()
    model.hidden = BadInput(16, 16)
    assert find_first_bad(model, [empty, other], 3).kind == "gradient"


def test_a_process_without_labels_is_not_what_went_wrong() -> None:
    """Its only batch counts for nothing in a step of several processes, whether it comes before the bad one or after."""
    empty, other = make_batches(2)
    empty["labels"].fill_(-100)
    bad = Toy()
    bad.hidden = BadInput(16, 16)
    findings = [find_first_bad(m, [b], 3, are_several=True) for m, b in ((Toy(), empty), (bad, other))]
    assert [finding.kind for finding in findings] == ["not reproduced", "gradient"]
    assert first_of(findings) == first_of(findings[::-1]) == findings[1]
