"""Read the weights that other libraries quantized in a live model: their codes and scales, as they lie in memory.

    bitsandbytes         Linear4bit     NF4 and its own FP4 in blocks of 64, double quantization or not
    transformers         FP8Linear      E4M3 in blocks, or with one scale (DeepSeek, Qwen3-FP8, MiniMax)
    torchao              Float8Tensor   E4M3 with a scale a tensor, a row or a block
    compressed-tensors   Linear         E4M3 with a scale a tensor, a row ("channel") or a block

and of experts, each weight of them as a `StoredExperts`:

    transformers         FP8Experts            E4M3 in blocks; E2M1 in MX blocks (DeepSeek-V4)
    transformers         Mxfp4GptOssExperts    E2M1 in MX blocks, in the layout of a GPU's kernels (gpt-oss)

A library is known by the names of its classes, so that none has to be there. What is read shares the memory of codes; scales that
another dtype holds become float32, exactly.

E experts, N out_features, K in_features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from surokit.formats import BNB_FP4, E2M1, E4M3, NF4, Codebook
from surokit.kernels.reference.dynamic8bit import numbers
from surokit.nn.experts import Experts, StoredExperts
from surokit.quantized import Quantized
from surokit.quantizer import MX, Block, NFBlock, PerRow, PerTensor, Quantizer, Scaling

Found: TypeAlias = Quantized | StoredExperts


class Library(ABC):
    """A Library knows how another library keeps the quantized weight of a linear layer, or those of experts."""

    name: ClassVar[str]

    @abstractmethod
    def holds(self, layer: nn.Module) -> bool:
        """Return whether this is a layer of the library whose weight it has quantized."""

    @abstractmethod
    def read(self, layer: Any, weight: str = "weight") -> Found:
        """Return the weight [N, K]; weight: its name, where there are several. Raises ValueError, with the reason in a few words,
        for one that our formats do not have."""

    def shapes(self, layer: Any) -> dict[str, tuple[int, int, int]]:
        """Return the names and shapes [E, N, K] of the weights of experts; nothing for a linear layer."""
        return {}

    def compute_dtype(self, layer: Any) -> torch.dtype | None:
        """Return the dtype in which the layer multiplies whatever x has, or None."""
        return None

    def dtype(self, layer: Any) -> torch.dtype | None:
        """Return the dtype that the weight had before, where the library knows it."""
        return None

    def replaced_forward(self, layer: Any) -> bool:
        """Return whether a forward in the place of the class' is the library's own."""
        return False

    def forget(self, layer: Any) -> None:
        """Remove what the library keeps at the layer and no weight of ours needs."""
        return

    def restore(self, model: nn.Module) -> None:
        """Give back to the model what the library changed around its layers."""
        return


class BitsAndBytes(Library):
    """BitsAndBytes has codes and absmaxes in a `quant_state` of the weight."""

    name = "bitsandbytes"
    _formats: ClassVar[dict[str, Codebook]] = {"nf4": NF4, "fp4": BNB_FP4}

    def holds(self, layer: nn.Module) -> bool:
        return _is_a(layer, "Linear4bit", "bitsandbytes")

    def read(self, layer: Any, weight: str = "weight") -> Found:
        state = getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)
        if state is None:
            raise ValueError("it is not quantized before model.to(device), which has to come first")
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

    def dtype(self, layer: Any) -> torch.dtype | None:
        return getattr(getattr(layer.weight, "quant_state", None), "dtype", None)

    def forget(self, layer: Any) -> None:
        for name in ("quant_state", "quant_storage", "compute_type_is_set", "support_avx512bf16_for_cpu"):
            vars(layer).pop(name, None)


class TransformersFP8(Library):
    """TransformersFP8 has E4M3 codes, and `weight_scale_inv` for each block or one for all."""

    name = "transformers' FP8"

    def holds(self, layer: nn.Module) -> bool:
        return _is_a(layer, "FP8Linear", "transformers") and _codes_in(layer).itemsize == 1

    def read(self, layer: Any, weight: str = "weight") -> Found:
        if layer.weight.dtype != torch.float8_e4m3fn:
            raise ValueError(f"its codes are {_named(layer.weight.dtype)} and surokit reads float8_e4m3fn")
        scales, block = layer.weight_scale_inv.data, layer.block_size
        pow2 = scales.dtype == torch.float8_e8m0fnu
        scaling: Scaling = Block(block[0], block[1], pow2) if block else PerTensor()
        return _tiles(layer.weight.data, scales, scaling)

    def forget(self, layer: Any) -> None:
        del layer.weight_scale_inv, layer.activation_scale
        for name in ("block_size", "activation_scheme", "has_bias"):
            vars(layer).pop(name, None)


class TorchAO(Library):
    """TorchAO has a `Float8Tensor` in the place of the weight."""

    name = "torchao"

    def holds(self, layer: nn.Module) -> bool:
        w = getattr(layer, "weight", None)
        return type(layer) is nn.Linear and type(w).__module__.startswith("torchao.")

    def read(self, layer: Any, weight: str = "weight") -> Found:
        w = layer.weight
        if type(w).__name__ != "Float8Tensor" or w.qdata.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"its weight is of class {type(w).__name__} and surokit reads Float8Tensor of float8_e4m3fn"
            )
        (N, K), (rows, columns) = w.qdata.shape, w.block_size
        return _tiles(w.qdata, w.scale, _scaling(min(rows, N), min(columns, K), N, K))

    def dtype(self, layer: Any) -> torch.dtype | None:
        return layer.weight.dtype


class CompressedTensors(Library):
    """CompressedTensors has E4M3 codes and `weight_scale` in a torch.nn.Linear whose forward it has replaced."""

    name = "compressed-tensors"

    def holds(self, layer: nn.Module) -> bool:
        said = getattr(layer, "quantization_scheme", None)
        return type(layer) is nn.Linear and getattr(said, "weights", None) is not None

    def read(self, layer: Any, weight: str = "weight") -> Found:
        said = layer.quantization_scheme.weights
        codes = layer.weight.data if hasattr(layer, "weight") else torch.empty(0, dtype=torch.uint8)
        kind = getattr(said.type, "value", said.type)
        if (kind, said.num_bits) != ("float", 8) or codes.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"its weights are {kind} of {said.num_bits} bits in {_named(codes.dtype)} and surokit reads float of 8 in "
                "float8_e4m3fn"
            )
        scales = layer.weight_scale.data
        strategy = getattr(said.strategy, "value", said.strategy)
        match strategy:
            case "tensor":
                return _tiles(codes, scales, PerTensor())
            case "channel":
                return _tiles(codes, scales, PerRow(pow2=False))
            case "block":
                return _tiles(codes, scales, Block(said.block_structure[0], said.block_structure[1], pow2=False))
            case "group":
                return _tiles(codes, scales, Block(1, said.group_size, pow2=False))
        raise ValueError(f"its scales are those of a {strategy}, and surokit reads tensor, channel, block and group")

    def replaced_forward(self, layer: Any) -> bool:
        forward = getattr(vars(layer).get("forward"), "__func__", None)
        return "compressed_tensors" in getattr(forward, "__globals__", {}).get("__name__", "")

    def restore(self, model: nn.Module) -> None:
        for module in model.modules():  # it would decompress the model in its first forward
            if hook := vars(module).pop("ct_decompress_hook", None):
                hook.remove()

    def forget(self, layer: Any) -> None:
        for name, _ in [*layer.named_parameters(recurse=False)]:
            if name not in ("weight", "bias"):  # scales and zero points
                delattr(layer, name)
        for name in ("quantization_scheme", "quantization_status", "forward"):
            vars(layer).pop(name, None)


class TransformersFP8Experts(Library):
    """TransformersFP8Experts has codes of all experts in one parameter, and its scales in another."""

    name = TransformersFP8.name

    def holds(self, layer: nn.Module) -> bool:
        return _is_a(layer, "FP8Experts", "transformers") and _codes_in(layer, "down_proj").itemsize == 1

    def shapes(self, layer: Any) -> dict[str, tuple[int, int, int]]:
        H, I = layer.hidden_dim, layer.intermediate_dim  # noqa: E741
        first = ("gate_up_proj", 2 * I) if layer.has_gate else ("up_proj", I)
        return {first[0]: (layer.num_experts, first[1], H), "down_proj": (layer.num_experts, H, I)}

    def read(self, layer: Any, weight: str = "weight") -> Found:
        E, N, K = self.shapes(layer)[weight]
        codes, scales = getattr(layer, weight).data, getattr(layer, f"{weight}_scale_inv").data
        if codes.dtype == torch.int8:
            return _mx_experts(codes.view(torch.uint8), scales, (E, N, K))
        if codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"its codes are {_named(codes.dtype)} and surokit reads float8_e4m3fn")
        rows, columns = layer.block_size or (N, K)
        grid = -(-N // rows), -(-K // columns)
        if layer.block_size is None and scales[0].numel() != 1:
            raise ValueError("gate and up have scales of their own and no blocks")
        # where gate and up share a block there is a place for a second row of scales, which is not used
        scaling: Scaling = (
            Block(rows, columns, scales.dtype == torch.float8_e8m0fnu) if layer.block_size else PerTensor()
        )
        scales = scales.float().view(E, -1, grid[1])[:, : grid[0]].contiguous()
        return StoredExperts(Quantizer(E4M3, scaling), (codes, scales), (E, N, K))

    def forget(self, layer: Any) -> None:
        for name, _ in [*layer.named_parameters(recurse=False)]:
            if "scale" in name:
                delattr(layer, name)


class GptOssMXFP4(Library):
    """GptOssMXFP4 has codes and scales in tensors of its kernels, whose layout says how to turn them back."""

    name = "transformers' MXFP4"

    def holds(self, layer: nn.Module) -> bool:
        return _is_a(layer, "Mxfp4GptOssExperts", "transformers")

    def shapes(self, layer: Any) -> dict[str, tuple[int, int, int]]:
        E, H, I = layer.num_experts, layer.hidden_size, layer.intermediate_size  # noqa: E741
        return {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}

    def read(self, layer: Any, weight: str = "weight") -> Found:
        said = getattr(layer, f"{weight}_precision_config")
        if said is None:
            raise ValueError("it has no scales yet: load the model first")
        codes, scales = (_strided(t).transpose(-1, -2) for t in (getattr(layer, weight), said.weight_scale))
        return _mx_experts(codes, scales, self.shapes(layer)[weight])

    def forget(self, layer: Any) -> None:
        for weight in self.shapes(layer):
            for name in (weight, f"{weight}_precision_config"):
                vars(layer).pop(name, None)
        layer.__class__ = _of_gpt_oss("GptOssExperts")
        for name, value in _AS_GPT_OSS.items():
            setattr(layer, name, value)

    def restore(self, model: nn.Module) -> None:
        for module in model.modules():
            if _is_a(module, "Mxfp4GptOssMLP", "transformers"):
                module.__class__ = _of_gpt_oss("GptOssMLP")


# what transformers says of gpt-oss' experts where they are not quantized
_AS_GPT_OSS = {
    "has_gate": True,
    "has_bias": True,
    "has_post_expert_norm": False,
    "is_transposed": True,
    "is_concatenated": False,
}

LIBRARIES: tuple[Library, ...] = (
    BitsAndBytes(),
    TransformersFP8(),
    TorchAO(),
    CompressedTensors(),
    TransformersFP8Experts(),
    GptOssMXFP4(),
)


def library_of(layer: nn.Module) -> Library | None:
    """Return the library that quantized the weight of this layer, where it is one that we know."""
    ours = isinstance(layer, Experts)  # it keeps its class's name
    return None if ours else next((library for library in LIBRARIES if library.holds(layer)), None)


def codes_of(layer: nn.Module) -> str:
    """Return what a layer of an unknown class holds in place of a weight, such as "int8"; "" where there is nothing like codes."""
    if not any(hasattr(layer, size) for size in ("in_features", "infeatures", "in_feature")):
        return ""
    own = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
    if "weight" in own:
        own = {"weight": own["weight"]}
    held = (t.dtype for t in own.values() if t.numel() > 1 and t.dtype != torch.bool)
    return next((_named(dtype) for dtype in held if not dtype.is_floating_point or dtype.itemsize == 1), "")


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


def _mx_experts(codes: Tensor, scales: Tensor, shape: tuple[int, int, int]) -> StoredExperts:
    """Return E2M1 codes [E, N, K / 2], the even element low, with a power of two for 32 of them."""
    E, N, K = shape
    if scales.dtype == torch.float32:
        scales = scales.to(torch.float8_e8m0fnu)
    scales = scales.view(torch.uint8)
    if codes.shape != (E, N, K // 2) or scales.numel() != E * N * (K // 32) or K % 32:
        raise ValueError(f"its codes are {tuple(codes.shape)} with {scales.numel()} scales, and its weights {shape}")
    parts = codes.contiguous(), scales.reshape(E, N, K // 32).view(torch.float8_e8m0fnu)
    return StoredExperts(Quantizer(E2M1, MX(32)), parts, shape)


def _strided(tensor: Any) -> Tensor:
    """Return what a tensor of gpt-oss' kernels holds, in rows."""
    rows: Tensor = tensor.storage.layout.unswizzle_data(tensor.storage.data)
    return rows


def _of_gpt_oss(name: str) -> Any:
    """Return a class of transformers' gpt-oss, which is there where its MXFP4 is."""
    return getattr(import_module("transformers.models.gpt_oss.modeling_gpt_oss"), name)


def _equal(table: Tensor | None, values: tuple[float, ...]) -> bool:
    return table is not None and torch.equal(table.detach().cpu().float(), torch.tensor(values, dtype=torch.float32))


def _is_a(layer: nn.Module, kind: str, package: str) -> bool:
    """Return whether this is a layer of that class, or of one derived from it that computes alike."""
    kinds: tuple[Any, ...] = type(layer).__mro__
    bases = (c for c in kinds if c.__name__ == kind and c.__module__.partition(".")[0] == package)
    return any(kinds[0].forward is base.forward for base in bases)


def _codes_in(layer: Any, weight: str = "weight") -> torch.dtype:
    return getattr(layer, weight).dtype


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
