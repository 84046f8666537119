"""This module holds the changes to a plan that take less memory or less time, for remedies and speedups.

A change is written as the arguments of `plan`, and tried by planning again with them; several are combined by their arguments.
Those for memory come in a fixed order: smaller parts of the same step, the optimizer's state, what is computed again, what waits on
the host, masters, and last an adapter and a stored base, which change what is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surokit.planner.counts.flops import frozen
from surokit.planner.inputs.shape import built_here
from surokit.planner.inverse.budgets import Space

if TYPE_CHECKING:
    from surokit.planner.planning import Plan
    from surokit.recipe import Lora


@dataclass(frozen=True)
class Change:
    """A Change holds arguments of a plan, what they cost (`costs`), and how they are `written` where not as name=value."""

    arguments: Mapping[str, Any]
    costs: str = ""
    written: str = ""

    @property
    def how(self) -> str:
        """Return the change as a user types it."""
        return self.written or ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())

    def of(self, plan: Plan) -> Plan:
        """Plan again with this change."""
        return plan.but(**self.arguments)


def merged(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of several changes; a later one of the same kind (zero=2 after zero=1) replaces the earlier."""
    return {name: value for change in changes for name, value in change.items()}


def saving_memory(plan: Plan, space: Space) -> Iterator[Change]:
    """Yield the changes that may take less memory, the least costly first."""
    s = plan.setup
    keeps = s.training and not plan.memory.left_out  # activations, of its own shape or of a typical one
    if keeps and fusable(plan):
        yield Change({"fusion": "fused"}, "nothing: sk.fuse(model)")
    if keeps and s.logits == "whole":
        whose = "" if s.layers == "surokit" else " (transformers' layers with surokit's or Liger Kernel's loss)"
        yield Change({"logits": "fused"}, f"nothing: the loss takes the logits a part at a time{whose}")
    if s.batch is not None and s.batch > 1 and not s.in_backward:  # which sums no gradients
        yield smaller_batch(plan, space)
    if s.training and s.replicas > 1:
        for stage in range(s.zero + 1, 2 if s.prefetch else 3):  # blocks that are streamed come whole
            costs = "no more traffic between GPUs; a step waits while updated weights are gathered"
            if stage == 2:
                costs = "traffic between GPUs: gradients after each micro-batch" if s.accumulate > 1 else costs
                costs += "; shards of the weights beside them"
            yield Change({"zero": stage}, f"{costs} (arXiv 1910.02054)")
    if s.training and s.optimizer == "adamw":
        yield Change({"optimizer": "adamw8bit"}, "precision: moments in 8 bits (arXiv 2110.02861)")
    if s.training and s.replicas > 1 and s.zero < 3 and not s.prefetch:
        traffic = "traffic between GPUs: half as much again, behind forward and backward (arXiv 1910.02054)"
        if s.accumulate > 1:
            traffic = "traffic between GPUs: weights and gradients in each micro-batch (arXiv 1910.02054)"
        if frozen(plan.recipe):
            traffic = "traffic between GPUs: the frozen weights too, gathered in every pass"
        yield Change({"zero": 3}, traffic)
    yield from _computing_again(plan)
    yield from _on_the_host(plan, space)
    if s.training and s.master and not frozen(plan.recipe):
        yield Change({"master": False}, "precision: updates below the weights' own step are rounded away")
    yield from _smaller_weights(plan)


