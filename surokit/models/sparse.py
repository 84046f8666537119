"""Build the sparse MLP of a block: a router, and experts of which each token passes a few (Mixtral, Qwen3-MoE).

Parameters have the names of transformers' modules: `gate.weight` [E, K], `experts.gate_up_proj` [E, 2 I, K] and
`experts.down_proj` [E, K, I]. The experts are those of nn/experts.py, so that recipes, storages and adapters reach them.

What training has to know of the routing is collected in a `Routed`, one a forward: from it come the load-balancing loss, and the
tokens of each expert that `RouterUse` adds up on the device until a session reads them.

B batch, T tokens (of all rows in what the router sees), K width, E experts, C experts of a token, L blocks with experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surokit.models.config import DecoderConfig
from surokit.nn.experts import GatedExperts
from surokit.nn.loss import IGNORED


class Router(nn.Module):
    """A Router sends each token to the experts that it gives the largest probabilities."""

    def __init__(self, experts: int, width: int, choices: int, norm_topk: bool) -> None:
        super().__init__()
        self.choices, self.norm_topk = choices, norm_topk
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of all experts, [T, E], the weights of the chosen ones, [T, C] in float32, and which these are."""
        logits_TE = F.linear(x_TK, self.weight)
        weights_TC, index_TC = probabilities(logits_TE).topk(self.choices, dim=-1)
        if self.norm_topk:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
        return logits_TE, weights_TC, index_TC

    def extra_repr(self) -> str:
        experts, width = self.weight.shape
        return f"experts={experts}, width={width}, choices={self.choices}"


def probabilities(logits_TE: Tensor) -> Tensor:
    """Return the probabilities that a router's logits give the experts, [T, E] in float32."""
    return logits_TE.float().softmax(-1)


class SparseMLP(nn.Module):
    """A SparseMLP computes the sum over a token's experts of weight * down(silu(gate x) * up x), of x [..., K]."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        assert config.experts is not None
        assert config.experts_per_token is not None
        self.layer = layer
        self.gate = Router(config.experts, config.width, config.experts_per_token, config.norm_topk)
        self.experts = GatedExperts(config.experts, config.width, config.expert_width)

    def forward(self, x_BTK: Tensor, routed: Routed | None = None) -> Tensor:
        """Return what is to be added to the residual stream; `routed` is told whom the router chose."""
        x_TK = x_BTK.flatten(0, -2)
        logits_TE, weights_TC, index_TC = self.gate(x_TK)
        if routed is not None:
            routed.add(self.layer, probabilities(logits_TE), index_TC)
        y_BTK: Tensor = self.experts(x_TK, index_TC, weights_TC).view_as(x_BTK)
        return y_BTK


class Routed:
    """A Routed collects whom the routers of one forward sent its tokens to.

    Tokens behind the last label of a row that counts, such as padding, change no loss and do not count here either.
    """

    def __init__(self, labels_BT: Tensor) -> None:
        counts_BT = (labels_BT != IGNORED).flip(1).cumsum(1).flip(1) > 0
        self._counts_T = counts_BT.flatten()
        self._tokens: dict[int, Tensor] = {}  # by block, so that a block that is computed again changes nothing
        self._probabilities: dict[int, Tensor] = {}

    def add(self, layer: int, p_TE: Tensor, index_TC: Tensor) -> None:
        """Take the probabilities and the choices of one router."""
        sent_TC = self._counts_T[:, None].expand_as(index_TC).long()
        tokens_E = sent_TC.new_zeros(p_TE.shape[1])
        self._tokens[layer] = tokens_E.scatter_add(0, index_TC.flatten(), sent_TC.flatten())
        self._probabilities[layer] = (p_TE * self._counts_T[:, None]).sum(0)

    @property
    def tokens_LE(self) -> Tensor:
        """Return how many tokens were sent to each expert of each block, int64."""
        return torch.stack(list(self._tokens.values()))

    def balance(self) -> Tensor:
        """Return the load-balancing loss (0-d, float32): E times the sum over experts of the share of tokens that are sent to one,
        times its mean probability, over the tokens of all blocks together (Fedus et al., 2021, equations 4 to 6). Even routing has
        C, all tokens to the same C experts E."""
        rows = self._counts_T.sum().clamp_min(1) * len(self._tokens)
        share_E = self.tokens_LE.sum(0) / rows
        mean_E = torch.stack(list(self._probabilities.values())).sum(0) / rows
        return len(share_E) * (share_E * mean_E).sum()


class RouterUse(nn.Module):
    """A RouterUse adds up on the device what the routers did in training, until it is read.

    Buffers, so that CUDA graphs write to them, and in no state dict: tokens_LE int64, and of the load-balancing loss the sum and
    the number of forwards, float32 [2].
    """

    tokens_LE: Tensor
    balance_2: Tensor

    def __init__(self, blocks: int, experts: int) -> None:
        super().__init__()
        self.register_buffer("tokens_LE", torch.zeros(blocks, experts, dtype=torch.int64), persistent=False)
        self.register_buffer("balance_2", torch.zeros(2, dtype=torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RouterUse:
        """Move, and begin anew: counts keep their dtypes, and memory that was only reserved has no numbers."""
        super()._apply(fn, recurse)
        self.tokens_LE = torch.zeros_like(self.tokens_LE, dtype=torch.int64)
        self.balance_2 = torch.zeros_like(self.balance_2, dtype=torch.float32)
        return self

    @torch.no_grad()
    def add(self, routed: Routed, balance: Tensor) -> None:
        """Add one forward's."""
        self.tokens_LE += routed.tokens_LE
        self.balance_2 += torch.stack([balance.detach(), torch.ones_like(balance)])

    @torch.no_grad()
    def take(self, add: Callable[[Tensor], Tensor] = lambda t: t) -> dict[str, Tensor]:
        """Return what came together since the last call, as 0-d tensors, and begin anew. Nothing waits for the device.

        add: adds up a tensor over the processes that train together, in place.

        balance_loss: mean over the forwards. expert_load_max, expert_load_min: tokens of the most and the least used expert of any
        block, in shares of an even split: 1 is even, 0 an expert that no token was sent to.
        """
        tokens_LE, (total, forwards) = add(self.tokens_LE), add(self.balance_2)
        load_LE = tokens_LE / tokens_LE.sum(1, keepdim=True) * tokens_LE.shape[1]
        taken = {
            "balance_loss": total / forwards,
            "expert_load_max": load_LE.max(),
            "expert_load_min": load_LE.min(),
        }
        tokens_LE.zero_()
        self.balance_2.zero_()
        return taken


class _WithGradientOf(torch.autograd.Function):
    """A _WithGradientOf is `loss` in forward and loss + coefficient * other in backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor, coefficient: float) -> Tensor:
        ctx.coefficient = coefficient
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        return dloss, dloss * ctx.coefficient, None


def with_gradient_of(loss: Tensor, other: Tensor, coefficient: float) -> Tensor:
    """Return `loss`, whose backward also computes the gradient of coefficient * other: what is reported stays the loss itself."""
    y: Tensor = _WithGradientOf.apply(loss, other, coefficient)
    return y
