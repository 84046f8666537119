"""The decoder: embedding, blocks of attention and SwiGLU around a residual stream, head. Llama, Mistral, Qwen2.5 and Qwen3.

Modules carry Hugging Face's names, so that state-dict keys are a checkpoint's keys. The loss never makes whole logits.

B batch, T tokens, K width, H query heads, G key heads, D head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from surokit.models.config import DecoderConfig
from surokit.nn.attention import attention
from surokit.nn.linear import Linear
from surokit.nn.loss import IGNORED, chunked_cross_entropy, linear_cross_entropy
from surokit.nn.norm import RMSNorm
from surokit.nn.rope import RotaryEmbedding, apply_rope
from surokit.nn.swiglu import swiglu

__all__ = ["Decoder", "DecoderConfig", "KeyValueCache", "Output"]


class Output:
    """What a decoder returns: `loss` (0-d float32, None without labels) and `logits` [B, T, V].

    With labels, the logits are computed from the last hidden state when they are first read, and carry gradients then too.
    """

    def __init__(self, loss: Tensor | None, hidden: Tensor, head: nn.Module, logits: Tensor | None = None) -> None:
        self.loss = loss
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
    """Keys and values of the tokens seen so far, for generation: one preallocated pair [B, length, G, D] a block."""

    def __init__(
        self, config: DecoderConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, 2, batch, length, config.kv_heads, config.rotary_width)
        self._tensors = torch.empty(shape, device=device, dtype=dtype)
        self.seen = 0

    def extend(self, layer: int, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """Append this forward's keys and values of one block and return all of them, [B, S, G, D]."""
        end = self.seen + k_BTGD.shape[1]
        keys, values = self._tensors[layer]
        keys[:, self.seen : end], values[:, self.seen : end] = k_BTGD, v_BTGD
        return keys[:, :end], values[:, :end]


