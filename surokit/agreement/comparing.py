"""Run two models on one batch, compare them module by module, and put what was found into one sentence.

Each model runs once without quantized products, and that of the coarser roundoff twice more, disturbed (observe.py). Two with the
same roundoff both do, and the smaller effect counts, with experts the larger. A model whose recipe quantizes products runs once
with them. Where a fused step differs, all is done again with hooks inside, which undo the fusion.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from surokit.accuracy import Operands, judge, sqnr
from surokit.agreement import faults, measure
from surokit.agreement.batches import batch_for, check, seen_labels, shown, words_of
from surokit.agreement.measure import MARGIN, difference
from surokit.agreement.observe import (
    Batch,
    Seen,
    balances,
    drops,
    head_of,
    hookable,
    layers_of,
    modules_of,
    observe,
    parameters_by_name,
    without_balance,
)
from surokit.agreement.report import ModuleParity, Pair, Parity, short
from surokit.layers import check_taken_over
from surokit.nn.experts import ExpertsLinear, is_experts
from surokit.nn.linear import Linear
from surokit.nn.loss import IGNORED
from surokit.torch_private import parameters_of

_DRAWS = 2  # disturbed runs: one alone may draw little noise for a small parameter
_GEMMS = {"forward": "product", "grad_weight": "weights' gradient"}
_MUCH = 0.5  # of an output: a rounding that explains more than this would hide nearly any fault
_DECIBELS = 3.0  # below what the definition of its recipe gives: half of the noise power of another, so no chance


def parity(a: nn.Module, b: nn.Module, batch: Mapping[str, Tensor], *, step: str = "adamw") -> Parity:
    """Return whether two models do the same with one batch, and where and why they part.

    a, b: causal language models on one device: ours, transformers', fused or not, in any recipe. Their modules are matched by the
    names that a checkpoint has. batch: input_ids and labels, int64 [B, T], and what else the models take (attention_mask,
    position_ids). step: whose first step is compared, "adamw" or "sgd".

    A difference counts where it is larger than the roundings of the coarser dtype explain, which is measured: two more runs
    of each model that has it have them added at each module. Of two effects the smaller counts, with experts the larger. With
    quantized products two more runs say what these add.

    Both models stay as they are: parameters, gradients, buffers, modes, hooks, histories of delayed scaling, and torch's random
    state. They run in training mode, or both in evaluation mode if one has dropout or a noisy router. Memory: the outputs of
    all modules and the gradients of three runs, so take a small batch.

    Raises TypeError or ValueError for what cannot be compared: another vocabulary, another device, a batch without labels or one
    that a model does not take.
    """
    check(a, b, batch)
    if step not in ("adamw", "sgd"):
        raise ValueError(f"parity(step={step!r}): the first step of 'adamw' or of 'sgd' can be compared.")
    return Comparison(a, b, batch, step).answer()


class Comparison:
    """A Comparison holds two models, their runs, and what rounding explains of each difference."""

    def __init__(self, a: nn.Module, b: nn.Module, batch: Batch, step: str) -> None:
        self.models, self.step = (a, b), step
        for model in self.models:
            check_taken_over(model, "parity")
        batch, unseen = seen_labels(batch)
        (own_batch, notes), (its_batch, more) = (batch_for(model, batch, who) for model, who in ((a, "a"), (b, "b")))
        self.batches, self.notes = (own_batch, its_batch), [*notes, *more, *unseen]
        self.labels = own_batch["labels"]
        self.real_BT = shown(batch).to(self.labels.device)
        self.inputs = words_of(batch)
        self.training = not any(drops(model) for model in self.models)
        if not self.training:
            self.notes.append(
                "compared in evaluation mode: one of them has dropout or a noisy router, or computes blocks again"
            )
        self.u, self.dtype = measure.roundoff_of(a, b)
        # of a gradient, which is a sum over all tokens
        self.floor = max(measure.one_rounding(self.u), measure.accumulated(self.u, self.labels.numel()))
        self.stored = measure.storage_noise(a, b)
        self.weights = measure.stored_weights(a, b, self.stored), measure.stored_weights(b, a, self.stored)
        for own, other, held in zip("ab", "ba", self.weights):
            if held:
                far = max(
                    measure.left_by_storage(a, b, {name: self.stored[name] for name in held}).values(), default=0.0
                )
                self.notes.append(
                    f"{other} stores {len(held)} weights, {short(far)} from {own}'s at most, as the format explains: {own} "
                    "was run with the stored ones"
                )
        self.balanced = [
            which for which in (0, 1) if balances(self.models[which]) and not balances(self.models[1 - which])
        ]
        self.notes += [
            f"compared without the load-balancing loss of {'ab'[which]}, which {'ba'[which]} does not add"
            for which in self.balanced
        ]
        self.quantized = [_recipe_words(model) for model in self.models]
        self.notes += _alone("a", a, b) + _alone("b", b, a)
        self._look(inside=False)

    def _run(self, which: int, **options: Any) -> Seen:
        model, who = self.models[which], "ab"[which]
        try:
            with without_balance(model) if which in self.balanced else nullcontext():
                return observe(
                    model, self.batches[which], training=self.training, weights=self.weights[which], **options
                )
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            given = ", ".join(
                f"{name} {list(x.shape)}" for name, x in self.batches[which].items() if isinstance(x, Tensor)
            )
            raise ValueError(
                f"{who}, a {type(model).__name__}, cannot take the batch ({given}): {str(error).splitlines()[0]}"
            ) from error

    def _look(self, inside: bool) -> None:
        """Run both, and those with the coarser roundoff again with disturbances, which draw the roundings inside of their modules
        anew as well."""
        self.seen = [self._run(i, inside=inside) for i in (0, 1)]
        for which, seen in enumerate(self.seen):
            if seen.loss is None:
                raise ValueError(
                    f"{'ab'[which]}, a {type(self.models[which]).__name__}, gives no loss for input_ids and labels: wrap it so "
                    "that its output has .loss."
                )
        roundoffs = [measure.roundoff_of(model, model)[0] for model in self.models]
        coarser = [which for which in (0, 1) if roundoffs[which] == max(roundoffs)]
        swapped = self.weights[0].keys() | self.weights[1].keys()
        left = {name: noise for name, noise in self.stored.items() if name not in swapped}
        left = measure.left_by_storage(*self.models, left)
        sizes: dict[str, float] = {}
        for which in coarser:
            sizes |= measure.levels(self.models[which], self.u, left)
        x, y = self.seen
        for name in x.calls.keys() & y.calls.keys():
            if "rotary" in name:  # float32 holds an angle to its roundoff times the position
                apart = difference(x.calls[name].given, y.calls[name].given)
                sizes[name] = max(sizes[name], min(apart, 2.0**-24 * self.labels.shape[1]))
        self.sizes = sizes
        hooked = [len(hookable(self.models[which], inside=True)) for which in coarser]
        # hooks see little of a model that is one piece, and disturb little of it
        noises = [self._noise_of(which) for which, count in zip(coarser, hooked) if 2 * count > max(hooked)]
        # A module that rounds more than its model's dtype does makes steps of the disturbances: no noise, but its fault, which the
        # other model has not. A router sends a token elsewhere by chance, in the runs of one and not of the other.
        routes = any(is_experts(module) for model in self.models for module in model.modules())
        self.noise = reduce(partial(measure.Noise.beside, which=max if routes else min), noises)
        self.names = [name for name in x.calls if name in y.calls]
        self._compare()

    def _noise_of(self, which: int) -> measure.Noise:
        noise = measure.Noise()
        for draw in range(_DRAWS):
            noise.take(self._run(which, inside=True, noise=self.sizes, draw=draw), self.seen[which], self.real_BT)
        return noise

    def _compare(self) -> None:
        """Fill, by module, how far inputs and outputs lie apart and what explains it."""
        (x, y), real = self.seen, self.real_BT
        self.given: dict[str, tuple[float, float]] = {}
        self.taken: dict[str, tuple[float, float]] = {}
        for name in list(self.names):
            one, other = x.calls[name], y.calls[name]
            if one.given is None or other.given is None:
                self.names.remove(name)
                continue
            size = self.sizes.get(name, self.u)
            noise = self.noise.given.get(name, 0.0), self.noise.taken.get(name, 0.0)
            self.given[name] = difference(one.given, other.given, real), MARGIN * max(size, noise[0])
            if one.taken is None or other.taken is None:  # positions in one, a hidden state for its dtype in the other
                self.taken[name] = 0.0, math.inf
            else:
                floor = measure.one_rounding(self.u)
                self.taken[name] = difference(one.taken, other.taken, real), MARGIN * max(floor, noise[1])
        self.head = head_of(self.models[0])
        if x.logits is not None and y.logits is not None:
            size = self.sizes.get(self.head, self.u)
            last = self.names[-1] if self.names else None
            self.taken[self.head] = self.given[last] if last else (0.0, math.inf)
            self.given[self.head] = difference(x.logits, y.logits, real), MARGIN * math.hypot(self.noise.logits, size)
            self.names.append(self.head)

    # -- the answer

    def answer(self) -> Parity:
        """Return what was found, looked for in the order of a step: forward, loss, backward; then what recipes add."""
        a, b = self.models
        if not self.names:
            raise ValueError(
                f"a, a {type(a).__name__}, and b, a {type(b).__name__}, share no module name and give no logits, so there is "
                "nothing to compare: load both from one checkpoint."
            )
        differing = faults.parameters_that_differ(a, b, self.stored)
        loss = self._loss()
        verdict = self._forward(differing) or self._loss_parts(loss)
        rows = self._rows()
        verdict = verdict or self._gradient(rows, differing)
        rows, worse = self._recipes(rows)
        norms = [measure.norm_of(seen.gradients) for seen in self.seen]
        x, y = self.seen
        noise = measure.together(self.noise.gradients, measure.gradients_apart(x, y))
        return Parity(
            verdict=verdict or worse or self._agreement(rows),
            agree=not verdict and not worse,
            rows=tuple(rows),
            loss=loss,
            grad_norm=Pair(
                norms[0], norms[1], MARGIN * max(self.floor, 0.0 if math.isnan(noise) else noise) * norms[1]
            ),
            step=measure.steps_apart(x, y, self.noise, self.floor, self.step),
            inputs=tuple(self.inputs),
            parameters=tuple(_some(differing)),
            notes=tuple(self.notes),
            dtype=self.dtype,
        )

    def _forward(self, differing: Mapping[str, str]) -> str:
        """Return the sentence of the first module whose output differs; "" where none does."""
        found = self._where()
        if found is None:
            return ""
        name, inside = found
        hidden = [hookable(m, True).keys() - hookable(m, False).keys() for m in self.models]
        if any(other.startswith(f"{name}.") for names in hidden for other in names):
            self._look(inside=True)
            again = self._where()
            if again is None:
                self._look(inside=False)
                found_apart, explained = self.given[name]
                return (
                    f"They part at {name}: its output differs by {short(found_apart)} where {self.dtype} explains "
                    f"{short(explained)}, and computed without fusion the two agree; the fused computation is at fault."
                )
            name, inside = again
        apart, explained = self.given[name]
        before, bar = self.taken[name]
        said = f"They part at {name}: its output differs by {short(apart)}"
        spoilt = [who for who, seen in zip("ab", self.seen) if _spoilt(_output(seen, name, self.head))]
        if spoilt:
            said = f"They part at {name}: its output has numbers that are not finite in {' and '.join(spoilt)}"
        if math.isfinite(bar):
            said += f", its input by {short(before)}"
        said += f", and {self.dtype} explains {short(explained)}"
        why = _few(self._why(name, inside, differing))
        return f"{said}; {'; '.join(why)}." if why else f"{said}."

    def _where(self) -> tuple[str, str] | None:
        given, taken = (
            {name: not pair[0] <= pair[1] for name, pair in found.items()} for found in (self.given, self.taken)
        )
        return faults.where_they_part(self.names, given, taken)

    def _why(self, name: str, inside: str, differing: Mapping[str, str]) -> list[str]:
        if name == self.head and name not in self.seen[0].calls:
            return [f"{p} {how}" for p, how in differing.items() if p.startswith(f"{name}.")]
        calls = [seen.calls[name] for seen in self.seen]
        x, y = calls[0].given, calls[1].given
        assert x is not None
        assert y is not None
        why = faults.reasons(*self.models, name, differing)
        if "rotary" in name:
            held = [
                f"{who} holds its inverse frequencies in {kind}"
                for who, kind in faults.coarse_frequencies(*self.models, name)
            ]
            return [faults.rotary_words(x, y, self.given[name][1]), *held, *why]
        if x.dtype == y.dtype and (words := faults.dtype_words(*calls)):
            why.append(words)
        bar = self.given[name][1]
        place = measure.first_token(x, y, self.real_BT, bar)
        if inside and place:
            ends = (self.models[0], self.batches[0]), (self.models[1], self.batches[1])
            if sight := faults.sight_words(*ends, name, place, self.training):
                why.append(sight)
        if inside and not why:
            why.append(f"its parts agree up to {inside}, so it is what it computes itself")
        if place and place[1]:
            why.append(f"from token {place[1]} on")
        return why

    def _loss(self) -> Pair:
        losses = [float(seen.loss) for seen in self.seen if seen.loss is not None]
        # a loss moves by (p - onehot) times the logits' noise, and the first has at most the norm sqrt(2)
        counted = int((self.labels[:, 1:] != IGNORED).sum())
        explained = self.noise.loss + self.noise.spread * math.sqrt(2 / counted) + self.u * min(map(abs, losses))
        return Pair(losses[0], losses[1], MARGIN * explained)

    def _loss_parts(self, loss: Pair) -> str:
        """Return the sentence of losses that differ, or that are asked for other labels; "" where neither is so."""
        readings = [faults.reading_of(seen.loss, seen.logits, self.labels, self.u) for seen in self.seen]
        if not loss.parts and readings[0] == readings[1]:
            return ""
        said = [
            f"{who}'s {faults.READINGS[reading]}"
            for who, reading in zip("ab", readings)
            if reading and reading != "next"
        ]
        if not loss.parts and None in readings:  # something is added, or rounded
            return ""
        return (
            f"They part at the loss: {loss.a:.6g} and {loss.b:.6g} of logits that agree, and {self.dtype} explains "
            f"{short(loss.explained)}" + (f"; {'; '.join(said)}." if said else ".")
        )

    def _rows(self) -> list[ModuleParity]:
        kinds = [modules_of(model) for model in self.models]
        apart = measure.gradients_apart(*self.seen)
        rows = []
        for name in self.names:
            names = [type(found[name]).__name__ if name in found else "logits" for found in kinds]
            explained = measure.together(self.noise.gradients, apart, name)
            rows.append(
                ModuleParity(
                    module=name,
                    kind=names[0] if names[0] == names[1] else " / ".join(names),
                    forward=self.given[name][0],
                    explained=self.given[name][1],
                    gradient=measure.together(apart, apart, name),
                    gradient_explained=MARGIN * max(self.floor, 0.0 if math.isnan(explained) else explained),
                )
            )
        return rows

    def _gradient(self, rows: list[ModuleParity], differing: Mapping[str, str]) -> str:
        """Return the sentence of the first module in backward whose gradient differs; "" where none does."""
        leaves = [r for r in rows if not any(other.module.startswith(f"{r.module}.") for other in rows)]
        row = next((r for r in reversed(leaves) if r.gradient_parts), None)
        if row is None:
            return ""
        by_name = {r.module: r for r in rows}
        x, y = self.seen
        absent = next((w for w, seen, other in (("a", x, y), ("b", y, x)) if _absent(seen, other, row.module)), "")
        name = row.module
        if absent:  # up to the whole that gets none
            seen, other = (x, y) if absent == "a" else (y, x)
            while (owner := name.rpartition(".")[0]) in by_name and _absent(seen, other, owner):
                name = owner
        row = by_name[name]
        said = (
            f"no gradient arrives in {absent}"
            if absent
            else f"its gradient differs by {short(row.gradient)}, and {self.dtype} explains {short(row.gradient_explained)}"
        )
        why = _few([f"{p} {how}" for p, how in differing.items() if p.startswith(f"{name}.")])
        return f"They agree forward, and part backward at {name}: {'; '.join([said, *why])}."

    def _agreement(self, rows: list[ModuleParity]) -> str:
        row = max(rows, key=lambda r: r.forward / r.explained)
        said = (
            f"the largest difference is {short(row.forward)} of the output, at {row.module}, and {self.dtype} explains "
            f"{short(row.explained)}"
        )
        if not row.forward:
            said = "every output is the same to the last bit"
        agree = "The models agree"
        if not measure.gradients_apart(*self.seen):
            agree = "The models agree forward; their gradients have no parameter in common"
            if any(self.quantized) or any(self.weights):
                agree += ". Forward they agree"
        if self.quantized == [None, None]:
            but = (
                " but for the formats that weights are stored in: with the same stored weights"
                if any(self.weights)
                else ":"
            )
            return f"{agree}{but} {said}.{self._numbers()}{_hidden(rows)}"
        worst = max(rows, key=lambda r: r.recipe)
        recipes = " against ".join(name or "no recipe" for name in self.quantized)
        return (
            f"{agree} but for their recipes, {recipes}: these put them {short(worst.recipe)} apart, at {worst.module}; "
            f"without quantized products {said}.{_hidden(rows)}"
        )

    def _numbers(self) -> str:
        """Return a sentence of the numbers of modules that differ although no output does; "" without any."""
        mine, theirs = (modules_of(model) for model in self.models)
        apart = {
            name: said for name in mine if name in theirs and (said := faults.numbers_apart(mine[name], theirs[name]))
        }
        if not apart:
            return ""
        name = next(iter(apart))
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        return f" Rounding hides other numbers all the same: of {name} {'; '.join(apart[name])}{more}."

    def _recipes(self, rows: list[ModuleParity]) -> tuple[list[ModuleParity], str]:
        """Return the rows with what the recipes add, and the sentence of a product that is worse than its recipe; "" for none."""
        if self.quantized == [None, None]:
            return rows, ""
        runs = [self._run(i, inside=False, products=True) if self.quantized[i] else self.seen[i] for i in (0, 1)]
        found = []
        for row in rows:
            name = row.module
            sides = [
                (_output(run, name, self.head), _output(calm, name, self.head)) for run, calm in zip(runs, self.seen)
            ]
            own = [difference(*side, self.real_BT) for side in sides]
            apart = difference(sides[0][0], sides[1][0], self.real_BT)
            values = {**vars(row), "recipe": apart, "recipe_explained": sum(own) + row.explained}
            found.append(ModuleParity(**values))
        if None not in (runs[0].loss, runs[1].loss):
            losses, norms = (
                [float(run.loss) for run in runs if run.loss is not None],
                [measure.norm_of(run.gradients) for run in runs],
            )
            self.notes.append(
                f"with quantized products: loss {losses[0]:.6g} and {losses[1]:.6g}, gradient norm {norms[0]:.6g} and "
                f"{norms[1]:.6g}"
            )
        for who, model, run, weights in zip("ab", self.models, runs, self.weights):
            if said := _worse_than_defined(who, model, run, weights):
                return found, said
        return found, ""


def _hidden(rows: list[ModuleParity]) -> str:
    """Return a sentence where rounding explains so much that little was tested; "" where it does not."""
    most = max((row for row in rows if row.forward), key=lambda r: r.explained, default=None)
    if most is None or most.explained <= _MUCH:
        return ""
    return f" Rounding explains so much, {short(most.explained)} at {most.module}, that little was tested: compare float32 copies."


def _spoilt(x: Tensor | None) -> bool:
    return x is not None and not bool(x.isfinite().all())


def _output(seen: Seen, name: str, head: str) -> Tensor | None:
    return seen.calls[name].given if name in seen.calls else seen.logits if name == head else None


def _alone(who: str, model: nn.Module, other: nn.Module) -> list[str]:
    """Return a line of the modules with parameters that only one model has; no line without any."""
    theirs = modules_of(other)
    names = [
        name
        for name, m in hookable(model, True).items()
        if name not in theirs and any(p is not None for p in parameters_of(m).values())
    ]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"only {who} has {', '.join(names[:3])}{more}: not compared"] if names else []


def _absent(seen: Seen, other: Seen, module: str) -> bool:
    """Return whether no parameter of the module has a gradient in one run and some have in the other."""
    mine = [g for name, g in seen.gradients.items() if name.startswith(f"{module}.")]
    theirs = [g for name, g in other.gradients.items() if name.startswith(f"{module}.")]
    return all(g is None or not bool(g.any()) for g in mine) and any(g is not None and bool(g.any()) for g in theirs)


def _recipe_words(model: nn.Module) -> str | None:
    """Return the recipe of a model whose products are quantized; None where none is."""
    names = dict.fromkeys(
        m.precision.recipe.name
        for _, m in layers_of(model)
        if isinstance(m, Linear | ExpertsLinear) and m.precision is not None and m.precision.recipe.quantized_products
    )
    return " and ".join(names) or None


def _worse_than_defined(who: str, model: nn.Module, run: Seen, weights: Mapping[str, Tensor]) -> str:
    """Return the sentence of the first layer whose product has more noise than its recipe's definition; "" without one.

    weights: by parameter, what the run had in place of the model's own. Not asked of delayed scaling, whose noise depends on the
    steps before, nor of layers with an adapter, nor of experts.
    """
    tied = Counter(id(p) for p in parameters_by_name(model).values())
    for name, layer in modules_of(model).items():
        call = run.calls.get(name)
        if not isinstance(layer, Linear) or layer.precision is None or call is None or layer.has_adapter:
            continue
        recipe, x, y = layer.precision.recipe, call.taken, call.given
        if layer.precision.scales is not None or x is None or y is None:
            continue
        dy = None if call.arrived is None else call.arrived.flatten(0, -2)
        operands = Operands(x.flatten(0, -2), weights.get(f"{name}.weight", layer.dense_weight().detach()), dy)
        bias = 0 if layer.bias is None else layer.bias.detach().float()
        made = {"forward": y.flatten(0, -2).float() - bias}
        gradient = run.gradients.get(f"{name}.weight")
        if gradient is not None and tied[id(layer.weight)] == 1:
            made["grad_weight"] = gradient.float()
        for gemm, figures in judge(recipe, operands, stored=layer.stored):
            if gemm not in made:
                continue
            own, defined = float(sqnr(operands.exact[gemm], made[gemm])), float(figures[0])
            # the result's own dtype has noise too, which is all of it where nothing is quantized
            if own < min(defined, -20 * math.log10(measure.roundoff(y.dtype))) - _DECIBELS:
                return (
                    f"{who} computes less well than its recipe at {name}: its {_GEMMS[gemm]} has {own:.1f} dB, and {recipe.name} "
                    f"is defined to have {defined:.1f} dB."
                )
    return ""


def _few(reasons: list[str], most: int = 3) -> list[str]:
    return reasons[:most] + (
        [f"and {len(reasons) - most} more of its parameters differ"] if len(reasons) > most else []
    )


def _some(differing: Mapping[str, str], most: int = 8) -> list[str]:
    """Return the lines of parameters that differ; those that differ in the number of their block alone share one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, how in differing.items():
        groups.setdefault((re.sub(r"\.\d+\.", ".*.", name), how), []).append(name)
    lines = [
        f"{names[0]} {how}" if len(names) == 1 else f"{pattern} {how} ({len(names)} of them)"
        for (pattern, how), names in groups.items()
    ]
    return lines[:most] + ([f"{len(lines) - most} more lines of parameters that differ"] if len(lines) > most else [])