def _computing_again(plan: Plan) -> Iterator[Change]:
    """Yield the changes that keep fewer activations, and compute them again; for our layers `sk.fuse` does so, which fuses them."""
    s = plan.setup
    keeps = s.training and not plan.memory.left_out
    if keeps and s.recompute_blocks:
        yield Change({"recompute_blocks": None}, "time: all blocks' forward again")
    fuses = {"fusion": "fused"} if keeps and fusable(plan) else {}
    if s.training and s.recompute == "none" and (s.fusion.fuses or fuses):
        again = "time: norms and SwiGLU again; sk.fuse(model, recompute='selective')"
        yield Change({**fuses, "recompute": "selective"}, again)
    if keeps and s.recompute == "none" and s.layers == "transformers" and not s.fusion.fuses:
        yield Change({"recompute": "selective"}, f"{_more_flops(plan, 'selective')}; torch's selective checkpointing")
    if keeps and s.recompute != "full":
        if s.fusion.fuses or fuses:
            yield Change(
                {**fuses, "recompute": "full"}, f"{_more_flops(plan, 'full')}; sk.fuse(model, recompute='full')"
            )
        if not s.fusion.fuses and (s.layers == "transformers" or not fuses):
            yield Change({"recompute": "full"}, _more_flops(plan, "full"))


def _more_flops(plan: Plan, recompute: str) -> str:
    """Say how many FLOPs more computing again takes."""
    again = plan.but(recompute=recompute).compute
    return f"time: {again.recompute / again.model:.0%} more FLOPs" if again else "time: each layer's forward again"


def fusable(plan: Plan) -> bool:
    """True if `sk.fuse` fuses the plan's layers on its GPU, and they are not planned as fused yet."""
    s, engine = plan.setup, plan.asked.question.engine
    if s.device != "cuda" or s.fusion.fuses or s.division.divides or engine not in (None, "fused"):
        return False
    if s.recompute == "mlp" or s.recompute_blocks:  # which it does not have
        return False
    return plan.shape is not None and built_here(plan.shape)


def _on_the_host(plan: Plan, space: Space) -> Iterator[Change]:
    """Yield the changes that keep something on the GPU's host: the optimizer's states, activations, weights."""
    s, trains = plan.setup, plan.setup.training and not frozen(plan.recipe)
    if s.device == "cpu" or s.division.divides:
        return
    if s.training and not plan.memory.left_out and not s.offload_activations:
        yield Change({"offload_activations": True}, "time, where the link is slower than computing")
    elsewhere = s.prefetch or s.in_backward or s.offload_states
    if trains and not elsewhere and s.optimizer in ("adamw", "adamw8bit"):
        shares = ", which a node's GPUs share" if s.gpus > 1 else ""
        yield Change({"optimizer": "offloadadamw"}, f"time: the host's AdamW{shares} (plan.offload)")
        deferred = Change({"optimizer": "zenflow"}, "loss: deferred columns learn differently")
        if deferred.of(plan).memory.gib < plan.memory.gib:
            yield deferred
    updates_here = trains and s.optimizer == "muon"  # which no other optimizer does on the host
    if s.training and plan.shape is not None and not elsewhere and s.gpus == 1 and not updates_here:
        changes: dict[str, Any] = {"offload_weights": True}
        costs = "time: the link, and blocks computed again (plan.streamed)"
        if trains:  # they are updated where they are
            changes["optimizer"] = s.optimizer if s.optimizer in ("adamw8bit", "none") else "adamw"
        yield Change(changes, costs)
        if changes.get("optimizer") == "adamw" and not space.hosts(plan.but(**changes).memory):
            changes = {**changes, "optimizer": "adamw8bit"}
            yield Change(changes, f"{costs}; precision: moments in 8 bits")


def dividing(plan: Plan) -> Iterator[tuple[Change, Plan]]:
    """Yield the changes that divide the model itself over the GPUs, each with its plan: as many tokens a step as before.

    GPUs that share layers take each micro-batch together, so that a step has as many times more of them; those that share experts
    have each its own.
    """
    s = plan.setup
    if not s.training or s.division.divides:
        return
    costs = {
        "tensor_parallel": "traffic between GPUs: activations, in each layer",
        "pipeline_parallel": "time: GPUs wait as the pipeline fills and drains",
        "expert_parallel": "traffic between GPUs: tokens to their experts and back",
    }
    for name, cost in costs.items():
        for parts in (2, 4, 8):
            together = {} if name == "expert_parallel" else {"accumulate": s.accumulate * parts}
            change = Change({name: parts, **together}, cost)
            with suppress(ValueError):  # GPUs, heads or layers that so many do not divide
                yield change, change.of(plan)


