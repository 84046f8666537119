"""A recipe says how the three products of a linear layer are quantized, and how a frozen weight is stored.

    y = x w'      forward
    dx = dy w     grad_input
    dw = dy' x    grad_weight

A `Recipe` is a frozen value made of two independent choices, three `Gemm`s and a storage, plus an adapter and rules by layer
name. Named recipes are values of this one type; derived recipes are new values:

>>> print(FP8_ROWWISE.keep("layers.0.*"))
fp8-rowwise   y = Q(x)Q(w)'   dx = Q(dy)Q(w)   dw = Q(dy)'Q(x)   x,w,dy: e4m3  per row   bf16: lm_head, layers.0.*

A run may go over to other products: `FP4.then(FP4.but(forward=BF16), at=0.82)` is one recipe too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Literal, TypeAlias, get_args

from surokit.formats import E2M1, E4M3, E5M2, NF4, Kind
from surokit.quantizer import EDEN_BLOCK, MX, NV, Block, NFBlock, PerRow, PerTensor, Quantizer, kind_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Init: TypeAlias = Literal["kaiming", "loftq"]  # how an adapter is initialized
# the operands of each product, in the order they are written above
ROLES = {"forward": ("x", "w"), "grad_input": ("dy", "w"), "grad_weight": ("dy", "x")}


@dataclass(frozen=True)
class Gemm:
    """A Gemm holds the quantizers of a product's two operands, in the order they are written above; None stays bfloat16.

    `fast_accumulation` lets Hopper's tensor cores keep partial sums at lower precision where a scale is a tensor's or a row's; the
    recipes use it forward only.
    """

    a: Quantizer | None = None
    b: Quantizer | None = None
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        for name, q in (("a", self.a), ("b", self.b)):
            if not isinstance(q, Quantizer | None):
                raise TypeError(f"Gemm({name}=...) takes a surokit.Quantizer or None, not {q!r}.")

    @property
    def quantized(self) -> bool:
        return self.a is not None or self.b is not None

    @property
    def kind(self) -> Kind | None:
        """Return how tensor cores call this product, or None where none computes it."""
        return kind_of(self.a, self.b)

    def to_dict(self) -> dict[str, Any]:
        a, b = (q.to_dict() if q else None for q in (self.a, self.b))
        return {"a": a, "b": b, "fast_accumulation": self.fast_accumulation}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Gemm:
        a, b = (Quantizer.from_dict(data[key]) if data[key] else None for key in ("a", "b"))
        return Gemm(a, b, data["fast_accumulation"])


@dataclass(frozen=True)
class Lora:
    """A Lora is a low-rank adapter (Hu et al., 2021): y + alpha / rank * B A x, with A and B in the model's dtype, never
    quantized.

    init: how A and B begin. "kaiming" is A Kaiming-uniform and B zero, so that y is unchanged at first. "loftq" is, over stored
    weights, the best approximation of this rank to what quantizing them lost (surokit/nn/loftq.py).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS
    init: Init = "kaiming"

    def __post_init__(self) -> None:
        if not _whole(self.rank):
            raise TypeError(f"lora(rank={self.rank!r}): the rank is a whole number.")
        if self.rank < 1:
            raise ValueError(f"lora(rank={self.rank}): the rank is at least 1.")
        if not self.targets or not all(isinstance(target, str) for target in self.targets):
            raise ValueError('lora(targets=...) takes the names of layers, for example ("q_proj", "v_proj").')
        if self.init not in get_args(Init):
            raise ValueError(
                f"lora(init={self.init!r}): adapters are initialized by one of {', '.join(get_args(Init))}."
            )
        if self.fits_errors and not self.alpha > 0:
            raise ValueError(
                f'lora(alpha={self.alpha:g}, init="loftq"): alpha is above 0, since A and B are divided by it.'
            )

    @property
    def fits_errors(self) -> bool:
        """Return whether adapters over stored weights begin with what storing these lost."""
        return self.init == "loftq"

    def meant(self, name: str) -> tuple[str, ...]:
        """Return which of the targets mean the layer of this name: the end of its path, or a pattern for it."""
        return tuple(t for t in self.targets if t in _known_as(name) or fnmatch(name, t) or fnmatch(name, f"*.{t}"))


