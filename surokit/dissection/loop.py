"""Train a model of transformers in a plain loop, and add PEFT's adapters to it: what other libraries' trainers do in their
fastest form.

The loop takes the batches that it is given, on the device, with AdamW as surokit's has it by default (betas .9 and .95, a decay
of .1 for matrices), clips, and waits for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from surokit.recipe import PROJECTIONS

CLIP, BETAS, DECAY = 1.0, (0.9, 0.95), 0.1
PROJECTION = re.compile(r"layers\.\d+\.\w+\.\w+_proj")


class TorchLoop:
    """A TorchLoop takes optimizer steps on a model whose forward returns a `.loss`.

    eight_bit: bitsandbytes' AdamW of 8 bits. autocast: compute in bfloat16 autocast. optimizer: "adamw" or "sgd".
    """

    def __init__(
        self, model: nn.Module, lr: float, *, optimizer: str = "adamw", eight_bit: bool = False, autocast: bool = False
    ) -> None:
        self.model, self.autocast = model, autocast
        self.device = next(model.parameters()).device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        groups = decayed(self.parameters)
        self.optimizer: torch.optim.Optimizer
        if eight_bit:
            self.optimizer = import_module("bitsandbytes").optim.AdamW8bit(groups, lr=lr, betas=BETAS)
        elif optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.parameters, lr=lr)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=self.device.type == "cuda")

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Take one optimizer step on the batches, and return their mean loss, which nobody has waited for."""
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.loss(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            found: Tensor = self.model(**batch).loss
        return found


def decayed(parameters: Sequence[Tensor], decay: float = DECAY) -> list[dict[str, Any]]:
    """Return groups of parameters, matrices with a weight decay and the others without."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def with_peft(model: Any, rank: int, alpha: float) -> Any:
    """Add PEFT's adapters to every projection of a model, in the model's dtype as surokit's are; by default they would be
    float32."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(PROJECTIONS), bias="none")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def recomputed(model: Any) -> None:
    """Let a model of transformers keep the input of each layer only, and compute the rest again in backward."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def set_adapters(model: nn.Module) -> None:
    """Set A of every adapter by its layer's name, uniform as torch.nn.Linear's weights, and B to zero: the same in every
    library."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                layer = PROJECTION.search(name)
                assert layer is not None, name
                drawn = torch.Generator().manual_seed(crc32(layer[0].encode()))
                bound = parameter.shape[1] ** -0.5
                parameter.copy_((torch.rand(parameter.shape, generator=drawn) * 2 - 1) * bound)
            elif "lora_B" in name:
                parameter.zero_()
