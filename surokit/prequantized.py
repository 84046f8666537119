"""Read the weights that other libraries quantized in a live model: their codes and scales, as they lie in memory.

    bitsandbytes         Linear4bit     NF4 and its own FP4 in blocks of 64, double quantization or not
    transformers         FP8Linear      E4M3 in blocks, or with one scale (DeepSeek, Qwen3-FP8, MiniMax)
    torchao              Float8Tensor   E4M3 with a scale a tensor, a row or a block
    compressed-tensors   Linear         E4M3 with a scale a tensor, a row ("channel") or a block

A library is known by the names of its classes, so that none has to be there. What is read shares the memory of codes; scales that
another dtype holds become float32, exactly.

N out_features, K in_features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surokit.formats import BNB_FP4, E4M3, NF4, Codebook
from surokit.kernels.reference.dynamic8bit import numbers
from surokit.quantized import Quantized
from surokit.quantizer import Block, NFBlock, PerRow, PerTensor, Quantizer, Scaling


class Library(ABC):
    """A Library knows how another library keeps the quantized weight of a linear layer."""

    name: ClassVar[str]

    @abstractmethod
    def holds(self, layer: nn.Module) -> bool:
        """Return whether this is a layer of the library whose weight it has quantized."""

    @abstractmethod
    def read(self, layer: Any) -> Quantized:
        """Return the weight [N, K]. Raises ValueError, with the reason in a few words, for one that our formats do not have."""

    def compute_dtype(self, layer: Any) -> torch.dtype | None:
        """Return the dtype in which the layer multiplies whatever x has, or None."""
        return None

    def forget(self, layer: Any) -> None:
        """Remove what the library keeps at the layer and no weight of ours needs."""
        return


class BitsAndBytes(Library):
    """BitsAndBytes has codes and absmaxes in a `quant_state` of the weight."""

    name = "bitsandbytes"
    _formats: ClassVar[dict[str, Codebook]] = {"nf4": NF4, "fp4": BNB_FP4}

    def holds(self, layer: nn.Module) -> bool:
        return _is_a(layer, "Linear4bit", "bitsandbytes")

    def read(self, layer: Any) -> Quantized:
        state = getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)
        if state is None:
            raise ValueError("model.to(device), which quantizes it, has to come first")
        format = self._formats.get(state.quant_type)
        if format is None or not _equal(state.code, format.values):
            raise ValueError(f"it has a table of numbers of its own ({state.quant_type})")
        if state.blocksize != 64:
            raise ValueError(f"it has blocks of {state.blocksize} and surokit reads blocks of 64")
        codes, scales = layer.weight.data.view(torch.uint8), state.absmax
        second: tuple[Tensor, ...] = ()
        if getattr(state, "packing_format_for_cpu", False):
            codes, scales = _unpacked(codes), scales.t().contiguous().float()
        elif state.nested:
            nested = state.state2
            if nested.blocksize != 256 or not _equal(nested.code, numbers(signed=True)):
                raise ValueError("its double quantization is not in blocks of 256, or has numbers of its own")
            second = nested.absmax.float(), state.offset.float().reshape(1)
        return of_bitsandbytes(format, codes, scales if second else scales.float(), second, tuple(state.shape))

    def compute_dtype(self, layer: Any) -> torch.dtype | None:
        return getattr(layer, "compute_dtype", None)

    def forget(self, layer: Any) -> None:
        for name in ("quant_state", "quant_storage", "compute_type_is_set", "support_avx512bf16_for_cpu"):
            vars(layer).pop(name, None)


class TransformersFP8(Library):
    """TransformersFP8 has E4M3 codes, and `weight_scale_inv` for each block or one for all."""

    name = "transformers' FP8"

    def holds(self, layer: nn.Module) -> bool:
        return _is_a(layer, "FP8Linear", "transformers") and _codes_in(layer).itemsize == 1

    def read(self, layer: Any) -> Quantized:
        if layer.weight.dtype != torch.float8_e4m3fn:
            raise ValueError(f"its codes are {_named(layer.weight.dtype)} and surokit reads float8_e4m3fn")
        scales, block = layer.weight_scale_inv.data, layer.block_size
        pow2 = scales.dtype == torch.float8_e8m0fnu
        scaling: Scaling = Block(block[0], block[1], pow2) if block else PerTensor()
        return _tiles(layer.weight.data, scales, scaling)

    def forget(self, layer: Any) -> None:
        layer._parameters.pop("weight_scale_inv", None)
        layer._parameters.pop("activation_scale", None)
        for name in ("block_size", "activation_scheme", "has_bias"):
            vars(layer).pop(name, None)


class TorchAO(Library):
    """TorchAO has a `Float8Tensor` in the place of the weight."""

    name = "torchao"

    def holds(self, layer: nn.Module) -> bool:
        weight = getattr(layer, "weight", None)
        return type(layer) is nn.Linear and type(weight).__module__.startswith("torchao.")

    def read(self, layer: Any) -> Quantized:
        weight: Any = layer.weight
        if type(weight).__name__ != "Float8Tensor" or weight.qdata.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"its weight is of class {type(weight).__name__} and surokit reads Float8Tensor of float8_e4m3fn"
            )
        (N, K), (rows, columns) = weight.qdata.shape, weight.block_size
        return _tiles(weight.qdata, weight.scale, _scaling(min(rows, N), min(columns, K), N, K))


class CompressedTensors(Library):
    """CompressedTensors has E4M3 codes and `weight_scale` in a torch.nn.Linear whose forward it has replaced."""

    name = "compressed-tensors"

    def holds(self, layer: nn.Module) -> bool:
        return (
            getattr(layer, "quantization_scheme", None) is not None and getattr(layer, "weight_scale", None) is not None
        )

    def read(self, layer: Any) -> Quantized:
        said, weight = layer.quantization_scheme.weights, layer.weight.data
        kind = getattr(said.type, "value", said.type)
        if (kind, said.num_bits) != ("float", 8) or weight.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"its weights are {kind} of {said.num_bits} bits in {_named(weight.dtype)} and surokit reads float of 8 in "
                "float8_e4m3fn"
            )
        scales = layer.weight_scale.data
        strategy = getattr(said.strategy, "value", said.strategy)
        match strategy:
            case "tensor":
                return _tiles(weight, scales, PerTensor())
            case "channel":
                return _tiles(weight, scales, PerRow(pow2=False))
            case "block":
                return _tiles(weight, scales, Block(said.block_structure[0], said.block_structure[1], pow2=False))
            case "group":
                return _tiles(weight, scales, Block(1, said.group_size, pow2=False))
        raise ValueError(f"its scales are those of a {strategy}, and surokit reads tensor, channel, block and group")

    def forget(self, layer: Any) -> None:
        for name in [n for n in layer._parameters if n not in ("weight", "bias")]:  # scales and zero points
            del layer._parameters[name]
        for name in ("quantization_scheme", "quantization_status", "forward"):
            vars(layer).pop(name, None)


LIBRARIES: tuple[Library, ...] = (BitsAndBytes(), TransformersFP8(), TorchAO(), CompressedTensors())


def library_of(layer: nn.Module) -> Library | None:
    """Return the library that quantized the weight of this layer, where it is one that we know."""
    return next((library for library in LIBRARIES if library.holds(layer)), None)


def codes_of(layer: nn.Module) -> str:
    """Return what a layer of an unknown class holds in place of a weight, such as "int8"; "" where there is nothing like codes."""
    if not any(hasattr(layer, size) for size in ("in_features", "infeatures", "in_feature")):
        return ""
    own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    codes = next((t for t in own if t.dim() and (not t.is_floating_point() or t.itemsize == 1) and t.numel() > 1), None)
    return "" if codes is None else _named(codes.dtype)


def of_bitsandbytes(
    format: Codebook, codes: Tensor, scales: Tensor, second: tuple[Tensor, ...], shape: tuple[int, ...]
) -> Quantized:
    """Return codes and absmaxes that lie flat, as bitsandbytes holds them, as the weight [N, K] of `shape`.

    scales: float32, or the bytes of double quantization, whose own absmaxes and offset are `second`.
    """
    N, K = shape
    quantizer = Quantizer(format, NFBlock(64, double=256 if second else 0))
    codes, scales = codes.view(1 if K % 2 else N, -1), scales.view(1 if K % 64 else N, -1)
    return Quantized(codes, scales, quantizer, K, second, rows=N)


def _unpacked(codes: Tensor) -> Tensor:
    """Return codes as they lie in rows: bitsandbytes packs those of 32 rows side by side when a CPU evaluates a layer.

    A byte then holds codes of two places in the list of these 64 codes, row after row: place i low, i + 32 high.
    """
    N, half = codes.shape
    listed = torch.cat((codes.view(-1, 32) & 15, codes.view(-1, 32) >> 4), 1)
    pairs = listed.view(N // 32, half, 32, 2).transpose(1, 2)  # of a block of rows: row, byte, code
    return (pairs[..., 0] << 4 | pairs[..., 1]).reshape(N, half)


def _tiles(codes: Tensor, scales: Tensor, scaling: Scaling) -> Quantized:
    """Return E4M3 codes [N, K] with float32 scales, one for each tile."""
    (N, K), (rows, columns) = codes.shape, scaling.tile()
    grid = -(-N // (rows or N)), -(-K // (columns or K))
    if scales.numel() != grid[0] * grid[1]:
        raise ValueError(f"it has {scales.numel()} scales and {scaling} need {grid[0] * grid[1]}")
    return Quantized(codes, scales.float().view(grid), Quantizer(E4M3, scaling), K)


def _scaling(rows: int, columns: int, N: int, K: int) -> Scaling:
    if columns == K and rows in (1, N):
        return PerRow(pow2=False) if rows == 1 < N else PerTensor()
    return Block(rows, columns, pow2=False)


def _equal(table: Tensor | None, values: tuple[float, ...]) -> bool:
    return table is not None and torch.equal(table.detach().cpu().float(), torch.tensor(values, dtype=torch.float32))


def _is_a(layer: nn.Module, kind: str, package: str) -> bool:
    """Return whether a class of this name and package is among those of the layer."""
    return any(c.__name__ == kind and c.__module__.partition(".")[0] == package for c in type(layer).__mro__)


def _codes_in(layer: Any) -> torch.dtype:
    return layer.weight.dtype


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