def _known_as(name: str) -> set[str]:
    """Return the names by which a target means a layer: experts hold gate and up in one weight."""
    leaf = name.rpartition(".")[2]
    return {leaf, "gate_proj", "up_proj"} if leaf == "gate_up_proj" else {leaf}


@dataclass(frozen=True)
class Rule:
    """A Rule says what happens to layers chosen by name or by position; the last rule that applies wins."""

    action: Literal["keep", "also"]
    pattern: str = ""
    first: int = 0
    last: int = 0
    last_share: float = 0.0

    def applies(self, name: str, blocks: int) -> bool:
        """Return whether this rule speaks of layer `name` in a model of `blocks` blocks (0: it has none)."""
        if self.pattern:
            return fnmatch(name, self.pattern) or fnmatch(name, f"*.{self.pattern}")
        block = block_of(name)
        if block is None:
            return False
        last = self.last or round(self.last_share * blocks)
        return block < self.first or block >= blocks - last

    def __str__(self) -> str:
        if self.pattern:
            return self.pattern
        if self.last_share:
            return f"last {self.last_share:.0%} of blocks"
        end, n = ("first", self.first) if self.first else ("last", self.last)
        return f"{end} block" if n == 1 else f"{end} {n} blocks"


def block_of(name: str) -> int | None:
    """Return the index of the block that a layer belongs to: the first number in its path, 3 for "model.layers.3.mlp.up_proj"."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def within_block(name: str) -> str:
    """Return a layer's path within its block, "mlp.up_proj" for "model.layers.3.mlp.up_proj"; the whole path where there is no
    block."""
    return re.sub(r"^(?:.*?\.)??\d+\.", "", name, count=1)


def count_blocks(names: Iterable[str]) -> int:
    """Return how many blocks a model with layers of these names has."""
    return 1 + max((b for b in map(block_of, names) if b is not None), default=-1)


@dataclass(frozen=True)
class Pays:
    """A format has to pay for a layer: it is planned to be faster than bfloat16 at this many tokens a step on this GPU."""

    tokens: int
    gpu: str

    def __str__(self) -> str:
        return f"no faster for {self.tokens:,} tokens on {self.gpu}"


@dataclass(frozen=True)
class Change:
    """A Change is what a run goes over to: `recipe` for the steps after the first `at`, or that share of all, rounded."""

    at: float
    recipe: Recipe

    def step(self, total: int | None) -> int:
        """Return after how many steps of a run of `total` the change comes; ValueError for a share of nobody knows what."""
        if isinstance(self.at, int):
            return self.at
        if total is None:
            raise ValueError(
                f"{self.recipe.name} is to begin after {self.at:.0%} of the run's steps, and nothing says how many these are: give "
                "a schedule that does, such as surokit.Cosine(steps=1000), or a number of steps, then(..., at=900)."
            )
        return round(self.at * total)

    def __str__(self) -> str:
        return f"after step {self.at:,}" if isinstance(self.at, int) else f"after {self.at:.4g} of the steps"


@dataclass(frozen=True)
class Recipe:
    """A Recipe is a complete training recipe; see the module's text. Hashable, derived and never mutated.

    `storage` is how frozen weights are held; a recipe with a storage freezes the base model and wants an adapter.
    `keeps_decoded` spends memory on time: see `decode_once`. `where_native` names a recipe whose forward and grad_input are
    taken on devices that compute them, in place of bfloat16 products over decoded weights: stored codes then meet as they are.
    `later` are the changes of a run (see `then`); everything else says how it begins.
    """

    name: str
    forward: Gemm = field(default_factory=Gemm)
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)
    storage: Quantizer | None = None
    adapter: Lora | None = None
    rules: tuple[Rule, ...] = (Rule("keep", "lm_head"),)
    min_features: int = 0
    pays: Pays | None = None
    keeps_decoded: bool | None = None
    where_native: str = ""
    later: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("A recipe needs a name: it is what tables and checkpoints show.")
        for product, gemm in zip(ROLES, self.gemms):
            if not isinstance(gemm, Gemm):
                raise TypeError(f"{self.name}: {product} is a surokit.Gemm of two quantizers, not {gemm!r}.")
        if not isinstance(self.storage, Quantizer | None):
            raise TypeError(f"{self.name}: storage is a surokit.Quantizer or None, not {self.storage!r}.")
        if self.storage is not None:
            self.storage.check_stores()
        if self.adapter and self.adapter.fits_errors and self.storage is None:
            raise ValueError(
                f'{self.name}: init="loftq" is for adapters over stored weights, and this recipe stores none: take one that does, '
                'as surokit.QNF4.lora(init="loftq"), or call store() before lora().'
            )
        quantizers = [q for gemm in self.gemms for q in (gemm.a, gemm.b) if q and isinstance(q.scaling, PerTensor)]
        lengths = {q.scaling.history for q in quantizers if isinstance(q.scaling, PerTensor) and q.scaling.history}
        if len(lengths) > 1:
            raise ValueError(
                f"{self.name}: delayed scales have histories of {sorted(lengths)} steps: give all the same."
            )

    # -- derived recipes

    def keep(self, *patterns: str) -> Recipe:
        """Keep layers bfloat16 whose name matches a pattern ("layers.0.*", "*.down_proj")."""
        return self._with_rules(*(Rule("keep", p) for p in patterns))

    def but(
        self,
        forward: Recipe | str | None = None,
        grad_input: Recipe | str | None = None,
        grad_weight: Recipe | str | None = None,
    ) -> Recipe:
        """Return the same recipe with some products of others: `FP4.but(forward=BF16)` computes its forward as BF16 does.

        What is stored or adapted, and the rules, stay. The name says what was taken from where, and finds the recipe again.
        """
        given = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}
        taken = {product: find_recipe(other) for product, other in given.items() if other is not None}
        if not taken:
            raise ValueError(
                "but() takes at least one product of another recipe, for example but(forward=surokit.BF16)."
            )
        if derived := next((other for other in taken.values() if "(" in other.name or other.later), None):
            raise ValueError(
                f"but() takes products of plain recipes, and {derived.name} is derived itself: take from its parts."
            )
        said = ", ".join(f"{product}={other.name}" for product, other in taken.items())
        gemms: dict[str, Any] = {product: getattr(other, product) for product, other in taken.items()}
        return self._each(lambda r: replace(r, name=f"{r.name}({said})", where_native="", **gemms))

    def then(self, recipe: Recipe | str, *, at: float) -> Recipe:
        """Return a recipe that a run begins with this one and goes on in another.

        at: after how many steps (an int), or after which share of all steps (a float below 1). NVIDIA trained in NVFP4 and
        computed the forward in bfloat16 after 8.2 of 10 trillion tokens (arXiv 2509.25149).

        Products and the layers that stay bfloat16 may differ, and the model has the same parameters: ValueError for other
        storage or another adapter, and for a change that comes before an earlier one.
        """
        recipe = find_recipe(recipe)
        if isinstance(at, bool) or not isinstance(at, int | float):
            raise TypeError(f"then(at={at!r}): a number of steps such as 900, or a share of all steps such as 0.9.")
        if at < 0 or (isinstance(at, float) and not at < 1):
            raise ValueError(f"then(at={at!r}): a whole number of steps from 0, or a share of all steps below 1.")
        if recipe.later:
            raise ValueError(
                f"{recipe.name} changes itself: give its parts one by one, first.then(second, at=...).then(third, at=...)."
            )
        if not self.has_parameters_of(recipe):
            raise ValueError(
                f"A run cannot go over from {self.name} to {recipe.name}: it would store weights in another way, or train other "
                "parameters. Only products and kept layers may change; a session's fork() begins with any recipe."
            )
        if self.later and type(self.later[-1].at) is type(at) and at <= self.later[-1].at:
            raise ValueError(
                f"then(at={at!r}): the change before comes {self.later[-1]}, so this one has to come later."
            )
        change = Change(at, recipe)
        return replace(self, name=f"{self.name} then {recipe.name} at {at!r}", later=(*self.later, change))

    def has_parameters_of(self, recipe: Recipe) -> bool:
        """Return whether a model has the same parameters under both: the same storage, layers that it stores, and adapters."""
        one, other = self.without_values, recipe.without_values
        kept = ("rules", "min_features", "pays") if self.storage else ()  # they say which layers are stored
        return all(getattr(one, name) == getattr(other, name) for name in ("storage", "adapter", *kept))

    def keep_first(self, n: int) -> Recipe:
        """Keep the first n blocks bfloat16."""
        return self._with_rules(Rule("keep", first=_count(n)))

    def keep_last(self, n: int | None = None, *, share: float | None = None) -> Recipe:
        """Keep the last n blocks, or that share of them, bfloat16; replaces an earlier keep_last, so 0 undoes it."""
        if (n is None) == (share is None):
            raise ValueError("keep_last() takes either a number of blocks or share=, for example keep_last(2).")
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"keep_last(share={share}): a share lies between 0 and 1.")
        rule = Rule("keep", last=_count(n)) if n is not None else Rule("keep", last_share=share or 0.0)
        added = (rule,) if rule.last or rule.last_share else ()
        return self._each(lambda r: replace(r, rules=(*(o for o in r.rules if not (o.last or o.last_share)), *added)))

    def also(self, *patterns: str) -> Recipe:
        """Quantize layers that a rule keeps out, for example also("lm_head")."""
        return self._with_rules(*(Rule("also", p) for p in patterns))

    def keep_small(self, features: int) -> Recipe:
        """Keep layers bfloat16 that have fewer input or output features than this."""
        features = _count(features)
        return self._each(lambda r: replace(r, min_features=features))

    def keep_slower(self, tokens: int, gpu: str) -> Recipe:
        """Keep layers bfloat16 that the format is planned to slow down at `tokens` a step on `gpu` ("H200").

        Planned from the GPU's peaks (surokit/hardware/linear.py), quantization included; the report says by how much.
        """
        if not _whole(tokens) or not isinstance(gpu, str):
            raise TypeError(
                "keep_slower(tokens, gpu) takes a whole number and a GPU's name, for example "
                f'keep_slower(8192, "H200"), not ({tokens!r}, {gpu!r}).'
            )
        if tokens < 1:
            raise ValueError(f"keep_slower(tokens={tokens}): a step has at least one token.")
        return self._each(lambda r: replace(r, pays=Pays(tokens, gpu)))

    def lora(
        self, rank: int = 16, alpha: float = 32.0, targets: Sequence[str] = PROJECTIONS, init: Init = "kaiming"
    ) -> Recipe:
        """Return the same recipe with a frozen base and a low-rank adapter on `targets`: the ends of layers' paths, or patterns.

        y gets alpha / rank * B A x, without dropout. init="loftq" begins with what storing the weights lost; see `Lora`.
        """
        targets = (targets,) if isinstance(targets, str) else targets
        adapter = Lora(rank, float(alpha), tuple(targets or ()), init)
        return self._each(lambda r: replace(r, adapter=adapter))

    def store(self, storage: Quantizer | Recipe) -> Recipe:
        """Return the same products over frozen weights stored as `storage` says: a quantizer, or a recipe whose storage is taken.

        Where a product would quantize the weight just as it is stored, the stored codes are multiplied as they are.
        """
        if not isinstance(storage, Recipe | Quantizer):
            raise TypeError(f"store() takes a surokit.Quantizer, or a recipe such as surokit.QNF4, not {storage!r}.")
        if isinstance(storage, Recipe):
            if storage.storage is None:
                raise ValueError(f"{storage.name} stores no weights: give a quantizer, or surokit.QFP8, QFP4 or QNF4.")
            name, quantizer = storage.name, storage.storage
        else:
            name, quantizer = str(storage.format), storage
        return self._each(lambda r: replace(r, name=f"{r.name}+{name}", storage=quantizer, where_native=""))

    def decode_once(self, keep: bool = True) -> Recipe:
        """Decode stored weights once a step: forward keeps them for backward, two bytes a parameter, same numbers. On a CPU
        they are kept from step to step.

        With keep=False each is decoded in forward and again in backward, and at most one layer's is there at a time. So it is
        where nothing is said, except in a session on a CPU, which keeps them where they take a quarter of the memory at most.
        """
        return self._each(lambda r: replace(r, keeps_decoded=keep))

    def _with_rules(self, *rules: Rule) -> Recipe:
        return self._each(lambda r: replace(r, rules=(*r.rules, *rules)))

    def _each(self, derive: Callable[[Recipe], Recipe]) -> Recipe:
        """Derive a recipe from what a run begins with and from all that it goes over to."""
        found = derive(self.parts[0])
        for change in self.later:
            found = found.then(derive(change.recipe), at=change.at)
        return found

    # -- what a run changes

    @property
    def parts(self) -> tuple[Recipe, ...]:
        """Return the recipes that a run has one after the other; itself where nothing changes."""
        if not self.later:
            return (self,)
        first = replace(self, name=self.name.partition(" then ")[0], later=())
        return (first, *(change.recipe for change in self.later))

    def part_at(self, done: int, total: int | None = None) -> int:
        """Return which of the `parts` computes the step after `done` steps of a run of `total`."""
        return max((i for i, change in enumerate(self.later, 1) if change.step(total) <= done), default=0)

    # -- what it says of a layer

    @property
    def gemms(self) -> tuple[Gemm, Gemm, Gemm]:
        """Return the three products: forward, grad_input, grad_weight."""
        return self.forward, self.grad_input, self.grad_weight

    @property
    def quantized_products(self) -> bool:
        """Return whether any of the three products leaves bfloat16."""
        return any(gemm.quantized for gemm in self.gemms)

    @property
    def quantized(self) -> bool:
        """Return whether any product or the storage leaves bfloat16."""
        return self.storage is not None or self.quantized_products

    def natively(self) -> Recipe:
        """Return the recipe as devices with native products for `where_native` carry it out; itself without one."""
        if not self.where_native:
            return self
        products = recipes[self.where_native]
        return replace(self, forward=products.forward, grad_input=products.grad_input, where_native="")

    @property
    def frozen_base(self) -> bool:
        return self.storage is not None or self.adapter is not None

    def takes_codes(self, storage: Quantizer) -> bool:
        """Return whether a product multiplies the codes of a weight stored so, where it would quantize it in the same way."""
        return any(q is not None and storage.same_codes(q) for q in (self.forward.b, self.grad_input.b))

    def kept_by(self, name: str, blocks: int = 0) -> Rule | None:
        """Return the rule that keeps layer `name` in bfloat16, or None."""
        deciding = None
        for rule in self.rules:
            if rule.applies(name, blocks):
                deciding = rule
        return deciding if deciding and deciding.action == "keep" else None

    @property
    def without_values(self) -> Recipe:
        """Return the recipe for a model whose adapters get their values from elsewhere: none are computed of what storing lost."""
        return replace(self, adapter=replace(self.adapter, init="kaiming")) if self.adapter else self

    @property
    def numbers(self) -> Recipe:
        """Return the recipe without what changes no number: whether decoded weights are kept."""
        return self._each(lambda r: replace(r, keeps_decoded=None))

    # -- as text and as data

    def algebra(self) -> str:
        """Return one line: the three products, the operands' quantizers, storage and adapter."""
        if not self.quantized:
            body = "y = x w'   dx = dy w   dw = dy' x   bf16"
        elif self.storage and not self.quantized_products:
            body = f"y = x W'   dx = dy W   W: frozen in {self.storage}"
            body += f"   where native: {self.where_native}" if self.where_native else ""
        else:
            f, i, w = self.forward, self.grad_input, self.grad_weight
            body = "   ".join(
                (
                    f"y = {_operand('x', f.a)}{_operand('w', f.b)}'",
                    f"dx = {_operand('dy', i.a)}{_operand('w', i.b)}",
                    f"dw = {_operand('dy', w.a)}'{_operand('x', w.b)}",
                    _formats(self),
                )
            )
            if self.storage:
                body += f"   W: frozen in {self.storage}"
        if self.storage and self.keeps_decoded:
            body += ", decoded once"
        if self.adapter:
            body += f"   LoRA r={self.adapter.rank}" + " LoftQ" * self.adapter.fits_errors
        return body

    def __str__(self) -> str:
        keeps = [str(r) for r in self.rules if r.action == "keep"]
        keeps += [f"fewer than {self.min_features} features"] if self.min_features else []
        keeps += [str(self.pays)] if self.pays else []
        kept = ", ".join(keeps)
        also = ", ".join(str(r) for r in self.rules if r.action == "also")
        line = f"{self.name}   {self.algebra()}"
        if self.quantized and kept:
            line += f"   bf16: {kept}"
        line += f"   also: {also}" if also else ""
        return "   ".join([line, *(f"{change}: {change.recipe}" for change in self.later)])

    def __repr__(self) -> str:
        return f"<Recipe {self}>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for checkpoints and tables; `from_dict` is its inverse."""
        return {
            "name": self.name,
            "forward": self.forward.to_dict(),
            "grad_input": self.grad_input.to_dict(),
            "grad_weight": self.grad_weight.to_dict(),
            "storage": self.storage.to_dict() if self.storage else None,
            "adapter": {**self.adapter.__dict__, "targets": list(self.adapter.targets)} if self.adapter else None,
            "rules": [dict(rule.__dict__) for rule in self.rules],
            "min_features": self.min_features,
            "pays": dict(self.pays.__dict__) if self.pays else None,
            "decoded_once": self.keeps_decoded,
            "where_native": self.where_native,
            "later": [{"at": change.at, "recipe": change.recipe.to_dict()} for change in self.later],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Recipe:
        adapter = data["adapter"]
        return Recipe(
            name=data["name"],
            forward=Gemm.from_dict(data["forward"]),
            grad_input=Gemm.from_dict(data["grad_input"]),
            grad_weight=Gemm.from_dict(data["grad_weight"]),
            storage=Quantizer.from_dict(data["storage"]) if data["storage"] else None,
            adapter=Lora(**{**adapter, "targets": tuple(adapter["targets"])}) if adapter else None,
            rules=tuple(Rule(**rule) for rule in data["rules"]),
            min_features=data["min_features"],
            # checkpoints of the first version do not say
            pays=Pays(**data["pays"]) if data.get("pays") else None,
            where_native=data.get("where_native", ""),
            keeps_decoded=data.get("decoded_once", data.get("keeps_decoded") or None),
            later=tuple(Change(change["at"], Recipe.from_dict(change["recipe"])) for change in data.get("later", ())),
        )


def _whole(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


def _count(n: int) -> int:
    if not _whole(n):
        raise TypeError(f"A number of blocks or features is a whole number, not {n!r}.")
    if n < 0:
        raise ValueError(f"A number of blocks or features cannot be negative, got {n}.")
    return n


def _operand(name: str, q: Quantizer | None) -> str:
    return f"Q({name})" if q else f"({name})"


_Operands: TypeAlias = list[tuple[str, Quantizer]]  # what a product quantizes, by role: x, w, dy


def _formats(recipe: Recipe) -> str:
    """Return "x,w: e4m3  dy: e5m2  delayed per tensor"; product by product where these quantize an operand differently."""
    products: dict[str, _Operands] = {
        product: [(role, q) for role, q in zip(roles, (gemm.a, gemm.b)) if q]
        for product, roles, gemm in zip(("y", "dx", "dw"), ROLES.values(), recipe.gemms)
    }
    everywhere = [operand for operands in products.values() for operand in operands]
    roles = dict.fromkeys(role for role, _ in everywhere)
    if len({(role, q.format, _scaling(q)) for role, q in everywhere}) == len(roles):
        words = [_by_format(everywhere)]
    else:
        words = [f"{product} ({_by_format(operands)})" for product, operands in products.items() if operands]
    drawn: dict[str, list[str]] = {}
    for role in roles:
        used = {product: q for product, operands in products.items() for r, q in operands if r == role}
        for rounding in dict.fromkeys(q.rounding for q in used.values() if q.draws):
            where = [product for product, q in used.items() if q.rounding == rounding]
            named = [role] if len(where) == len(used) else [f"{role} in {product}" for product in where]
            drawn.setdefault(rounding, []).extend(named)
    rotated = []
    for product, operands in products.items():
        turned = [role for role, q in operands if q.hadamard]
        rotated += [product] if len(turned) == 2 else [f"{role} in {product}" for role in turned]
    words += [f"{','.join(named)} {rounding}" for rounding, named in drawn.items()]
    words += [f"{','.join(rotated)} rotated"] if rotated else []
    return "  ".join(words)


def _by_format(operands: _Operands) -> str:
    """Return "x,w: e4m3  dy: e5m2  per tensor", or "x: e4m3 1x128 blocks  w: e4m3 128x128 blocks" where scalings differ."""
    scalings = dict.fromkeys(_scaling(q) for _, q in operands)
    shared = len(scalings) == 1
    by: dict[str, dict[str, None]] = {}
    for role, q in operands:
        by.setdefault(str(q.format) if shared else f"{q.format} {_scaling(q)}", {})[role] = None
    words = [f"{','.join(roles)}: {kind}" for kind, roles in by.items()]
    return "  ".join([*words, *scalings] if shared else words)


def _scaling(q: Quantizer) -> str:
    return str(q.scaling) + (f" 4/6 {q.four_over_six}" if q.four_over_six else "")


# -- the named recipes


def _fp8(name: str, forward: Quantizer, gradient: Quantizer) -> Recipe:
    return Recipe(
        name,
        forward=Gemm(forward, forward, fast_accumulation=True),
        grad_input=Gemm(gradient, forward),
        grad_weight=Gemm(gradient, forward),
    )


def _one_quantizer(name: str, x: Quantizer, w: Quantizer | None = None) -> Recipe:
    """Return products that quantize activations and gradients by `x`, weights by `w` where it differs."""
    w = w or x
    return Recipe(name, forward=Gemm(x, w), grad_input=Gemm(x, w), grad_weight=Gemm(x, x))


_HISTORY = PerTensor(history=1024)

BF16 = Recipe("bf16")
# TransformerEngine's DelayedScaling with its hybrid format
FP8 = _fp8("fp8", Quantizer(E4M3, _HISTORY), Quantizer(E5M2, _HISTORY))
# TransformerEngine's Float8CurrentScaling
FP8_CURRENT = _fp8("fp8-current", Quantizer(E4M3, PerTensor()), Quantizer(E5M2, PerTensor()))
# torchao's ROWWISE
FP8_ROWWISE = _fp8("fp8-rowwise", Quantizer(E4M3, PerRow()), Quantizer(E4M3, PerRow()))
# DeepSeek-V3 and TransformerEngine's Float8BlockScaling
FP8_BLOCK = _one_quantizer("fp8-block", Quantizer(E4M3, Block(1, 128)), Quantizer(E4M3, Block(128, 128)))
# OCP Microscaling as TransformerEngine trains with it: every operand quantized from high precision in both orientations
MXFP8 = _one_quantizer("mxfp8", Quantizer(E4M3, MX(32)))


def _fp4() -> Recipe:
    """Return the products of TransformerEngine's NVFP4: 16 x 16 tiles for weights, gradients rounded stochastically, grad_weight's
    operands rotated."""
    x, w = Quantizer(E2M1, NV(16)), Quantizer(E2M1, NV(16, 16))
    dy = replace(x, rounding="stochastic")
    return Recipe(
        "fp4",
        forward=Gemm(x, w),
        grad_input=Gemm(dy, w),
        grad_weight=Gemm(replace(dy, hadamard=16), replace(x, hadamard=16)),
    ).keep_last(share=0.15)


def _mxfp4() -> Recipe:
    """Return the products of Quartet (Castro et al., 2025): nearest forward, both gradients rotated and their dy rounded
    stochastically."""
    x = Quantizer(E2M1, MX(32))
    rotated = replace(x, hadamard=32)
    dy = replace(rotated, rounding="stochastic")
    return Recipe("mxfp4", forward=Gemm(x, x), grad_input=Gemm(dy, rotated), grad_weight=Gemm(dy, rotated))


def _quartet_ii() -> Recipe:
    """Return the products of Quartet II (Panferov et al., 2026): forward to nearest with the better scale of two, all operands of
    both gradients by MS-EDEN, from high precision."""
    x = Quantizer(E2M1, NV(16), four_over_six="mse")
    eden = Quantizer(E2M1, NV(16), rounding="eden", hadamard=EDEN_BLOCK)
    return Recipe("quartet-ii", forward=Gemm(x, x), grad_input=Gemm(eden, eden), grad_weight=Gemm(eden, eden))


FP4 = NVFP4 = _fp4()
MXFP4 = _mxfp4()
QUARTET_II = _quartet_ii()
# frozen weights in 128 x 128 blocks of E4M3 with plain float32 scales; products in bfloat16, or FP8_BLOCK's where native
QFP8 = Recipe("qfp8", storage=Quantizer(E4M3, Block(128, 128, pow2=False)), adapter=Lora(), where_native="fp8-block")
# frozen weights in NVFP4, each block's scale chosen for the smaller error (Cook et al., 2025, "four over six")
QFP4 = Recipe("qfp4", storage=Quantizer(E2M1, NV(16), four_over_six="mse"), adapter=Lora())
# QLoRA (Dettmers et al., 2023): NF4 with double quantization
QNF4 = Recipe("qnf4", storage=Quantizer(NF4, NFBlock(64, double=256)), adapter=Lora())

recipes: dict[str, Recipe] = {
    r.name: r for r in (BF16, FP8, FP8_CURRENT, FP8_ROWWISE, FP8_BLOCK, MXFP8, FP4, MXFP4, QUARTET_II, QFP8, QFP4, QNF4)
}
_ALIASES = {"nvfp4": "fp4", "qlora": "qnf4"}


def find_recipe(recipe: Recipe | str) -> Recipe:
    """Return a recipe as it is, or by name ("fp8-rowwise"; case and underscores do not matter).

    "fp4+qnf4" is FP4.store(QNF4), by the name that it has, and "fp8+lora" is FP8.lora(). So are "fp4(forward=bf16)" and
    "fp4 then fp4(forward=bf16) at 0.82".
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"A recipe is a surokit.Recipe or its name, not {type(recipe).__name__}: try surokit.FP8 or 'fp8'."
        )
    name = recipe.lower().replace("_", "-")
    name = _ALIASES.get(name, name)
    if name in recipes:
        return recipes[name]
    if changed := re.fullmatch(r"(.+) then (.+) at ([\d.e-]+)", name):
        begins, goes_on, at = changed.groups()
        return find_recipe(begins).then(goes_on, at=int(at) if at.isdigit() else float(at))
    if taken := re.fullmatch(r"(.+)\(((?:[a-z-]+=[^,()]+(?:, )?)+)\)", name):
        pairs = (pair.split("=") for pair in taken[2].split(", "))
        others = {product.replace("-", "_"): other for product, other in pairs}
        if unknown := others.keys() - ROLES.keys():
            raise ValueError(f"{recipe!r}: there is no product {min(unknown)!r}, only {', '.join(ROLES)}.")
        return find_recipe(taken[1]).but(**others)
    products, plus, storage = name.rpartition("+")
    if plus:
        found = find_recipe(products)
        return found.lora() if storage == "lora" else found.store(find_recipe(storage))
    if " then " in name:
        raise ValueError(
            f"{recipe!r} does not say when the recipe changes: write a share of the steps, or their number, '{name} at 0.9'."
        )
    near = difflib.get_close_matches(name, recipes, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"There is no recipe {recipe!r}: {hint}known are {', '.join(recipes)}.")
