"""Build decoders: embedding, blocks of attention and SwiGLU around a residual stream, head. Llama, Mistral, Qwen2.5 and Qwen3;
with experts in place of the SwiGLU (sparse.py) Mixtral and Qwen3-MoE.

Modules carry Hugging Face's names, so that state-dict keys are a checkpoint's keys. The loss never makes whole logits.

Blocks, attention and MLPs hold a `fusion`, which says what is computed together (fusion.py); `surokit.fuse` sets it. Norms
then go with the layers that read them: `Attention` and `MLP` take a `Normed` instead of a tensor, and return what goes on beside
the residual stream. Where somebody's hook wants to see a tensor that a fused step does not make, the step is not fused.

B batch, T tokens, K width, H query heads, G key heads, D head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surokit.models.config import DecoderConfig
from surokit.models.deferred import Deferred, InitialWeights
from surokit.models.sparse import Routed, RouterUse, SparseMLP, with_gradient_of
from surokit.nn.attention import Documents, attention, visibility, visible
from surokit.nn.experts import Experts, ExpertsLinear
from surokit.nn.fusion import Fusion, fusion_for
from surokit.nn.joint import lay, lay_in_forward
from surokit.nn.linear import Linear
from surokit.nn.loss import IGNORED, chunked_cross_entropy, linear_cross_entropy
from surokit.nn.norm import RMSNorm
from surokit.nn.qk import split_heads
from surokit.nn.rope import RotaryEmbedding
from surokit.nn.stages import Gated, Normed, Plain, fused_linear
from surokit.places import check_dtype, find_device
from surokit.torch_private import is_hooked

__all__ = ["Decoder", "DecoderConfig", "KeyValueCache", "Output"]


class Output:
    """An Output is what a decoder returns: `loss` (0-d float32, None without labels) and `logits` [B, T, V].

    With labels, the logits are computed from the last hidden state when they are first read, and carry gradients then too.
    `balance_loss` (0-d float32) is the load-balancing loss of experts in training, of which `loss` has the gradient; else None.
    """

    def __init__(
        self,
        loss: Tensor | None,
        hidden: Tensor,
        head: nn.Module,
        logits: Tensor | None = None,
        balance_loss: Tensor | None = None,
    ) -> None:
        self.loss = loss
        self.balance_loss = balance_loss
        self.hidden = hidden
        self._head = head
        self._logits = logits

    @property
    def logits(self) -> Tensor:
        if self._logits is None:
            self._logits = self._head(self.hidden)
        return self._logits

    def __repr__(self) -> str:
        return f"Output(loss={self.loss}, logits of {tuple(self.hidden.shape[:2])} tokens)"


class KeyValueCache:
    """A KeyValueCache holds keys and values of the tokens seen so far: one preallocated pair [B, length, G, D] a block.

    padding: int64 [B], how many tokens each row begins with that are padding; None for none. Only padding sees padding, and the
        positions of a row count from behind it. To be told it waits for the device, once.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        padding: Tensor | None = None,
    ) -> None:
        shape = (config.layers, 2, batch, length, config.kv_heads, config.rotary_width)
        self._tensors = torch.empty(shape, device=device, dtype=dtype)
        self.length, self.seen = length, 0
        self._most_padding = 0 if padding is None else int(padding.max())
        self.padding = padding if self._most_padding else None  # rows without any take the path without masks
        if padding is not None and self.padding is not None:  # made once, and cut for each forward
            distance_BL = torch.arange(length, device=device) - padding[:, None]
            self._positions_BL, self._real_B11L = distance_BL.clamp_min(0), (distance_BL >= 0)[:, None, None]
            self._documents_B2 = torch.stack((torch.zeros_like(padding), padding), 1)

    @property
    def nbytes(self) -> int:
        return self._tensors.nbytes

    def extend(self, layer: int, k_BTGD: Tensor, v_BTGD: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Append this forward's keys and values of one block and return those that any of its queries sees, [B, S, G, D]."""
        first, end = self._first(window), self.seen + k_BTGD.shape[1]
        keys, values = self._tensors[layer]
        keys[:, self.seen : end], values[:, self.seen : end] = k_BTGD, v_BTGD
        return keys[:, first:end], values[:, first:end]

    def positions(self, T: int) -> Tensor | None:
        """Return the positions of the next T tokens, int64 [B, T]; None where they go on from the number of those seen."""
        return None if self.padding is None else self._positions_BL[:, self.seen : self.seen + T]

    def visibility(
        self,
        T: int,
        window: int | None,
        position_ids: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        documents: Tensor | None = None,
    ) -> Tensor | Documents | None:
        """Make the `mask` that `attention` takes for the next T tokens, over the keys that `extend` returns."""
        start, end, first = self.seen, self.seen + T, self._first(window)
        if T == 1 and start >= self._most_padding:  # a token of text sees all that it is given but padding
            return None if self.padding is None else self._real_B11L[..., first:end]
        if self.padding is None:
            mask = visibility(T, start, window, position_ids, device, dtype, documents)
        elif start == 0:  # padding is a document of its own, so that every query sees something
            return visibility(T, start, window, None, device, dtype, self._documents_B2)
        else:
            real_B11S, real_B1T1 = self._real_B11L[..., :end], self._real_B11L[..., start:end].mT
            mask = visible(T, start, window, self._positions_BL, device)  # told positions, it is never None
            assert mask is not None
            mask = mask & (real_B11S | ~real_B1T1)
        return mask[..., first:] if isinstance(mask, Tensor) else mask

    def _first(self, window: int | None) -> int:
        """Return the first key that the next token sees in a window, and so none behind it sees an earlier one."""
        return 0 if window is None else max(0, self.seen + 1 - window)


class _Context:
    """Holds what every block of one forward shares: rotary tables, visibility, cache, whom the routers chose."""

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        masks: dict[int | None, Tensor | Documents | None],
        cache: KeyValueCache | None,
        routed: Routed | None = None,
    ) -> None:
        self.cos, self.sin, self.masks, self.cache, self.routed = cos, sin, masks, cache, routed


