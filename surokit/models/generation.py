"""Generate text from a decoder, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from surokit.models.decoder import Decoder, KeyValueCache
from surokit.places import check_values


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    eos_id: int | Sequence[int] | None = None,
) -> Tensor:
    """Return the prompt and up to max_new_tokens more, int64 [B, T + n].

    input_ids: int64 [B, T]; the rows of a batch have one length, there is no padding. temperature 0 takes the likeliest
    token (equal to transformers' greedy search), above it draws from softmax(logits / temperature), among the top_k
    likeliest where given, with `generator` on the model's device. A row ends at eos_id, one or several, by default the
    model's own (config.eos_id; () for none), and is filled up with the config's pad token or the first eos_id.

    Computes without gradients, in evaluation mode, and leaves the model in the mode it was in. Raises TypeError for a model
    that is not a surokit.Decoder (transformers' models have their own generate) and ValueError for impossible settings.
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"generate() takes a surokit.Decoder, not a {type(model).__name__}: use the model's own generate()."
        )
    config = model.config
    ends = config.eos_ids if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
    if max_new_tokens < 1:
        raise ValueError(f"generate(max_new_tokens={max_new_tokens}): at least 1.")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"generate(temperature={temperature}, top_k={top_k}): temperature >= 0 and top_k >= 1.")
    check_values(model, "generate")
    model.check(input_ids)
    model.check_range(input_ids)
    if input_ids.shape[1] >= config.max_length:
        raise ValueError(
            f"The prompt's {input_ids.shape[1]} tokens leave no room in the model's {config.max_length} (max_length in its "
            "config): shorten it."
        )
    if input_ids.shape[1] + max_new_tokens > config.max_length:
        raise ValueError(
            f"{input_ids.shape[1]} tokens of prompt and max_new_tokens={max_new_tokens} are more than the model's "
            f"{config.max_length} (max_length in its config): ask for fewer."
        )
    training = model.training
    model.eval()
    try:
        return _generate(model, input_ids, max_new_tokens, temperature, top_k, generator, ends)
    finally:
        model.train(training)


def _generate(
    model: Decoder,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    ends: tuple[int, ...],
) -> Tensor:
    B, T = input_ids.shape
    weight = model.model.embed_tokens.weight
    cache = KeyValueCache(model.config, B, T + max_new_tokens, weight.device, weight.dtype)
    end_tokens = torch.tensor(ends, dtype=torch.int64, device=input_ids.device)
    fill = model.config.pad_id if model.config.pad_id is not None else ends[0] if ends else 0
    ended_B = torch.zeros(B, dtype=torch.bool, device=input_ids.device)
    rows, step = [input_ids], input_ids
    for _ in range(max_new_tokens):
        hidden_BTK = model.model(step, None, cache)
        logits_BV = model.lm_head(hidden_BTK[:, -1]).float()
        token_B = _choose(logits_BV, temperature, top_k, generator)
        if ends:
            token_B = token_B.masked_fill(ended_B, fill)
            ended_B |= torch.isin(token_B, end_tokens)
        step = token_B[:, None]
        rows.append(step)
        if ends and bool(ended_B.all()):
            break
    return torch.cat(rows, dim=1)


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV / temperature
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(1)
