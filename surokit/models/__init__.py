"""Decoder models: their shape, checkpoints, adapters and generation.

config.py       DecoderConfig, from and to a Hugging Face config.json
decoder.py      Decoder
checkpoint.py   load, save
folder.py       safetensors folders, read through memory mapping and written whole
adapter.py      save_adapter, load_adapter
generation.py   generate
"""

from surokit.models.adapter import load_adapter, save_adapter
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
    "save",
    "save_adapter",
]