Forward = TypeVar("Forward", bound=Callable[..., Any])


def takes_normed(forward: Forward) -> Forward:
    """Mark a forward that takes a `Normed` too and then returns the stream beside its output."""
    forward.takes_normed = True  # type: ignore[attr-defined]
    return forward


class Attention(nn.Module):
    """Attention is grouped-query attention with rotary positions, optional QK-norm and biases.

    Of x [B, T, K] it returns what is to be added to the residual stream; of a `Normed`, the stream and that.
    """

    fusion: Fusion | None = None

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        c, D = config, config.rotary_width
        self.layer, self.head_dim, self.window = layer, D, c.window_of(layer)
        self.q_proj = Linear(c.width, c.heads * D, bias=c.qkv_bias)
        self.k_proj = Linear(c.width, c.kv_heads * D, bias=c.qkv_bias)
        self.v_proj = Linear(c.width, c.kv_heads * D, bias=c.qkv_bias)
        self.o_proj = Linear(c.heads * D, c.width, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, c.norm_eps), RMSNorm(D, c.norm_eps)
        self.qk_norm = c.qk_norm

    @takes_normed
    def forward(self, x_BTK: Tensor | Normed, context: _Context) -> Tensor | tuple[Tensor, Tensor]:
        source, x = source_of(x_BTK)
        B, T, _ = x.shape
        fusion = fusion_for(self.fusion, x)
        lay_in_forward(self.readers, fusion)
        stream, parts, joint = fused_linear(source, self.readers, fusion)
        norms = (self.q_norm, self.k_norm) if self.qk_norm else None
        q, k, v = split_heads(parts, joint, self.head_dim, context.cos, context.sin, norms, fusion)
        del parts, joint  # a name would hold them through attention
        causal = True
        if context.cache is not None:
            causal = context.cache.seen == 0
            k, v = context.cache.extend(self.layer, k, v, self.window)
        mask = context.masks[self.window]
        y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, mask=mask)
        _, (out,), _ = fused_linear(Plain(y.transpose(1, 2).reshape(B, T, -1)), (self.o_proj,), fusion)
        return out if stream is None else (stream, out)

    @property
    def readers(self) -> tuple[Linear, ...]:
        """Return the layers that read x, which may lie side by side."""
        return self.q_proj, self.k_proj, self.v_proj

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        super()._apply(fn, recurse)
        lay(self.readers, self.fusion)
        return self


