"""Memory of a GPU that steps leave free is spent on frozen weights: the codes of W' are kept where `Fusion.frozen` is "auto".

What is spare is measured once, after a session's first update, when activations have had their peak and the optimizer has its
state. What is kept changes no number, and is given back when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from surokit import convert
from surokit.nn.fusion import Fusion

LEFT_ALONE = 0.1  # of the GPU's memory: longer batches, evaluation, other processes


def spare_bytes(device: torch.device) -> int:
    """Bytes of the GPU that nothing took so far, but for what is left alone."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(free + unused - LEFT_ALONE * total)


class Spare:
    """Whether the model of one engine keeps W'. `words` says so, "" where it does not."""

    def __init__(
        self, model: nn.Module, device: torch.device, measure: Callable[[torch.device], int] = spare_bytes
    ) -> None:
        self._model, self._device, self._measure = model, device, measure
        self._decided = device.type != "cuda"
        self.words = ""

    def after_update(self) -> None:
        """Decides, the first time."""
        if self._decided:
            return
        self._decided = True
        wanted = convert.transposed_bytes(self._model) if _is_open(self._model) else 0
        if 0 < wanted <= self._measure(self._device):
            convert.keep_transposed(self._model, True)
            self.words = f"codes of W' kept: up to {wanted / 2**30:.1f} GiB more"

    def give_back(self) -> bool:
        """Lets go what is kept; False where nothing is."""
        if not self.words:
            return False
        convert.keep_transposed(self._model, False)
        self.words = ""
        return True


def _is_open(model: nn.Module) -> bool:
    """Whether a session may choose what a fused model keeps of frozen weights; a Decoder on CUDA is fused without being told."""
    chosen = [vars(module)["fusion"] for module in model.modules() if "fusion" in vars(module)]
    return any(fusion is None or (isinstance(fusion, Fusion) and fusion.frozen == "auto") for fusion in chosen)
