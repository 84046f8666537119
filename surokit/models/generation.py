"""Generate text from a decoder, token by token, with a cache of keys and values.

`generate` runs a `Generation` to its end. Whoever wants the forward over the prompts apart from those over one token, to profile
them or to show text as it comes, runs one by hand. Prompts of different lengths are padded at the left, so that the next token of
every row goes to one column. Ids, keys and values have their places from the beginning on: nothing is concatenated.

B batch, T tokens of the longest prompt, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor, nn

from surokit.models.config import DecoderConfig
from surokit.models.decoder import Decoder, KeyValueCache
from surokit.nn.evaluating import evaluating
from surokit.places import check_values

Prompts: TypeAlias = Tensor | Sequence[Tensor | Sequence[int]]


def generate(
    model: nn.Module,
    input_ids: Prompts,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    eos_id: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the prompts and up to max_new_tokens more, int64 [B, T + n]: `[:, T:]` are the new ones of every row.

    input_ids: int64 [B, T], or a list of prompts, each a list of ids or a 1-D tensor, which are padded at the left to the longest
    with the config's pad token or 0. attention_mask: bool or integers [B, T], as a tokenizer of transformers gives it: 0 for
    padding, at the left. Padding is never attended to and positions count from a row's first real token, so that a row gets what it
    gets alone, but for roundings (of a tensor's one scale too, in recipes that have such scales for activations).

    temperature 0 takes the likeliest token (equal to transformers' greedy search), above it draws from
    softmax(logits / temperature), among the top_k likeliest where given, with `generator` on the model's device. A row ends at
    eos_id, one or several, by default the model's own (config.eos_id; () for none), and is filled up with the config's pad token
    or the first eos_id.

    The processes among which a model is divided call this together, with the same prompts.

    Computes without gradients, in evaluation mode, and leaves every module in the mode it was in. Raises TypeError for a model
    that is not a surokit.Decoder (transformers' models have their own generate) and for prompts that are none, ValueError for
    impossible settings and padding that is not at the left.
    """
    writing = Generation(model, input_ids, max_new_tokens, temperature, top_k, generator, eos_id, attention_mask)
    with evaluating(model):
        writing.prefill()
        while not writing.ended:
            writing.step()
    return writing.ids


class Generation:
    """A Generation writes tokens behind a batch of prompts, a forward at a time: `prefill()`, then `step()` for each token more.

        writing = Generation(model.eval(), input_ids, max_new_tokens=64)
        token_B1 = writing.prefill()     # a forward over [B, T]
        while not writing.ended:
            token_B1 = writing.step()    # a forward over [B, 1]
        writing.ids                      # [B, T + n]

    It takes what `generate` takes, refuses what that refuses, and computes without gradients, in the mode that the model is in.
    Neither `prefill` nor `step` waits for the device; making one does, for a mask's sake, and so does `ended` where there are end
    tokens.

    logits: float32 [B, V], those that the last token was chosen by; there from `prefill` on.
    cache: the KeyValueCache, in the dtype of the embedding; `cache.seen` tokens of each row, padding included, are in it.
    """

    logits: Tensor

    def __init__(
        self,
        model: nn.Module,
        input_ids: Prompts,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        eos_id: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        if not isinstance(model, Decoder):
            raise TypeError(
                f"generate() takes a surokit.Decoder, not a {type(model).__name__}: use the model's own generate()."
            )
        config = model.config
        if max_new_tokens < 1:
            raise ValueError(f"generate(max_new_tokens={max_new_tokens}): at least 1.")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"generate(temperature={temperature}, top_k={top_k}): temperature >= 0 and top_k >= 1.")
        check_values(model, "generate")
        weight, padding_B = model.model.embed_tokens.weight, None
        if isinstance(input_ids, Sequence):
            if attention_mask is not None:
                raise TypeError(
                    "generate() pads a list of prompts by itself: leave attention_mask out, or give input_ids as a tensor."
                )
            input_ids, padding_B = _left_padded(input_ids, _pad_id(config) or 0, weight.device)
        model.check(input_ids)
        model.check_range(input_ids)
        if attention_mask is not None:
            padding_B = _padding_of(attention_mask, input_ids).to(weight.device)
        B, T = input_ids.shape
        if config.max_length <= T:
            raise ValueError(
                f"The prompt's {T} tokens leave no room in the model's {config.max_length} (max_length in its config): shorten it."
            )
        if T + max_new_tokens > config.max_length:
            raise ValueError(
                f"{T} tokens of prompt and max_new_tokens={max_new_tokens} are more than the model's {config.max_length} "
                "(max_length in its config): ask for fewer."
            )
        ends = config.eos_ids if eos_id is None else (eos_id,) if isinstance(eos_id, int | Integral) else tuple(eos_id)
        pad = _pad_id(config)
        _gather_for_tokens(model)
        self.model, self.max_new_tokens = model, max_new_tokens
        self.cache = KeyValueCache(config, B, T + max_new_tokens, weight.device, weight.dtype, padding_B)
        self._how = temperature, top_k, generator
        self._ids = torch.empty(B, T + max_new_tokens, dtype=torch.int64, device=input_ids.device)
        self._ids[:, :T] = input_ids
        self._written = T
        self._ends = torch.tensor(ends, dtype=torch.int64, device=input_ids.device) if ends else None
        self._fill = pad if pad is not None else ends[0] if ends else 0
        self._ended_B = torch.zeros(B, dtype=torch.bool, device=input_ids.device)

    @property
    def ids(self) -> Tensor:
        """Return the prompts with their padding and all tokens written so far, int64 [B, T + n]."""
        return self._ids[:, : self._written]

    @property
    def ended(self) -> bool:
        """Return whether there is nothing more to write: max_new_tokens are there, or every row has ended."""
        if self._written == self._ids.shape[1]:
            return True
        return self._ends is not None and bool(self._ended_B.all())

    def prefill(self) -> Tensor:
        """Compute the prompts, [B, T], and return the first new token of each row, int64 [B, 1].

        Raises RuntimeError where the prompts are in the cache already.
        """
        if self.cache.seen:
            raise RuntimeError("prefill() has filled the cache already: step() writes the next token.")
        return self._forward()

    def step(self) -> Tensor:
        """Compute the last token of each row, [B, 1], and return the next one, int64 [B, 1]; the fill of a row that has ended.

        Raises RuntimeError before `prefill`, and when max_new_tokens are written.
        """
        if not self.cache.seen:
            raise RuntimeError("step() goes on from what prefill() computed: call that first.")
        if self._written == self._ids.shape[1]:
            raise RuntimeError(
                f"All tokens of max_new_tokens={self.max_new_tokens} are written: make a Generation for more."
            )
        return self._forward()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        """Compute what is written and not yet in the cache, and write the token that follows."""
        self.logits = self.model.next_logits(self._ids[:, self.cache.seen : self._written], self.cache)
        token_B = _choose(self.logits, *self._how)
        if self._ends is not None:
            token_B = token_B.masked_fill(self._ended_B, self._fill)
            self._ended_B |= torch.isin(token_B, self._ends)
        self._ids[:, self._written] = token_B
        self._written += 1
        return token_B[:, None]