class MLP(nn.Module):
    """An MLP computes down(silu(gate x) * up x), of x [..., K] or, with the stream beside it, of a `Normed`."""

    fusion: Fusion | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.ffn, bias=config.mlp_bias)
        self.up_proj = Linear(config.width, config.ffn, bias=config.mlp_bias)
        self.down_proj = Linear(config.ffn, config.width, bias=config.mlp_bias)

    @takes_normed
    def forward(self, x_BTK: Tensor | Normed) -> Tensor | tuple[Tensor, Tensor]:
        source, x = source_of(x_BTK)
        fusion = fusion_for(self.fusion, x)
        lay_in_forward(self.readers, fusion)
        stream, *made = fused_linear(source, self.readers, fusion)
        made = list(made)  # torch's compiler takes what the star leaves for a tuple in version 2.11
        _, (y,), _ = fused_linear(_gated(made), (self.down_proj,), fusion)
        return y if stream is None else (stream, y)

    @property
    def readers(self) -> tuple[Linear, ...]:
        """Return the layers that read x, which may lie side by side."""
        return self.gate_proj, self.up_proj

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MLP:
        super()._apply(fn, recurse)
        lay(self.readers, self.fusion)
        return self


def _gated(made: list[Any]) -> Gated:
    """Return gate and up as a source; taken out of the caller's list, whose names would hold them through the product."""
    joint, (gate, up) = made.pop(), made.pop()
    return Gated(gate, up, joint)


class Block(nn.Module):
    """A Block computes x + attention(norm(x)), then x + mlp(norm(x)); its MLP may be a sparse one."""

    fusion: Fusion | None = None

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)  # transformers' order, so that parameters come in the same one
        self.is_sparse = config.is_sparse(layer)
        self.mlp = SparseMLP(config, layer) if self.is_sparse else MLP(config)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x_BTK: Tensor, context: _Context) -> Tensor:
        fusion = fusion_for(self.fusion, x_BTK)
        x_BTK, y_BTK = after_norm(self.self_attn, self.input_layernorm, x_BTK, None, fusion, context)
        told = (context.routed,) if self.is_sparse else ()
        x_BTK, y_BTK = after_norm(self.mlp, self.post_attention_layernorm, x_BTK, y_BTK, fusion, *told)
        return x_BTK + y_BTK


def after_norm(
    reader: nn.Module, norm: RMSNorm, x_BTK: Tensor, y_BTK: Tensor | None, fusion: Fusion, *context: object
) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + y (x where y is None), and what `reader` makes of its norm; one step where nobody looks on."""
    known = getattr(type(reader).forward, "takes_normed", False)  # somebody may have put another module there
    if fusion.norm and known and not is_hooked(reader) and not is_hooked(norm):
        stream, out = reader(Normed(x_BTK, norm, y_BTK), *context)
        return stream, out
    if y_BTK is not None:
        x_BTK = x_BTK + y_BTK
    return x_BTK, reader(norm(x_BTK), *context)


def source_of(x: Tensor | Normed) -> tuple[Plain | Normed, Tensor]:
    """Return what `fused_linear` reads, and a tensor of it that tells shape, dtype and device."""
    return (x, x.stream) if isinstance(x, Normed) else (Plain(x), x)


class Backbone(nn.Module):
    """A Backbone is embedding, blocks and last norm: token ids [B, T] to hidden states [B, T, K]."""

    fusion: Fusion | None = None

    def __init__(self, config: DecoderConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        # each is cast as it is made: a large model has no room for all of them in float32
        self.embed_tokens = nn.Embedding(config.vocab, config.width).to(dtype)
        self.layers = nn.ModuleList(Block(config, i).to(dtype) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(
            config.rotary_width, config.rope_theta, config.max_length, config.rope_scaling
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        cache: KeyValueCache | None,
        documents: Tensor | None = None,
        routed: Routed | None = None,
    ) -> Tensor:
        x_BTK: Tensor = self.embed_tokens(input_ids)
        T, start = input_ids.shape[1], cache.seen if cache else 0
        if cache is not None and position_ids is None:
            position_ids = cache.positions(T)
        cos, sin = self.rotary_emb(T, x_BTK.dtype, position_ids, start)
        windows = {self.config.window_of(i) for i in range(self.config.layers)}
        of_text = (position_ids, x_BTK.device, x_BTK.dtype, documents)
        masks = {w: cache.visibility(T, w, *of_text) if cache else visibility(T, 0, w, *of_text) for w in windows}
        context = _Context(cos, sin, masks, cache, routed)
        again = self.fusion is not None and self.fusion.recompute == "full" and torch.is_grad_enabled()
        for block in self.layers:
            x_BTK = twice(block, x_BTK, context) if again else block(x_BTK, context)
        if cache is not None:
            cache.seen += T
        out: Tensor = self.norm(x_BTK)
        return out


def twice(block: nn.Module, x_BTK: Tensor, context: _Context) -> Tensor:
    """Return the block's output, of which only the input is kept: backward computes the rest again."""
    random = draws_in_forward(block)
    y: Tensor = checkpoint(block, x_BTK, context, use_reentrant=False, preserve_rng_state=random)
    return y


