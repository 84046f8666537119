"""Count FLOPs, bytes and launches of a micro-batch of which `Setup.fusion` (surokit/fusion.py) computes operations together.

    norm + residual         forward: stream delta, sum x codes      backward: dy sum dresidual, dx
    SwiGLU                  forward: gate up, x codes               backward: dy gate up, dgate dup
    QK-norm and rotation    forward: q k, q k                       backward: dq dk q k, dq dk
    layers of one input     it is quantized once for all of them; one product where the recipe quantizes them as one
    adapter                 the A of these in one product; B writes y and A's gradient dx, and the products add onto them;
                            one of codes adds onto nothing, and there B is added into y, and A's gradient into dx
    frozen quantized W      its codes are kept; W' is transposed for each product, or kept too

x itself is written where an adapter, a product or a gradient reads values, its codes where one reads codes. Tensor cores read both
operands along the dimension that is summed: the kernel that makes codes writes those of the transpose too, and reads nothing
twice; only a W that is kept or stored as codes is transposed for its product. Products compute the same as unfused (traffic.py);
what changes is how often an operand is read, and how many kernels there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

from surokit.hardware.gpus import Gpu
from surokit.hardware.linear import Kernel, Pass, turn
from surokit.planner.counts.flops import Compute, Placement, Product
from surokit.planner.counts.memory import Setup
from surokit.planner.counts.traffic import Load, MicroBatch, data_moves
from surokit.planner.inputs.fusion import comes_quantized
from surokit.planner.inputs.shape import Shape

_PRODUCTS = ("forward", "grad_input", "grad_weight")


class FusedStep(MicroBatch):
    """A FusedStep counts one micro-batch in which `setup.fusion` computes operations together."""

    def __init__(self, shape: Shape, compute: Compute, recipe: Any, setup: Setup, gpu: Gpu) -> None:
        super().__init__(shape, compute, recipe, setup, gpu)
        self.fusion = setup.fusion
        self.moves = data_moves("surokit", self.width)
        self.every = frozenset(range(shape.layers))
        self.groups: dict[str, list[Placement]] = {}  # the layers that read a tensor, in order
        for place in self.places.values():
            if place.weight.kind != "head":
                self.groups.setdefault(place.weight.reads, []).append(place)
        self.x_codes: Any = getattr(getattr(recipe, "forward", None), "a", None)
        self.x_bytes = self.x_codes.bits / 8 if self.x_codes is not None else float(self.width)
        x_t: Any = getattr(getattr(recipe, "grad_weight", None), "b", None)
        # turns_x: a weight's gradient reads forward's codes of x, transposed; gate_gives_both: it reads codes with scales of their
        # own, which the gate's kernel writes as well
        self.turns_x = x_t is not None and x_t == self.x_codes and x_t.transposable
        both = x_t is not None and x_t == self.x_codes and x_t.both_in_one_pass
        self.gate_gives_both = both and 0 < x_t.scaling.tile()[1] <= 128
        self.codes_come = comes_quantized(self.x_codes) and (not self.base_trains or x_t is None or self.turns_x)

    # -- outputs of norm and SwiGLU

    def _together(self, reads: str) -> bool:
        """True if the operation that makes this tensor is fused with the layers that read it."""
        f = self.fusion
        return {"attention": f.norm, "mlp": f.norm, "mlp product": f.gate}.get(reads, False)

    def _staged(self, reads: str) -> bool:
        """True if the layers that read this tensor are one operation of autograd."""
        f = self.fusion
        return self._together(reads) or f.joint or f.adapters or f.frozen != "no"

    def _writes_codes(self, reads: str) -> bool:
        return self._together(reads) and (self.codes_come or self._writes_both_scales(reads))

    def _writes_both_scales(self, reads: str) -> bool:
        """True if x is made together with codes of x and of its transpose, which have scales of their own."""
        return self.gate_gives_both and reads == "mlp product" and comes_quantized(self.x_codes) and self.base_trains

    def _in_rows(self, product: str) -> bool:
        """True if the kernel that makes codes for this product writes those of the transpose too."""
        return self.gpu.multiplies(getattr(getattr(self.recipe, product, None), "kind", None))

    def _adapted_blocks(self, reads: str) -> frozenset[int]:
        """Return the blocks in which an adapter reads this tensor."""
        return frozenset[int]().union(*(place.adapted for place in self.groups[reads]))

    def _wants_values(self, reads: str) -> frozenset[int]:
        """Return the blocks in which an adapter or a weight's gradient reads values of this tensor, although products read its
        codes."""
        from_codes = self.turns_x or self._writes_both_scales(reads)
        return self._adapted_blocks(reads) if from_codes or not self.base_trains else self.every

    def _written(self, reads: str) -> tuple[float, float]:
        """Return (share of the blocks in which this tensor's codes are written with it, share in which its values are written)."""
        if not self._writes_codes(reads):
            return 0.0, 1.0
        places = self.groups[reads]
        values = self._wants_values(reads).union(*(set(place.weight.layers) - place.layers for place in places))
        return max(place.quantized / place.weight.count for place in places), len(values) / len(self.every)

    def between(self) -> Iterator[Load]:
        s, e, blocks = self.shape, self.width, self.shape.layers
        if self.fusion.norm:
            # a block's second norm takes the sum before it; the block's own sum stands alone
            yield from self._source("attention", s.width, 1, 4, blind=self.blind)
            yield from self._source("mlp", s.width, 3, 4)
        else:
            yield from self._moved("norm", "norm", 2 * blocks, 2 * blocks * s.width, blind=self.blind)
        yield from self._moved("norm", "last norm", 1, s.width, layered=False)
        turned = blocks * (s.query_width + s.kv_width)
        if self.fusion.qk:
            backward, launches = (3, 4 if self.base_trains else 1) if s.qk_norm else (2, 1)
            yield from self._one("q and k", blocks, turned, 2 * e, backward * e, (1, launches))
            if self._joins("forward", self.groups["attention"][0].quantized > 0, self.groups["attention"]):
                # v goes into the one gradient that the product reads, and without norms out of what it wrote
                out = 0 if s.qk_norm else 1
                yield from self._one("v", blocks, blocks * s.kv_width, 2 * e * out, 2 * e, (out, 1))
        else:
            if s.qk_norm:
                yield from self._moved("norm", "q and k norm", 2 * blocks, turned)
            yield from self._moved("rope", "rope", 2 * blocks, turned)
        if self.fusion.gate:
            yield from self._source("mlp product", s.ffn, 2, 5)
        else:
            yield from self._moved("swiglu", "swiglu", blocks, blocks * s.ffn)
        yield from self._sums()

    def _source(self, reads: str, width: int, forward: int, backward: int, blind: int = 0) -> Iterator[Load]:
        """Yield the loads of a norm or gate with the quantization after it. forward, backward: elements that it reads and writes
        beside x."""
        e, blocks, normed = self.width, self.shape.layers, reads != "mlp product"
        name = f"norm of {reads}" if normed else "swiglu"
        codes, values = self._written(reads)
        # a delayed scale takes a launch more, as in layers.py
        launches = 1 + (codes if self.x_codes is not None and self.x_codes.delayed else 0.0)
        twice = self.base_trains and (self._in_rows("grad_weight") or self._writes_both_scales(reads))
        bytes_ = (forward + values) * e + codes * self.x_bytes * (2 if twice else 1)
        back = 2 if normed and self.base_trains else 1
        yield from self._one(name, blocks, blocks * width, bytes_, backward * e, (launches, back), blind=blind)
        if self.setup.recompute == "selective" and self.backward and (wanted := len(self._wants_values(reads))):
            # a norm's in a kernel of its own, a gate's beside its gradient
            moved = self.tokens * wanted * width * (2 if normed else 1) * e
            yield Load(name, "elementwise", "recompute", "move", wanted, 0.0, moved, wanted * normed)

    def _one(
        self,
        module: str,
        count: int,
        width: float,
        forward: float,
        backward: float,
        launches: tuple[float, float],
        blind: int = 0,
    ) -> Iterator[Load]:
        """Yield the loads of an operation with a kernel each way, over `width` elements a token of all its instances. forward,
        backward: bytes an element."""
        elements, share = self.tokens * width, (count * self.reached - blind) / count

        def load(step: Pass, each: float, launches: float) -> Load:
            return Load(module, "elementwise", step, "move", count, 0.0, elements * each, count * launches)

        yield load("forward", forward, launches[0])
        if again := self.repeated(module):
            yield load("recompute", forward * again, launches[0] * again)
        if self.backward:
            yield load("backward", backward * share, launches[1] * share)

    # -- products

    def _kernels(self, p: Product, quantized: bool, rows: float) -> Iterator[Kernel]:
        name, _, adapter = p.module.partition(".lora_")
        place = self.places.get(name)
        kernels = super()._kernels(p, quantized, rows)
        if place is None or place.weight.kind == "head":
            return kernels
        if adapter:
            return self._adapter(adapter, place, p, rows, kernels) if self.fusion.adapters else kernels
        if self._staged(place.weight.reads):
            kernels = self._layer(place, p, quantized, rows, kernels)
        return kernels

    def _layer(
        self, place: Placement, p: Product, quantized: bool, rows: float, kernels: Iterator[Kernel]
    ) -> Iterator[Kernel]:
        reads, e = place.weight.reads, self.width
        like = self._like(reads, quantized)
        leads, joined = like[0] is place, {part: self._joins(part, quantized, like) for part in _PRODUCTS}
        x = rows * p.k * (self.x_bytes if quantized else e)
        coded = quantized and self._writes_codes(reads)
        if coded and leads and self.base_trains and self.turns_x and not self._in_rows("grad_weight"):
            yield turn("forward", "x", self.x_codes, rows * p.k)
        for kernel in kernels:
            if kernel.role == "x" and (not leads or coded):
                continue
            if kernel.role == "w" and self._kept(kernel):
                if not self._turns_kept(kernel):
                    continue
                kernel = turn(kernel.step, "w", self.recipe.grad_input.b, p.n * p.k)
            if kernel.role and not leads and joined["forward" if kernel.step == "forward" else "grad_input"]:
                kernel = replace(kernel, launches=0)  # with the first's, which lies beside it
            if kernel.part in _PRODUCTS and not leads and joined[kernel.part]:  # x is read, or dx written, by the first
                shared = rows * p.k * e if kernel.part == "grad_input" else x
                kernel = replace(kernel, bytes=kernel.bytes - shared, launches=0)
            elif kernel.part == "grad_input":
                share = self._adds_onto_dx(reads, quantized, leads)
                kernel = replace(kernel, bytes=kernel.bytes + share * rows * p.k * e)
            if kernel.part == "forward":
                blocks = place.layers if quantized else set(place.weight.layers) - place.layers
                share = len(blocks & self._adds_onto_y(place, quantized)) / len(blocks)
                kernel = replace(kernel, bytes=kernel.bytes + share * rows * p.n * e)
            yield kernel

    def _like(self, reads: str, quantized: bool) -> list[Placement]:
        """Return the layers that read this tensor and are quantized in some block, or with quantized=False those that in some are
        not."""
        return [o for o in self.groups[reads] if (o.quantized > 0 if quantized else o.quantized < o.weight.count)]

    def _adds(self, part: str, quantized: bool) -> bool:
        """True if a product can add onto a tensor: one whose operands are both codes cannot, native or emulated."""
        gemm = getattr(self.recipe, part, None)
        return not quantized or getattr(gemm, "a", None) is None or getattr(gemm, "b", None) is None

    def _adds_onto_dx(self, reads: str, quantized: bool, leads: bool) -> float:
        """Return in which share of the blocks this product adds onto dx, which the product before it or adapters have written."""
        live = self.flow[reads]
        if not self._adds("grad_input", quantized) or not live:
            return 0.0
        adapted = self._adapted_blocks(reads) if self.fusion.adapters else frozenset[int]()
        return len(live & adapted) / len(live) if leads else 1.0

    def _adds_onto_y(self, place: Placement, quantized: bool) -> frozenset[int]:
        """Return the blocks in which this product adds onto y, which the adapters of all its layers have written before it."""
        if not self.fusion.adapters or not self._adds("forward", quantized):
            return frozenset()
        like = self._like(place.weight.reads, quantized)
        members = like if self._joins("forward", quantized, like) else [place]
        return place.adapted.intersection(*(other.adapted for other in members))

    def _kept(self, kernel: Kernel) -> bool:
        """True if the codes that this kernel makes of a frozen weight are kept from step to step (surokit/nn/weight_cache.py)."""
        kept = self.fusion.frozen
        if self.base_trains or kept == "no" or not getattr(self.recipe, "quantized_products", False):
            return False
        b, b_t, storage = self.recipe.forward.b, self.recipe.grad_input.b, self.recipe.storage
        if storage is not None:
            return bool(kept == "transposed" and kernel.part == "turn" and storage.same_codes(b_t))
        if kernel.step == "backward":
            # W' is the codes of W, turned, where its tiles are square; else it is quantized by itself
            return bool(kept == "transposed" or (kernel.part == "quantize" and b == b_t and b_t.transposable))
        return b is not None

    def _turns_kept(self, kernel: Kernel) -> bool:
        """True if codes that are kept are transposed in place of this kernel, which would have written those of W'."""
        made = kernel.part == "quantize" and kernel.step == "backward" and self.fusion.frozen == "codes"
        return made and not self.recipe.grad_input.b.packed and self._in_rows("grad_input")

    def _joins(self, part: str, quantized: bool, like: list[Placement]) -> bool:
        """True if layers that read one input are one product: no block of a scale may reach from one layer into another."""
        if not self.fusion.joint or len(like) == 1:
            return False
        sizes = [place.weight.n for place in like]
        if not quantized:
            return True
        recipe = self.recipe
        rows = [recipe.forward.b]
        columns = []
        if part != "forward":
            columns = [recipe.grad_input.a, recipe.grad_input.b]
            rows += [recipe.grad_weight.a] if self.base_trains else []
        one = all(q is None or q.joins(d, sizes) for d, some in enumerate((rows, columns)) for q in some)
        return one and (recipe.storage is None or recipe.storage.separates(0, sizes))

    def _adapter(
        self, which: str, place: Placement, p: Product, rows: float, kernels: Iterator[Kernel]
    ) -> Iterator[Kernel]:
        """Yield the kernels of an adapter: one product computes the A of all layers with one input. B reads and adds onto a y that
        is written before it, and A's gradient likewise onto dx."""
        reads, e, blocks = place.weight.reads, self.width, len(place.adapted)
        before = takewhile(lambda other: other is not place, self.groups[reads])
        leads = len(place.adapted.difference(*(other.adapted for other in before))) / blocks
        coded, plain = place.adapted & place.layers, place.adapted - place.layers
        after_y = len((coded - self._adds_onto_y(place, True)) | (plain - self._adds_onto_y(place, False))) / blocks
        for kernel in kernels:
            match which, kernel.part:
                case "A", part:
                    x = leads - 1 + (leads * self._after_dx(reads) if part == "grad_input" else 0.0)
                    yield replace(kernel, bytes=kernel.bytes + x * rows * p.k * e, launches=kernel.launches * leads)
                case "B", "forward":
                    yield replace(kernel, bytes=kernel.bytes + after_y * rows * p.n * e)
                case _:
                    yield kernel

    def _after_dx(self, reads: str) -> float:
        """Return the share of the adapted blocks in which A's gradient adds onto dx, because the product of codes before it cannot
        add."""
        places, count = self.groups[reads], 0
        blocks = self.flow[reads] & self._adapted_blocks(reads)
        for block in blocks:
            coded = [block in place.layers and not self._adds("grad_input", True) for place in places]
            count += all(coded) or (any(coded) and not coded[0])
        return count / max(1, len(blocks))

    # -- sums

    def _sums(self) -> Iterator[Load]:
        blocks, width = self.shape.layers, self.shape.width
        for load in super()._sums():
            if load.module == "gradients that meet" or (load.group == "adapter" and self.fusion.adapters):
                continue
            if load.module != "residual" or not self.fusion.norm:
                yield load
        if self.fusion.norm:
            yield from self._sum("residual", "elementwise", "forward", blocks, blocks * width)
        count = elements = 0
        for reads, places in self.groups.items():
            # products of codes cannot add into one another's dx
            live, k = self.flow[reads], places[0].weight.k
            like = [place for place in places if place.quantized]
            calls = 0
            if not self._staged(reads):
                calls = len(live) * (len(places) - 1)
            elif len(like) > 1 and self.recipe.quantized_products and not self._joins("grad_input", True, like):
                calls = min(len(live & place.layers) for place in like) * (len(like) - 1)
            count, elements = count + calls, elements + calls * k
        yield from self._sum("gradients that meet", "elementwise", "backward", count, elements)