def smaller_batch(plan: Plan, space: Space) -> Change:
    """Return the change to the largest micro-batch that fits and divides the batch, or to one sequence, with as many tokens a step
    as before."""
    s = plan.setup
    assert s.batch is not None
    for batch in (n for n in range(s.batch // 2, 0, -1) if s.batch % n == 0):
        changes: dict[str, Any] = {"batch": batch}
        if s.training:
            changes["accumulate"] = s.accumulate * s.batch // batch
        if batch == 1 or space.holds(plan.but(**changes).memory):
            break
    costs = "launches: the same step in smaller parts" if s.training else "fewer sequences at a time"
    return Change(changes, costs)


def _smaller_weights(plan: Plan) -> Iterator[Change]:
    """Yield the changes to a frozen base under an adapter, and to that base stored in fewer bits."""
    from surokit.recipe import BF16, QFP8, QNF4, Lora, Recipe
    from surokit.recipe import recipes as named

    own = BF16 if plan.recipe is None else plan.recipe
    if not isinstance(own, Recipe):
        return
    # the named recipe whose products these are, to which adapter and storage are added again
    base = named.get(own.name.partition("+")[0], own)
    if replace(base, name="-", storage=None, adapter=None) != replace(own, name="-", storage=None, adapter=None):
        base = own
    name = "sk.BF16" if base == BF16 else f"sk.recipes[{base.name!r}]" if named.get(base.name) == base else "yours"
    if plan.setup.training and not frozen(own):
        costs = "what trains: an adapter in place of all weights"
        yield Change({"recipe": own.lora()}, costs, f"recipe={name}.lora()")
    adapter = own.adapter or Lora()
    bits = 16.0 if own.storage is None else own.storage.bits
    for storage, stored in (("QFP8", QFP8), ("QNF4", QNF4)):
        assert stored.storage is not None
        if stored.storage.bits >= bits - 1:
            continue
        lora = _lora_text(adapter) if adapter != Lora() else ""
        if any(part.quantized_products for part in own.parts):
            try:
                recipe = base.store(stored).lora(adapter.rank, adapter.alpha, adapter.targets, adapter.init)
            except ValueError:  # a run whose parts keep other layers does not store the same ones
                continue
            how = f"{name}.store(sk.{storage}){lora or '.lora()'}"
        else:
            recipe = replace(stored, adapter=adapter)
            how = f"sk.{storage}{lora or ('.lora()' if plan.setup.training else '')}"
        costs = f"precision: the frozen weights in {stored.storage.bits:.3g} bits"
        trains = plan.setup.training and not frozen(own)
        yield Change({"recipe": recipe}, f"{costs}; an adapter trains" if trains else costs, f"recipe={how}")


def _lora_text(adapter: Lora) -> str:
    """Write `.lora(...)` as a user types it, without arguments that are defaults."""
    plain = type(adapter)()
    fields = {name: value for name, value in adapter.__dict__.items() if value != getattr(plain, name)}
    return f".lora({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def saving_time(plan: Plan) -> Iterator[Change]:
    """Yield the changes that may take less time, the least demanding first; those that the plan has already are left out."""
    setup = plan.setup
    if not setup.training:
        return
    on_gpu = setup.device == "cuda"
    if fusable(plan):
        yield Change({"fusion": "fused"})
    # of experts the host waits for the number of their tokens
    routed = plan.shape is not None and plan.shape.experts is not None
    if on_gpu and not setup.graphs and not routed:
        yield Change({"graphs": True})
    if setup.recompute != "none":
        yield Change({"recompute": "none"})
    if on_gpu and setup.fusion.frozen != "transposed":
        yield Change({"transposed": "cached"})
