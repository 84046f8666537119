"""Read and write quantized weights in other libraries' layouts: which tensors stand for a weight, and what config says so.

    fp8           weight e4m3 [N, K], weight_scale_inv f32, one a block             DeepSeek-V3, transformers' fine-grained FP8
    modelopt      weight u8 [N, K/2], weight_scale e4m3 [N, K/16], weight_scale_2   NVIDIA ModelOpt: NVFP4, W4A16_NVFP4
                  weight e4m3 [N, K], weight_scale u8 [N, K/32]                     and MXFP8
    mxfp4         weight_blocks u8 [N, K/32, 16], weight_scales u8 [N, K/32]        gpt-oss
    bitsandbytes  weight u8 [NK/2, 1], weight.absmax, weight.quant_map and so on    NF4

A layout gives tensors for a `Quantized` and takes them back; codes and scales go through unchanged, bit for bit. Two E2M1 codes
share a byte, the even element in its low half; NF4 has the even element in the high half. E8M0 scales are plain bytes. Where K
is no multiple of the block, the last block of a row is partial; whoever reads it has to know K, as we do from the config.

N out_features, K in_features, B blocks. Sources: the formats' own folders and readers (transformers, bitsandbytes, ModelOpt).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

import surokit
from surokit.errors import CheckpointError
from surokit.formats import E2M1, E4M3, NF4
from surokit.kernels.reference.dynamic8bit import numbers
from surokit.models.folder import FLOATS, Wanted
from surokit.prequantized import of_bitsandbytes
from surokit.quantized import Quantized
from surokit.quantizer import MX, NV, Block, NFBlock, Quantizer

Shape = tuple[int, int]
Found = Mapping[str, Wanted]


class Source(Protocol):
    """A Source gives tensors by name, mapped from a file."""

    def __getitem__(self, name: str, /) -> Tensor: ...
    def __contains__(self, name: object, /) -> bool: ...


class Layout(ABC):
    """A Layout is one checkpoint format. `weight` is the parameter's name, "model.layers.0.mlp.up_proj.weight"."""

    # how names of the tensors that only a stored weight has end
    marks: ClassVar[tuple[str, ...]]

    @abstractmethod
    def writes(self, q: Quantizer) -> bool:
        """Return whether a weight stored as `q` can be written."""

    @abstractmethod
    def config(self, kept: list[str], dtype: torch.dtype) -> dict[str, Any]:
        """Return the `quantization_config`; kept: the linear layers that are not quantized, dtype: of the model."""

    def sidecar(self, kept: list[str]) -> dict[str, Any] | None:
        """Return the content of hf_quant_config.json, where the format has one."""
        return None

    @abstractmethod
    def tensors(self, weight: str, Q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what is written for a stored weight."""

    def holds(self, weight: str, found: Found) -> bool:
        """Return whether a file has this weight in the layout."""
        return any(weight + mark in found for mark in self.marks)

    @abstractmethod
    def wanted(self, weight: str, shape_NK: Shape, found: Found) -> dict[str, Wanted]:
        """Return what a file has to have for this weight."""

    @abstractmethod
    def read(self, weight: str, shape_NK: Shape, tensors: Source, device: torch.device) -> Quantized:
        """Return the stored weight, in memory of its own on `device`."""


@dataclass(frozen=True)
class FineGrainedFP8(Layout):
    """FineGrainedFP8 has E4M3 codes and a float32 scale for each block of rows x columns."""

    rows: int = 128
    columns: int = 128
    marks: ClassVar[tuple[str, ...]] = ("_scale_inv",)

    def writes(self, q: Quantizer) -> bool:
        return q.format == E4M3 and isinstance(q.scaling, Block) and not q.hadamard

    def config(self, kept: list[str], dtype: torch.dtype) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.rows, self.columns],
            "modules_to_not_convert": kept,
        }

    def tensors(self, weight: str, Q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
        return {weight: Q.codes, f"{weight}_scale_inv": Q.scales}

    def wanted(self, weight: str, shape_NK: Shape, found: Found) -> dict[str, Wanted]:
        N, K = shape_NK
        grid = -(-N // self.rows), -(-K // self.columns)
        return {weight: Wanted(shape_NK, ("F8_E4M3",)), f"{weight}_scale_inv": Wanted(grid, FLOATS)}

    def read(self, weight: str, shape_NK: Shape, tensors: Source, device: torch.device) -> Quantized:
        codes = copied(tensors[weight], torch.float8_e4m3fn, device)
        scales = copied(tensors[f"{weight}_scale_inv"], torch.float32, device)
        # a file does not say whether its scales are powers of two
        quantizer = Quantizer(E4M3, Block(self.rows, self.columns, pow2=False))
        return Quantized(codes, scales, quantizer, shape_NK[1])


@dataclass(frozen=True)
class ModelOpt(Layout):
    """ModelOpt is what ModelOpt's formats share: the config, in two places. Scales of activations and of the KV cache are not
    read."""

    algorithm: str
    block: int
    bits: ClassVar[int]
    marks: ClassVar[tuple[str, ...]] = ("_scale", "_scale_2")

    def config(self, kept: list[str], dtype: torch.dtype) -> dict[str, Any]:
        weights = {"dynamic": False, "num_bits": self.bits, "type": "float", "group_size": self.block}
        return {
            "quant_method": "modelopt",
            "quant_algo": self.algorithm,
            "group_size": self.block,
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": kept,
            "producer": {"name": "surokit", "version": surokit.__version__},
        }

    def sidecar(self, kept: list[str]) -> dict[str, Any] | None:
        return {
            "producer": {"name": "surokit", "version": surokit.__version__},
            "quantization": {
                "quant_algo": self.algorithm,
                "kv_cache_quant_algo": None,
                "group_size": self.block,
                "exclude_modules": kept,
            },
        }


class ModelOptNVFP4(ModelOpt):
    """ModelOptNVFP4 has E2M1 codes in blocks of 16 of a row with E4M3 scales, and one float32 multiplier.

    Tiles of 16 x 16 are written as 16 rows with the same scales. We store weights and calibrate no activations, for which
    ModelOpt's word is W4A16_NVFP4: a reader of plain NVFP4 would look for `input_scale`.
    """

    bits = 4

    def writes(self, q: Quantizer) -> bool:
        return isinstance(q.scaling, NV) and not q.hadamard

    def tensors(self, weight: str, Q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
        scales = Q.scales
        if (rows := Q.quantizer.scaling.tile()[0]) > 1:
            scales = _bytes(scales).repeat_interleave(rows, dim=0)[: Q.rows].view(scales.dtype)
        return {weight: Q.codes, f"{weight}_scale": scales, f"{weight}_scale_2": Q.second[0].reshape(())}

    def wanted(self, weight: str, shape_NK: Shape, found: Found) -> dict[str, Wanted]:
        N, K = shape_NK
        one = found[f"{weight}_scale_2"].shape if f"{weight}_scale_2" in found else ()
        return {
            weight: Wanted((N, -(-K // 2)), ("U8",)),
            f"{weight}_scale": Wanted((N, -(-K // self.block)), ("F8_E4M3",)),
            f"{weight}_scale_2": Wanted(one if one == (1,) else (), ("F32",)),
        }

    def read(self, weight: str, shape_NK: Shape, tensors: Source, device: torch.device) -> Quantized:
        codes = copied(tensors[weight], torch.uint8, device)
        scales = copied(tensors[f"{weight}_scale"], torch.float8_e4m3fn, device)
        scale = copied(tensors[f"{weight}_scale_2"], torch.float32, device).view(1, 1)
        return Quantized(codes, scales, Quantizer(E2M1, NV(16)), shape_NK[1], (scale,))


class ModelOptMXFP8(ModelOpt):
    """ModelOptMXFP8 has E4M3 codes in blocks of 32 of a row, with E8M0 scales."""

    bits = 8

    def writes(self, q: Quantizer) -> bool:
        return q.format == E4M3 and isinstance(q.scaling, MX) and not q.hadamard

    def tensors(self, weight: str, Q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
        return {weight: Q.codes, f"{weight}_scale": _bytes(Q.scales)}

    def wanted(self, weight: str, shape_NK: Shape, found: Found) -> dict[str, Wanted]:
        scales = shape_NK[0], -(-shape_NK[1] // self.block)
        return {weight: Wanted(shape_NK, ("F8_E4M3",)), f"{weight}_scale": Wanted(scales, ("U8",))}

    def read(self, weight: str, shape_NK: Shape, tensors: Source, device: torch.device) -> Quantized:
        codes = copied(tensors[weight], torch.float8_e4m3fn, device)
        scales = copied(tensors[f"{weight}_scale"], torch.uint8, device).view(torch.float8_e8m0fnu)
        return Quantized(codes, scales, Quantizer(E4M3, MX(32)), shape_NK[1])


@dataclass(frozen=True)
class MXFP4(Layout):
    """MXFP4 has E2M1 codes in blocks of 32 of a row, 16 bytes each, with E8M0 scales; a partial block is filled up with zeros."""

    marks: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")

    def writes(self, q: Quantizer) -> bool:
        return q.format == E2M1 and isinstance(q.scaling, MX) and not q.hadamard

    def config(self, kept: list[str], dtype: torch.dtype) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}

    def tensors(self, weight: str, Q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
        N, B = Q.scales.shape
        blocks = F.pad(Q.codes, (0, B * 16 - Q.codes.shape[1])).view(N, B, 16)
        return {f"{weight}_blocks": blocks, f"{weight}_scales": _bytes(Q.scales)}

    def holds(self, weight: str, found: Found) -> bool:
        return any(self._base(weight, found) + mark in found for mark in self.marks)

    def wanted(self, weight: str, shape_NK: Shape, found: Found) -> dict[str, Wanted]:
        base, N, B = self._base(weight, found), shape_NK[0], -(-shape_NK[1] // 32)
        return {f"{base}_blocks": Wanted((N, B, 16), ("U8",)), f"{base}_scales": Wanted((N, B), ("U8",))}

    def read(self, weight: str, shape_NK: Shape, tensors: Source, device: torch.device) -> Quantized:
        base, K = self._base(weight, tensors), shape_NK[1]
        codes = copied(tensors[f"{base}_blocks"].flatten(1)[:, : -(-K // 2)], torch.uint8, device)
        scales = copied(tensors[f"{base}_scales"], torch.uint8, device).view(torch.float8_e8m0fnu)
        return Quantized(codes, scales, Quantizer(E2M1, MX(32)), K)

    @staticmethod
    def _base(weight: str, names: Container[str]) -> str:
        """Return the base name: `..._proj.weight`, as we write it, or `..._proj`: gpt-oss' weights are parameters of their own and
        have no layer name."""
        module = weight.removesuffix(".weight")
        return module if f"{module}_blocks" in names else weight


_STATE = ".quant_state.bitsandbytes__nf4"


@dataclass(frozen=True)
class BitsAndBytesNF4(Layout):
    """BitsAndBytesNF4 is NF4 as bitsandbytes serializes it: codes, absmax, the tables of both, and the rest as JSON in bytes."""

    double: bool = True
    marks: ClassVar[tuple[str, ...]] = (".absmax", _STATE)

    def writes(self, q: Quantizer) -> bool:
        return q.format == NF4

    def config(self, kept: list[str], dtype: torch.dtype) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": _named(dtype),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": kept,
        }

    def tensors(self, weight: str, Q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": _named(dtype), "shape": list(Q.shape)}
        tensors = {
            weight: Q.codes.reshape(-1, 1),
            f"{weight}.absmax": Q.scales.reshape(-1),
            f"{weight}.quant_map": _table(NF4.values),
        }
        if Q.second:
            absmax, offset = Q.second
            tensors |= {
                f"{weight}.nested_absmax": absmax,
                f"{weight}.nested_quant_map": _table(numbers(signed=True)),
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        tensors[weight + _STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors

    def wanted(self, weight: str, shape_NK: Shape, found: Found) -> dict[str, Wanted]:
        elements = shape_NK[0] * shape_NK[1]
        B = -(-elements // 64)
        wanted = {
            weight: Wanted((-(-elements // 2), 1), ("U8",)),
            f"{weight}.absmax": Wanted((B,), ("U8" if self.double else "F32",)),
            f"{weight}.quant_map": Wanted((16,), ("F32",)),
            # JSON, of any length
            weight + _STATE: Wanted(found[weight + _STATE].shape if weight + _STATE in found else (0,), ("U8",)),
        }
        if self.double:
            wanted[f"{weight}.nested_absmax"] = Wanted((-(-B // 256),), ("F32",))
            wanted[f"{weight}.nested_quant_map"] = Wanted((256,), ("F32",))
        return wanted

    def read(self, weight: str, shape_NK: Shape, tensors: Source, device: torch.device) -> Quantized:
        state = self._state(weight, shape_NK, tensors)
        codes = copied(tensors[weight], torch.uint8, device)
        absmax = tensors[f"{weight}.absmax"]
        scales = copied(absmax, absmax.dtype, device)
        second: tuple[Tensor, ...] = ()
        if self.double:
            offset = torch.tensor([state["nested_offset"]], dtype=torch.float32, device=device)
            second = copied(tensors[f"{weight}.nested_absmax"], torch.float32, device), offset
        return of_bitsandbytes(NF4, codes, scales, second, shape_NK)

    def _state(self, weight: str, shape_NK: Shape, tensors: Source) -> dict[str, Any]:
        """Return the parsed JSON; CheckpointError where it, or a table, is not what our codes mean."""
        try:
            state: dict[str, Any] = json.loads(bytes(tensors[weight + _STATE].tolist()))
            said = {key: state[key] for key in ("quant_type", "blocksize", "shape")}
            meant: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(shape_NK)}
            if self.double:
                said["nested_blocksize"], meant["nested_blocksize"] = state["nested_blocksize"], 256
                float(state["nested_offset"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{weight}{_STATE} is damaged ({error!r}): copy or download the file again."
            ) from error
        maps = {"quant_map": NF4.values} | ({"nested_quant_map": numbers(signed=True)} if self.double else {})
        other = [key for key, values in maps.items() if not torch.equal(tensors[f"{weight}.{key}"], _table(values))]
        if said != meant or other:
            raise CheckpointError(
                f"{weight} is no NF4 weight in blocks of 64 of shape {list(shape_NK)}: its state says {said}"
                + (f", and it brings other numbers in {', '.join(other)}." if other else ".")
            )
        return state


#: ModelOpt's names of NVFP4 folders; with the second, activations stay in bfloat16.
NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_SUPPORTED = "fp8 in blocks, modelopt's NVFP4 and MXFP8, mxfp4, and bitsandbytes' nf4"


def layout_of(config: Mapping[str, Any], where: object) -> Layout:
    """Return the layout that a `quantization_config` means; CheckpointError for one that is not read here."""
    method, algorithm = config.get("quant_method"), config.get("quant_algo")
    block = config.get("weight_block_size")
    match method:
        case "fp8" if config.get("fmt", "e4m3") == "e4m3":
            match block:
                case [int(rows), int(columns)] if rows > 0 and columns > 0:
                    return FineGrainedFP8(rows, columns)
        case "modelopt" if algorithm in NVFP4_ALGORITHMS and config.get("group_size", 16) == 16:
            return ModelOptNVFP4(algorithm, 16)
        case "modelopt" if algorithm == "MXFP8" and config.get("group_size", 32) == 32:
            return ModelOptMXFP8(algorithm, 32)
        case "mxfp4":
            return MXFP4()
        case "bitsandbytes" if config.get("load_in_4bit") and config.get("bnb_4bit_quant_type") == "nf4":
            return BitsAndBytesNF4(bool(config.get("bnb_4bit_use_double_quant")))
    said = ", ".join(f"{k} {v}" for k, v in config.items() if k.endswith(("_algo", "_size", "_type", "fmt")))
    raise CheckpointError(
        f"The weights in {where} are quantized by {method}"
        + (f" ({said})" if said else "")
        + f", and only {_SUPPORTED} "
        "can be read: load the unquantized model and give a recipe."
    )


def layout_for(q: Quantizer) -> Layout | None:
    """Return the layout in which a weight stored as `q` is written, or None where there is none."""
    candidates: list[Layout] = [ModelOptNVFP4(NVFP4_ALGORITHMS[1], 16), ModelOptMXFP8("MXFP8", 32), MXFP4()]
    if isinstance(q.scaling, Block):
        candidates.append(FineGrainedFP8(q.scaling.rows, q.scaling.columns))
    if isinstance(q.scaling, NFBlock):
        candidates.append(BitsAndBytesNF4(bool(q.scaling.double)))
    return next((layout for layout in candidates if layout.writes(q)), None)


def copied(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the tensor in memory of its own: what comes from a mapped file would change with the file."""
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _table(values: tuple[float, ...]) -> Tensor:
    """Return the default of transformers, float32, whatever torch's default is."""
    return torch.tensor(values, dtype=torch.float32)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