def _gather_for_tokens(model: Decoder) -> None:
    """Let FSDP2, where it divides the model, gather the weights of `next_logits` as it gathers those of a forward."""
    # told by what it can do: its module need not be loaded
    if hasattr(model, "unshard") and "next_logits" not in vars(model):
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, "next_logits")


def _pad_id(config: DecoderConfig) -> int | None:
    """Return the config's pad token; None where it has none, or one without an embedding, such as Llama's -1."""
    return config.pad_id if config.pad_id is not None and 0 <= config.pad_id < config.vocab else None


def _left_padded(prompts: Sequence[Tensor | Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts as one tensor [B, T] and the padding of each row [B], both int64."""
    rows = []
    for i, prompt in enumerate(prompts):
        ids = (
            isinstance(prompt, Tensor) and prompt.ndim == 1 and not (prompt.is_floating_point() or prompt.is_complex())
        )
        if not ids and not (isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt)):
            raise TypeError(
                f"A list of prompts has a list of token ids or a 1-D tensor of them for each, and prompt {i} is {_what(prompt)}: "
                "a single prompt is [ids]."
            )
        if len(prompt) == 0:
            raise ValueError(f"Prompt {i} is empty, and there is no token to go on from: begin it with one.")
        rows.append(torch.as_tensor(prompt, dtype=torch.int64, device="cpu"))
    if not rows:
        raise ValueError("The list of prompts is empty: give at least one.")
    T = max(map(len, rows))
    ids_BT = torch.full((len(rows), T), pad, dtype=torch.int64)
    for row_T, ids_T in zip(ids_BT, rows):
        row_T[T - len(ids_T) :] = ids_T
    return ids_BT.to(device), torch.tensor([T - len(ids_T) for ids_T in rows]).to(device)


def _what(prompt: object) -> str:
    if isinstance(prompt, Tensor):
        return f"a tensor {list(prompt.shape)} of {prompt.dtype}"
    return f"the {type(prompt).__name__} {prompt!r:.40}"


def _padding_of(attention_mask: Tensor, input_ids: Tensor) -> Tensor:
    """Return how many tokens of padding each row begins with, int64 [B], or refuse a mask that hides others."""
    if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point() or attention_mask.is_complex():
        what = attention_mask.dtype if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise TypeError(f"attention_mask is a tensor of bool or int64 like input_ids, not {what}: use .bool().")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} has another shape than input_ids {list(input_ids.shape)}: give it a "
            "column for each token of the prompts."
        )
    real_BT = attention_mask.to(input_ids.device) != 0
    padded_left_B = real_BT[:, -1] & (real_BT[:, 1:] >= real_BT[:, :-1]).all(1)
    if not bool(padded_left_B.all()):
        raise ValueError(
            f"Row {int(padded_left_B.int().argmin())} of attention_mask has padding elsewhere than at the left, or nothing but "
            'padding: set padding_side="left" at the tokenizer, or give a list of prompts.'
        )
    return (~real_BT).sum(1)


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV / temperature
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(1)
