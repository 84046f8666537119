"""Find the weights that were written by hand since an optimizer's last step: a state loaded, an average swapped in, a
clamp.

An optimizer with masters of its own would undo that with its next update; instead it asks here, and takes the values over.
torch counts the changes to a tensor in place. It does not count those that go around autograd: `p.data = x` and
`p.data.copy_(x)`, torch.nn.utils.vector_to_parameters, torch.distributed's broadcast and all_reduce of a parameter, a
sharded parameter's `p.detach().to_local().copy_(x)`, torch's fused optimizers, a kernel of Triton's. Such writes are
undone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from surokit.optim.tensors import local
from surokit.torch_private import version_of


class Written:
    """A Written belongs to one optimizer, by its name. remedy: a sentence for users who write in every step.

    Before the first `note` no write counts: a state was loaded, and model and optimizer may be loaded in either order.
    """

    def __init__(self, optimizer: str, remedy: str) -> None:
        self._optimizer, self._remedy = optimizer, remedy
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._said = False

    def note(self, params: Iterable[Tensor]) -> None:
        """Note that these parameters are as the optimizer left them, or knows them."""
        self._versions |= {p: _version(p) for p in params}

    def found(self, stacklevel: int) -> list[Tensor]:
        """Return the parameters that were written since they were noted. The first time it warns, so that a mistake, the
        user's or this package's, is seen; stacklevel: as warnings.warn counts from here."""
        written = [p for p, version in self._versions.items() if _version(p) != version and _is_here(p)]
        if written and not self._said:
            warnings.warn(
                f"{self._optimizer}: {len(written)} of {len(self._versions)} parameters were written since the last step, and not "
                "by this optimizer. It takes their values over; its moments stay. This is said once. Writing in every step makes "
                f"every step wait for the host: {self._remedy}",
                stacklevel=stacklevel,
            )
            self._said = True
        return written


def _version(p: Tensor) -> tuple[int, int]:
    """Return the version of the parameter, and that of the part which this process holds: they differ where it is sharded."""
    return version_of(p), version_of(local([p])[0])


def _is_here(p: Tensor) -> bool:
    """Return whether its memory is there; that of a parked session is not, and waits until it is back."""
    W = local([p])[0]
    return W.untyped_storage().nbytes() >= W.nbytes


def sync_master_(master: Tensor, shown: Tensor) -> None:
    """Give master, float32, the values of `shown`, but keep its own where they round to what is shown."""
    master.copy_(torch.where(master.to(shown.dtype) == shown, master, shown))


def adopt_before_(master: Tensor, shown: Tensor, step: Tensor, decay: float) -> None:
    """Adopt as `sync_master_` does, where the master has made an update that `shown` does not have yet.

    The update is w decay - step. It is made on `shown`; the master stays as it is where the master before the update rounds
    to what is shown.
    """
    before = (master + step) / decay
    master.copy_(torch.where(before.to(shown.dtype) == shown, master, shown.float() * decay - step))
