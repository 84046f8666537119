"""Define what the modules of transformers become when they are fused: subclasses of their own classes, with our forward.

`fused(module, part, fusion)` changes the class of one object, as FSDP2 does: the class keeps its name, `isinstance` holds, hooks,
parameters and keys stay, no other model sees anything, and `restored` changes it back. A copy or a pickle stays fused.

Where a forward of ours does not apply (torch's compiler looks on, autocast is on, a hook wants to see what is not made), the
module's own forward runs.

B batch, T tokens, K width, D head width, V vocabulary.
"""

from __future__ import annotations

import sys
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surokit.models.decoder import MLP, after_norm, draws_in_forward, loss_of, source_of, takes_normed
from surokit.nn.fusion import OFF, Fusion, fusion_for
from surokit.nn.joint import lay, lay_in_forward
from surokit.nn.linear import Linear
from surokit.nn.loss import IGNORED
from surokit.nn.norm import RMSNorm
from surokit.nn.qk import split_heads
from surokit.nn.stages import Normed, Plain, fused_linear
from surokit.torch_private import is_hooked

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


class FusedMixin(nn.Module):
    """A FusedMixin is mixed into a class of transformers, which is `original`."""

    original: Any  # a class of transformers
    fusion: Fusion | None
    config: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class has no name of its own that a pickle could find: it is made again."""
        return _empty, (_part_of(self), self.original), self.__dict__


class FusedNorm(RMSNorm, FusedMixin):
    """A FusedNorm is transformers' RMSNorm by our kernel, under autocast too: it rounds once, to the dtype of x, where theirs
    rounds before the product with the weight."""

    variance_epsilon: float

    @property
    def eps(self) -> float:  # type: ignore[override]
        return self.variance_epsilon


class FusedMLP(MLP, FusedMixin):
    """A FusedMLP computes gate, up and down of transformers as our MLP does."""

    @takes_normed
    def forward(self, x: Tensor | Normed) -> Any:
        if isinstance(x, Tensor) and fusion_for(self.fusion, x) == OFF:
            return self.original.forward(self, x)
        return super().forward(x)


class FusedAttention(FusedMixin):
    """A FusedAttention has transformers' own attention function and cache between projections that are computed together.

    Of hidden states [B, T, K] it returns (output, weights) as theirs; of a `Normed`, the stream and the output.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    head_dim: int
    layer_idx: int
    scaling: float
    attention_dropout: float
    sliding_window: int | None

    def forward(
        self,
        hidden_states: Tensor | Normed,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        source, x = source_of(hidden_states)
        fusion = fusion_for(self.fusion, x)
        aside = isinstance(hidden_states, Normed)
        if position_embeddings is None or (not aside and fusion == OFF):
            kwargs |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            return self.original.forward(self, hidden_states, past_key_values=past_key_values, **kwargs)
        lay_in_forward(self.readers, fusion)
        stream, parts, joint = fused_linear(source, self.readers, fusion)
        cos, sin = (half(table) for table in position_embeddings)
        norms = (self.q_norm, self.k_norm) if "q_norm" in self._modules else None
        q, k, v = split_heads(parts, joint, self.head_dim, cos, sin, norms, fusion)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        options: dict[str, Any] = {"dropout": dropout, "scaling": self.scaling, **self._window()}
        y, weights = self._interface()(self, q, k, v, attention_mask, **options, **kwargs)
        _, (out,), _ = fused_linear(Plain(y.reshape(*x.shape[:-1], -1).contiguous()), (self.o_proj,), fusion)
        return (stream, out) if aside else (out, weights)

    @property
    def readers(self) -> tuple[Linear, ...]:
        """Return the layers that read x, which may lie side by side."""
        return self.q_proj, self.k_proj, self.v_proj

    def _window(self) -> dict[str, Any]:
        """Return what this family tells the attention function about a sliding window."""
        family = self.original.__name__.removesuffix("Attention")
        if family == "Llama":
            return {}
        return {"sliding_window": self.config.sliding_window if family == "Mistral" else self.sliding_window}

    def _interface(self) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = sys.modules[self.original.__module__].eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        lay(self.readers, self.fusion)
        return self


class FusedLayer(FusedMixin):
    """A FusedLayer computes residual sums and norms with the layers that read them; its activations may be computed again."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    gradient_checkpointing: bool

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        again = self.fusion is not None and self.fusion.recompute == "full" and not args
        # not where transformers' own checkpointing is on: once is enough
        again = again and self.training and torch.is_grad_enabled() and not self.gradient_checkpointing
        if again and not _sees_more(past_key_values, self.self_attn):
            # a second forward must not extend the cache again, so there is none, as with transformers' own checkpointing
            call = {**kwargs, "past_key_values": None, "use_cache": False}
            random = draws_in_forward(self) or getattr(self.self_attn, "attention_dropout", 0) > 0
            return checkpoint(self._once, hidden_states, **call, use_reentrant=False, preserve_rng_state=random)
        return self._once(hidden_states, *args, past_key_values=past_key_values, **kwargs)

    def _once(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        first, second = self.input_layernorm, self.post_attention_layernorm
        fusion = fusion_for(self.fusion, hidden_states)
        known = isinstance(self.self_attn, FusedAttention) and isinstance(self.mlp, FusedMLP)
        normed = fusion.norm and isinstance(first, FusedNorm) and isinstance(second, FusedNorm)
        if args or not known or not normed or kwargs.get("position_embeddings") is None:
            return self.original.forward(self, hidden_states, *args, **kwargs)
        assert isinstance(first, FusedNorm)
        assert isinstance(second, FusedNorm)
        x = hidden_states
        if is_hooked(self.self_attn) or is_hooked(first):
            y, _ = self.self_attn(hidden_states=first(x), **kwargs)
        else:
            x, y = self.self_attn(Normed(x, first), **kwargs)
        x, y = after_norm(self.mlp, second, x, y, fusion)
        return x + y


class FusedCausalLM(FusedMixin):
    """A FusedCausalLM never makes whole logits for its training loss; they are computed when they are read."""

    model: nn.Module
    lm_head: nn.Module
    loss_function: Any

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None or args or not self._takes(kwargs):
            if labels is not None:
                kwargs["labels"] = labels
            return self.original.forward(self, *args, **kwargs)
        kwargs.pop("logits_to_keep", None)
        kwargs.pop("return_dict", None)
        outputs = self.model(**kwargs)
        hidden = outputs.last_hidden_state
        wanted, ignored = kwargs.get("shift_labels"), kwargs.get("ignore_index", IGNORED)
        if wanted is None:
            wanted = nn.functional.pad(labels[..., 1:], (0, 1), value=ignored)
        wanted = wanted.to(hidden.device).flatten()
        if ignored != IGNORED:
            wanted = torch.where(wanted == ignored, IGNORED, wanted)
        loss = loss_of(self.lm_head, hidden.flatten(0, -2), wanted, self.config.vocab_size)
        items = kwargs.get("num_items_in_batch")
        if items is not None:  # the targets of all parts of a step, over which the sums of all are divided
            items = items.to(loss.device) if isinstance(items, Tensor) else items
            loss = loss * (wanted != IGNORED).sum() / items
        return _late(loss, outputs, self.lm_head, hidden)

    def _takes(self, kwargs: dict[str, Any]) -> bool:
        from transformers.loss.loss_utils import ForCausalLMLoss

        head, keep, as_dict = self.lm_head, kwargs.get("logits_to_keep", 0), kwargs.get("return_dict")
        if not isinstance(head, nn.Linear) or type(head) not in (nn.Linear, Linear) or is_hooked(head):
            return False
        return (
            self.training
            and torch.is_grad_enabled()
            and type(head.weight) is nn.Parameter
            and fusion_for(self.fusion, head.weight) != OFF
            and self.loss_function is ForCausalLMLoss
            and isinstance(keep, int)
            and keep == 0
            and bool(self.config.return_dict if as_dict is None else as_dict)
        )


def _sees_more(cache: Any, attention: nn.Module) -> bool:
    """Return whether a cache holds keys of earlier tokens for this attention: those of a prefix that is tuned, for example."""
    return cache is not None and bool(cache.get_seq_length(getattr(attention, "layer_idx", 0)))


def half(table: Tensor) -> Tensor:
    """Return cos or sin as we take it, [B, T, D/2] or [T, D/2], of [B, T, D] whose halves are equal."""
    table = table[..., : table.shape[-1] // 2]
    return table[0] if len(table) == 1 else table


# -- one object's class, there and back


def fused(module: nn.Module, part: type[FusedMixin], fusion: Fusion) -> None:
    """Make `module` compute as `part` does, in place."""
    module.__class__ = _class(part, type(module))
    module.__dict__["fusion"] = fusion


def restored(module: FusedMixin) -> bool:
    """Give `module` its own class back; False where another was put over ours (FSDP2's), and only the fusion is off then."""
    if type(module) is not _class(_part_of(module), module.original):
        module.fusion = OFF
        return False
    del module.__dict__["fusion"]
    module.__class__ = module.original
    return True


def _made(part: Any, original: Any) -> Any:
    """Return the class that is both, under the original's name."""
    namespace: dict[str, Any] = {"original": original, "__module__": original.__module__, "__doc__": original.__doc__}
    namespace["__qualname__"] = original.__qualname__
    if part is FusedCausalLM:  # the Trainer reads the names of the arguments
        forward = part.forward
        namespace["forward"] = wraps(original.forward)(lambda self, *args, **kwargs: forward(self, *args, **kwargs))
    return type(original)(original.__name__, (part, original), namespace)


_class: Any = cache(_made)  # one class for all objects


def _part_of(module: FusedMixin) -> type[FusedMixin]:
    return next(kind for kind in type(module).__mro__ if kind.__module__ == __name__)


def _empty(part: type[FusedMixin], original: type[nn.Module]) -> Any:
    kind = _class(part, original)
    return kind.__new__(kind)


@cache
def _late_class() -> type[Any]:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Late(CausalLMOutputWithPast):
        """The output of a training step: `logits` are computed, with their gradient, when they are first read."""

        @property
        def logits(self) -> Tensor | None:
            made = self.__dict__.get("_logits")
            if made is None and "_head" in self.__dict__:
                head, hidden = self.__dict__["_head"]
                made = self.__dict__["_logits"] = head(hidden)
            return made

        @logits.setter
        def logits(self, value: Tensor | None) -> None:
            self.__dict__["_logits"] = value

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                return self.logits if key == "logits" else super().__getitem__(key)
            return self.loss if key == 0 else self.to_tuple()[key]

        def get(self, key: Any, default: Any = None) -> Any:
            return self.logits if key == "logits" else super().get(key, default)

        def to_tuple(self) -> tuple[Any, ...]:
            loss, *rest = super().to_tuple()
            return loss, self.logits, *rest

    return Late


def _late(loss: Tensor, outputs: Any, head: nn.Module, hidden: Tensor) -> Any:
    past, states, attentions = outputs.past_key_values, outputs.hidden_states, outputs.attentions
    made = _late_class()(loss=loss, past_key_values=past, hidden_states=states, attentions=attentions)
    made.__dict__["_head"] = head, hidden
    return made


# -- asked with stand-ins what a class of another version computes


def computes_rms_norm(kind: type[nn.Module]) -> bool:
    """Return whether this class's forward is x / sqrt(mean(x^2) + variance_epsilon) * weight."""
    x, w = _numbers(3, 8), _numbers(8)
    stand_in = SimpleNamespace(weight=w, variance_epsilon=0.1)
    return _agrees(kind, stand_in, x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * w)


def computes_swiglu(kind: type[nn.Module], activation: Any) -> bool:
    """Return whether this class's forward is down(silu(gate(x)) * up(x)) with the activation that an object of it has."""
    x = _numbers(3, 8)
    stand_in = SimpleNamespace(
        gate_proj=lambda t: 2 * t, up_proj=lambda t: t - 3, down_proj=lambda t: t + 5, act_fn=activation, config=None
    )
    return _agrees(kind, stand_in, x, torch.sigmoid(2 * x) * 2 * x * (x - 3) + 5)


def _numbers(*shape: int) -> Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel(), dtype=torch.float32, device="cpu").reshape(shape).sin()


def _agrees(kind: type[nn.Module], stand_in: Any, x: Tensor, expected: Tensor) -> bool:
    try:
        with torch.no_grad():
            y = kind.forward(stand_in, x)
    except (AttributeError, TypeError, RuntimeError):  # it wants something else than what we know
        return False
    return isinstance(y, Tensor) and y.shape == expected.shape and torch.allclose(y, expected, atol=1e-5)


@cache
def computes_alike(family: str) -> bool:
    """Return whether a tiny model of this family, in the transformers that is installed, has the loss and gradients that ours
    has."""
    from importlib import import_module

    module = import_module(f"transformers.models.{family.lower()}")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    config = getattr(module, f"{family}Config")(**sizes, num_hidden_layers=1, vocab_size=16, pad_token_id=None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        model = getattr(module, f"{family}ForCausalLM")(config).float().train()
        ids = torch.arange(12).view(2, 6)
        for parameter in model.parameters():
            parameter.data.copy_(_numbers(*parameter.shape))
        results = []
        for fuses in (False, True):
            if fuses:
                for part, kinds in _PARTS.items():
                    for child in [m for m in model.modules() if type(m).__name__.removeprefix(family) in kinds]:
                        fused(child, part, Fusion())
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters())])
    return all(torch.allclose(a, b, atol=1e-4, rtol=1e-3) for a, b in zip(*results))


_PARTS: dict[type[FusedMixin], tuple[str, ...]] = {
    FusedNorm: ("RMSNorm",),
    FusedMLP: ("MLP",),
    FusedAttention: ("Attention",),
    FusedLayer: ("DecoderLayer",),
    FusedCausalLM: ("ForCausalLM",),
}
