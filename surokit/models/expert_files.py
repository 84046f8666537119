"""Read and write the experts of a block as folders have them: a tensor for each projection of each expert.

    mixtral     block_sparse_moe.gate, block_sparse_moe.experts.M.w1 (gate), .w3 (up), .w2 (down)
    qwen3_moe   mlp.gate, mlp.experts.M.gate_proj, .up_proj, .down_proj

In the model all experts of a block share one parameter, in which gate and up lie on top of each other. It is filled expert by
expert, so that no more than one expert exists twice. Of quantized folders fine-grained FP8 is known, where the blocks of gate and
up lie in one grid.

E experts, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surokit.errors import CheckpointError
from surokit.models.config import DecoderConfig
from surokit.models.folder import Tensors, Wanted
from surokit.models.gathering import whole
from surokit.models.layouts import FineGrainedFP8, Layout, Shape, copied
from surokit.models.sparse import SparseMLP
from surokit.nn.experts import ExpertsLinear
from surokit.quantized import Quantized, quantize
from surokit.quantizer import Quantizer

_PARTS = {
    "mixtral": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    "qwen3_moe": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}


@dataclass(frozen=True)
class ExpertFiles:
    """An ExpertFiles knows what a folder calls the tensors of one block's sparse MLP.

    path: the module's, "model.layers.0.mlp". family: the config's model_type.
    """

    path: str
    module: SparseMLP
    family: str

    @property
    def _prefix(self) -> str:
        return f"{self.path.removesuffix('.mlp')}.block_sparse_moe" if self.family == "mixtral" else self.path

    @property
    def router(self) -> str:
        """Return the name of the router's weight."""
        return f"{self._prefix}.gate.weight"

    @property
    def live(self) -> dict[str, ExpertsLinear]:
        """Return the weights by their names in the model."""
        return {f"{self.path}.experts.{name}": weight for name, weight in self.module.experts.projections.items()}

    @property
    def experts(self) -> str:
        """Return the path of the experts in the model."""
        return f"{self.path}.experts"

    def of(self, weight: ExpertsLinear, expert: int) -> tuple[str, ...]:
        """Return the names of the tensors that are one expert's part of a weight, from its first row on."""
        parts = _PARTS[self.family][weight.name]
        return tuple(f"{self._prefix}.experts.{expert}.{part}.weight" for part in parts)

    def shape(self, weight: ExpertsLinear) -> Shape:
        """Return the shape [N, K] of each of these."""
        return weight.out_features // len(_PARTS[self.family][weight.name]), weight.in_features

    def _names(self, weight: ExpertsLinear) -> list[str]:
        return [name for expert in range(weight.experts) for name in self.of(weight, expert)]

    # -- reading

    def wanted(self, layout: Layout | None, found: Mapping[str, Wanted]) -> dict[str, Wanted]:
        """Return what the files must have."""
        wanted = {self.router: Wanted(tuple(self.module.gate.weight.shape))}
        for weight in self.module.experts.projections.values():
            shape = self.shape(weight)
            for name in self._names(weight):
                held = layout is not None and layout.holds(name, found)
                wanted |= layout.wanted(name, shape, found) if layout and held else {name: Wanted(shape)}
        return wanted

    def fill_router(self, tensors: Tensors, device: torch.device) -> None:
        """Give the router's weight memory on `device` and its values."""
        gate = self.module.gate
        gate.weight = nn.Parameter(copied(tensors[self.router], gate.weight.dtype, device))

    def fill(
        self,
        weight: ExpertsLinear,
        layout: Layout | None,
        tensors: Tensors,
        found: Mapping[str, Wanted],
        device: torch.device,
        storage: Quantizer | None,
    ) -> None:
        """Give a weight of all experts memory on `device` and its values.

        storage: quantizes each expert as it comes, unless it is quantized in the files.
        """
        dtype, names = weight.weight.dtype, self._names(weight)
        held = sum(layout is not None and layout.holds(name, found) for name in names)
        if held:
            assert layout is not None
            self._check_readable(weight, layout, held == len(names))
            weight.set_stored(self._stored(weight, layout, tensors, device))
        elif storage is not None:
            weight.set_stored(
                quantize(torch.cat([copied(tensors[name], dtype, device) for name in self.of(weight, expert)]), storage)
                for expert in range(weight.experts)
            )
        else:
            w_ENK = torch.empty(weight.weight.shape, dtype=dtype, device=device)
            rows, _ = self.shape(weight)
            for expert, w_NK in enumerate(w_ENK):
                for part, name in zip(w_NK.split(rows), self.of(weight, expert), strict=True):
                    part.copy_(tensors[name])
            setattr(self.module.experts, weight.name, nn.Parameter(w_ENK))

    def _stored(
        self, weight: ExpertsLinear, layout: Layout, tensors: Tensors, device: torch.device
    ) -> Iterator[Quantized]:
        shape = self.shape(weight)
        for expert in range(weight.experts):
            parts = [layout.read(name, shape, tensors, device) for name in self.of(weight, expert)]
            joined = tuple(torch.cat(held) for held in zip(*(Q.parts for Q in parts), strict=True))
            yield Quantized.of(parts[0].quantizer, joined, (weight.out_features, weight.in_features))

    def _check_readable(self, weight: ExpertsLinear, layout: Layout, all_of_them: bool) -> None:
        where = f"{self.experts}.{weight.name}"
        if not all_of_them:
            raise CheckpointError(
                f"Some experts of {where} are quantized in the folder and others are not: load one that is all of one kind."
            )
        if why := self._unfit(weight, layout):
            raise CheckpointError(f"The experts of {where} {why}: load the unquantized model and give a recipe.")

    def _unfit(self, weight: ExpertsLinear, layout: Layout) -> str:
        """Return why the weight cannot be held, or written, in this layout; "" where it can."""
        rows, _ = self.shape(weight)
        if not isinstance(layout, FineGrainedFP8):
            return f"are stored as {type(layout).__name__}, and experts are read and written in fine-grained FP8 only"
        if rows != weight.out_features and rows % layout.rows:
            return f"have {rows} rows of gate and of up, which blocks of {layout.rows} rows do not divide"
        return ""

    # -- writing

    def check_writable(self, layout: Layout | None) -> None:
        """Raise CheckpointError for a storage that has no format here."""
        for path, weight in self.live.items():
            if weight.storage is not None and layout is not None and (why := self._unfit(weight, layout)):
                raise CheckpointError(f"The experts of {path} {why}: apply surokit.BF16 first.")

    def tensors(self, layout: Layout | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield what is written: views of the parameters, or of what is gathered of them; `check_writable` comes before."""
        yield self.router, whole(self.module.gate.weight)
        for weight in self.live.values():
            codes_ENK, *scales_E = (whole(part) for part in (weight.weight, *weight.stored_scales))
            rows, _ = self.shape(weight)
            for expert in range(weight.experts):
                names = self.of(weight, expert)
                if weight.storage is None:
                    yield from zip(names, codes_ENK[expert].split(rows), strict=True)
                    continue
                assert isinstance(layout, FineGrainedFP8)
                parts = (codes_ENK[expert], *(scales[expert] for scales in scales_E))
                Q = Quantized.of(weight.storage, parts, (weight.out_features, weight.in_features))
                grid = -(-rows // layout.rows)
                for name, codes, scales in zip(names, Q.codes.split(rows), Q.scales.split(grid), strict=True):
                    part = Quantized.of(Q.quantizer, (codes, scales), (rows, weight.in_features))
                    yield from layout.tensors(name, part, dtype).items()


def expert_files(model: nn.Module, config: DecoderConfig, family: str | None = None) -> dict[str, ExpertFiles]:
    """Return those of each block with experts, by the sparse MLP's path. family: the config's own unless given."""
    family = family or config.family
    sparse = {name: module for name, module in model.named_modules() if isinstance(module, SparseMLP)}
    return {name: ExpertFiles(name, module, family) for name, module in sparse.items() if family is not None}