class _Context:
    """What every block of one forward shares: rotary tables, visibility, cache."""

    def __init__(
        self, cos: Tensor, sin: Tensor, masks: dict[int | None, Tensor | None], cache: KeyValueCache | None
    ) -> None:
        self.cos, self.sin, self.masks, self.cache = cos, sin, masks, cache


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, optional QK-norm and biases."""

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

    def forward(self, x_BTK: Tensor, context: _Context) -> Tensor:
        B, T, _ = x_BTK.shape
        q, k, v = (p(x_BTK).view(B, T, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, context.cos, context.sin), apply_rope(k, context.cos, context.sin)
        causal = True
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
            causal = k.shape[1] == T
        mask = context.masks[self.window]
        y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, mask=mask)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return out


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.ffn, bias=config.mlp_bias)
        self.up_proj = Linear(config.width, config.ffn, bias=config.mlp_bias)
        self.down_proj = Linear(config.ffn, config.width, bias=config.mlp_bias)

    def forward(self, x_BTK: Tensor) -> Tensor:
        y: Tensor = self.down_proj(swiglu(self.gate_proj(x_BTK), self.up_proj(x_BTK)))
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)  # transformers' order, so that parameters come in the same one
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x_BTK: Tensor, context: _Context) -> Tensor:
        x_BTK = x_BTK + self.self_attn(self.input_layernorm(x_BTK), context)
        x_BTK = x_BTK + self.mlp(self.post_attention_layernorm(x_BTK))
        return x_BTK


class Backbone(nn.Module):
    """Embedding, blocks and last norm: token ids [B, T] to hidden states [B, T, K]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(
            config.rotary_width, config.rope_theta, config.max_length, config.rope_scaling
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        x_BTK: Tensor = self.embed_tokens(input_ids)
        T, start = input_ids.shape[1], cache.seen if cache else 0
        cos, sin = self.rotary_emb(T, x_BTK.dtype, position_ids, start)
        windows = {self.config.window_of(i) for i in range(self.config.layers)}
        masks = {window: visible(T, start, window, position_ids, x_BTK.device) for window in windows}
        context = _Context(cos, sin, masks, cache)
        for block in self.layers:
            x_BTK = block(x_BTK, context)
        if cache is not None:
            cache.seen += T
        out: Tensor = self.norm(x_BTK)
        return out


class Decoder(nn.Module):
    """A causal language model with Hugging Face's parameter names.

    `model(input_ids)` gives `.logits` [B, T, V]; `model(input_ids, labels=labels)` also gives `.loss`. Labels are unshifted as
    in transformers: the token at t is predicted from those before it, -100 is not counted.

    Attention is causal over the whole row: documents packed into one row see each other, as in most pretraining. With
    position_ids [B, T] that start anew at each document, attention stays within documents, as in transformers.

    Weights start as small normal numbers (see `_initialize`), norms as 1, biases as 0.
    """

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.name_or_path: str | None = None  # where `load` found it; an adapter's config names it
        with torch.device(device) if device is not None else torch.device(torch.empty(0).device):
            self.model = Backbone(config)
            self.lm_head = Linear(config.width, config.vocab)
        if config.tied:
            self.tie_weights()
        if dtype is not None:
            self.to(dtype)
        if self.device.type != "meta":
            self._initialize()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Output:
        """input_ids, labels and position_ids are int64 [B, T]; `cache` holds earlier tokens during generation.

        Raises TypeError or ValueError for ids of another dtype or shape, or a sequence longer than the config's max_length.
        """
        self.check(input_ids, labels, position_ids, cache)
        hidden_BTK = self.model(input_ids, position_ids, cache)
        if labels is None:
            return Output(None, hidden_BTK, self.lm_head, self.lm_head(hidden_BTK))
        # moving the labels instead of cutting the last hidden state off saves a copy and keeps the number of rows round
        next_BT = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        loss = self._loss(hidden_BTK.flatten(0, 1), next_BT.flatten())
        return Output(loss, hidden_BTK, self.lm_head)

    def _loss(self, hidden_TK: Tensor, labels_T: Tensor) -> Tensor:
        head = self.lm_head
        plain = type(head) in (Linear, nn.Linear) and head.bias is None
        if plain and not (isinstance(head, Linear) and (head.precision or head.storage or head.has_adapter)):
            return linear_cross_entropy(hidden_TK, head.weight, labels_T)
        return chunked_cross_entropy(head, hidden_TK, labels_T, self.config.vocab)

    def check(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> None:
        """Refuse what forward cannot take, by dtype and shape alone, so without waiting for a device."""
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
        if cache is not None and torch.is_grad_enabled():
            raise ValueError("A cache keeps no gradients: call the model inside torch.no_grad().")
        length = input_ids.shape[1] + (cache.seen if cache else 0)
        if length > self.config.max_length:
            raise ValueError(
                f"The sequence has {length} tokens and the model is made for {self.config.max_length} (max_length in its "
                "config): shorten it, or load with a config of greater max_length."
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
            if isinstance(module, nn.Embedding):
                module.weight.normal_(std=self.config.width**-0.5)
            elif isinstance(module, nn.Linear) and not (module is self.lm_head and self.config.tied):
                std = 0.5 * module.in_features**-0.5
                writes = name.endswith(("o_proj", "down_proj"))
                module.weight.normal_(std=std / math.sqrt(2 * self.config.layers) if writes else std)
            bias = getattr(module, "bias", None)
            if bias is not None:
                bias.zero_()


def visible(T: int, start: int, window: int | None, position_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Which keys each of T queries from position `start` on sees: bool [T, S] or [B, 1, T, S] with S = start + T.

    None where plain causal attention (or, for a single query, all keys) says the same. A window of w shows the query itself and
    the w - 1 keys before it. position_ids [B, T] that do not go on by one start a new document.
    """
    S = start + T
    if window is not None and window >= S:
        window = None
    if position_ids is None and window is None and (start == 0 or T == 1):
        return None
    query, key = torch.arange(start, S, device=device)[:, None], torch.arange(S, device=device)
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    if position_ids is not None and start == 0:
        new_BT = nn.functional.pad(position_ids.diff() != 1, (1, 0))
        document_BT = new_BT.cumsum(-1)
        mask = mask & (document_BT[:, None, :, None] == document_BT[:, None, None, :])
    return mask