def draws_in_forward(block: nn.Module) -> bool:
    """Return whether a forward takes random numbers: dropout, or a recipe that rounds an operand of the forward product at
    random."""
    for module in block.modules():
        if isinstance(module, nn.Dropout) and module.p and module.training:
            return True
        layers = module.projections.values() if isinstance(module, Experts) else (module,)
        for layer in layers:
            if isinstance(layer, (Linear, ExpertsLinear)) and layer.precision is not None:
                forward = layer.precision.recipe.forward
                if any(q is not None and q.draws for q in (forward.a, forward.b)):
                    return True
    return False


def loss_of(head: nn.Module, hidden_TK: Tensor, labels_T: Tensor, vocabulary: int) -> Tensor:
    """Return the mean cross-entropy (0-d, float32) of head(hidden) against the labels that count; the logits are never whole."""
    bare = isinstance(head, nn.Linear) and type(head) in (Linear, nn.Linear) and head.bias is None
    if bare and not (isinstance(head, Linear) and (head.precision or head.storage or head.has_adapter)):
        assert isinstance(head, nn.Linear)
        return linear_cross_entropy(hidden_TK, head.weight, labels_T)
    return chunked_cross_entropy(head, hidden_TK, labels_T, vocabulary, random=draws_in_forward(head))


