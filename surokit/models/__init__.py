"""This part has decoder models: their shape, checkpoints, adapters and generation.

config.py       DecoderConfig, from and to a Hugging Face config.json
decoder.py      Decoder
checkpoint.py   load, save
sparse.py       the router and the experts of a block, the load-balancing loss
expert_files.py experts as folders have them, a tensor for each projection of each
layouts.py      quantized weights as FP8, ModelOpt, MXFP4 and bitsandbytes folders have them
folder.py       safetensors folders, read through memory mapping and written whole
fuse.py         fuse: what is computed together, of a Decoder and of transformers' models
foreign.py      what transformers' modules become when they are fused
adapter.py      save_adapter, load_adapter, merge, unmerge
generation.py   generate
"""

from surokit.models.adapter import load_adapter, merge, save_adapter, unmerge
from surokit.models.checkpoint import load, save
from surokit.models.config import DecoderConfig
from surokit.models.decoder import Decoder, KeyValueCache, Output
from surokit.models.generation import generate

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KeyValueCache",
    "Output",
    "generate",
    "load",
    "load_adapter",
    "merge",
    "save",
    "save_adapter",
    "unmerge",
]