class Decoder(nn.Module):
    """A Decoder is a causal language model with Hugging Face's parameter names.

    `model(input_ids)` gives `.logits` [B, T, V]; `model(input_ids, labels=labels)` also gives `.loss`. Labels are unshifted as
    in transformers: the token at t is predicted from those before it, -100 is not counted.

    Attention is causal over the whole row: documents packed into one row see each other, as in most pretraining. With
    position_ids [B, T] that start anew at each document, attention stays within documents, as in transformers. `documents`
    [B, M], the first token of each, padded with T, says the same and spares CUDA devices the mask.

    With experts and in training mode, backward of the loss adds the gradient of `config.balance` times the load-balancing loss; the
    loss itself stays that of the language model.

    Weights start as small normal numbers (see `_initialize`), norms as 1, biases as 0.
    """

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None:
            check_dtype(dtype, "Decoder")
        self.config = config
        self.name_or_path: str | None = None  # where `load` found it; an adapter's config names it
        with torch.empty(0).device if device is None else find_device(device, "Decoder"):
            self.model = Backbone(config, dtype)
            self.lm_head = Linear(config.width, config.vocab).to(dtype)
            if config.experts is not None:
                self.router_use = RouterUse(config.layers - len(config.dense_layers), config.experts)
        if config.tied:
            self.tie_weights()
        if dtype is not None:
            self.to(dtype)
        self.deferred: Deferred | None = None  # where the values of a model on the meta device will come from
        if self.device.type == "meta":
            self.deferred = InitialWeights()
        else:
            self._initialize()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents: Tensor | None = None,
    ) -> Output:
        """Compute the loss or the logits. input_ids, labels and position_ids are int64 [B, T], documents int32 or int64 [B, M];
        `cache` holds earlier tokens during generation, and knows which of them are padding.

        Raises TypeError or ValueError for ids of another dtype or shape, or a sequence longer than the config's max_length, and on
        a CPU IndexError for ids outside of the vocabulary.
        """
        self.check(input_ids, labels, position_ids, cache, documents)
        if torch.compiler.is_compiling():  # which stops where an error is caught
            return self._forward(input_ids, labels, position_ids, cache, documents)
        try:
            return self._forward(input_ids, labels, position_ids, cache, documents)
        except (IndexError, RuntimeError):
            self.check_range(input_ids, labels)
            raise

    def _forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        position_ids: Tensor | None,
        cache: KeyValueCache | None,
        documents: Tensor | None,
    ) -> Output:
        if self.config.experts is not None and labels is not None and self.training and torch.is_grad_enabled():
            return self._forward_routed(input_ids, labels, position_ids, documents)
        hidden_BTK = self.model(input_ids, position_ids, cache, documents)
        if labels is None:
            return Output(None, hidden_BTK, self.lm_head, self.lm_head(hidden_BTK))
        return Output(self._loss(hidden_BTK, labels), hidden_BTK, self.lm_head)

    def _forward_routed(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None, documents: Tensor | None
    ) -> Output:
        """Compute a training step's loss, and note whom the routers chose."""
        routed = Routed(labels)
        hidden_BTK = self.model(input_ids, position_ids, None, documents, routed)
        loss, balance = self._loss(hidden_BTK, labels), routed.balance()
        self.router_use.add(routed, balance)
        if self.config.balance:
            loss = with_gradient_of(loss, balance, self.config.balance)
        return Output(loss, hidden_BTK, self.lm_head, balance_loss=balance)

    def next_logits(self, input_ids: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the logits behind the last of these tokens, float32 [B, V]; the cache has what is before them, then all."""
        hidden_BTK = self.model(input_ids, None, cache)
        logits_BV: Tensor = self.lm_head(hidden_BTK[:, -1])
        return logits_BV.float()

    def _loss(self, hidden_BTK: Tensor, labels: Tensor) -> Tensor:
        # moving the labels instead of cutting the last hidden state off saves a copy and keeps the number of rows round
        next_BT = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return loss_of(self.lm_head, hidden_BTK.flatten(0, 1), next_BT.flatten(), self.config.vocab)

    def check_range(self, input_ids: Tensor, labels: Tensor | None = None) -> None:
        """Raise IndexError where ids or labels are outside of the vocabulary; those on a GPU are not looked at."""
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids is None or ids.device.type != "cpu":
                continue
            outside = ids[((ids < 0) | (ids >= self.config.vocab)) & ((ids != IGNORED) | (name == "input_ids"))]
            if outside.numel():
                raise IndexError(
                    f"{name} has {int(outside[0])}, and the model's vocabulary goes from 0 to {self.config.vocab - 1:,}: use the "
                    "tokenizer that belongs to the model, and -100 for labels of what is not to be learned."
                )

    def check(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents: Tensor | None = None,
    ) -> None:
        """Refuse what forward cannot take, by dtype and shape alone, so without waiting for a device."""
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if not isinstance(ids, Tensor) and (ids is not None or name == "input_ids"):
                raise TypeError(f"{name} is a {type(ids).__name__}, not a tensor: torch.tensor({name}) makes one.")
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"input_ids holds token ids, int64 [batch, tokens], not {input_ids.dtype}: use .long().")
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(f"input_ids is [batch, tokens], at least one token, not {list(input_ids.shape)}.")
        for name, other in (("labels", labels), ("position_ids", position_ids)):
            if other is not None and other.shape != input_ids.shape:
                raise ValueError(
                    f"{name} {list(other.shape)} has another shape than input_ids {list(input_ids.shape)}."
                )
            if other is not None and other.dtype != torch.int64:
                raise TypeError(f"{name} is int64, not {other.dtype}: use .long().")
        if documents is not None and (documents.ndim != 2 or len(documents) != len(input_ids)):
            raise ValueError(
                f"documents holds the first token of each document, [batch, documents], not {list(documents.shape)}."
            )
        if cache is not None and torch.is_grad_enabled():
            raise ValueError("A cache keeps no gradients: call the model inside torch.no_grad().")
        length = input_ids.shape[1] + (cache.seen if cache else 0)
        if length > self.config.max_length:
            raise ValueError(
                f"The sequence has {length} tokens and the model is made for {self.config.max_length} (max_length in its "
                "config): shorten it, or load with a config of greater max_length."
            )
        if cache is not None and length > cache.length:
            raise ValueError(
                f"The cache has room for {cache.length} tokens, and these would make {length}: make it for more."
            )

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, one Parameter."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)
        if self.config.tied:  # leaving the meta device makes new parameters
            self.tie_weights()
        return self

    @torch.no_grad()
    def _initialize(self) -> None:
        """Normal weights. Embeddings have 1 / sqrt(width), so that a tied head starts with logits of size one; layers half of
        1 / sqrt(in_features), and the two of a block that write to the residual stream 1 / sqrt(2 layers) of that, as GPT-2."""
        for name, module in self.named_modules():
            self.initialize(name, module)

    def initialize(self, name: str, module: nn.Module) -> None:
        """Draw the first values of one module's own parameters; of experts and their router all."""
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=self.config.width**-0.5)
        elif isinstance(module, nn.Linear) and not (module is self.lm_head and self.config.tied):
            std = 0.5 * module.in_features**-0.5
            writes = name.endswith(("o_proj", "down_proj"))
            module.weight.normal_(std=std / math.sqrt(2 * self.config.layers) if writes else std)
        elif isinstance(module, SparseMLP):
            experts, std = module.experts, 0.5 * self.config.width**-0.5
            module.gate.weight.normal_(std=std)
            experts.gate_up_proj.normal_(std=std)
            experts.down_proj.normal_(std=0.5 * (self.config.expert_width * 2 * self.config.layers) ** -0.5)
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias.zero_()
