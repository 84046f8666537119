"""Measure the bytes that one training step really takes, beside the planner's prediction: small decoders, many settings.

On a CPU torch's profiler reports each allocation and each release of torch's CPU allocator. It listens from before the model is
built, so the running sum is what tensors hold, in and between operations. The scratch of matrix products is left out: how
much a product takes depends on the CPU (without bf16 instructions oneDNN converts), and a plan is of tensors that live.
On CUDA the same marks read torch.cuda.max_memory_allocated. The second step is measured: the first one makes the optimizer's
states.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from surokit.bench.result import markdown
from surokit.fusion import Recompute
from surokit.profiler.record.allocations import REST, Meter

if TYPE_CHECKING:
    import torch
    from torch import nn

PHASES = ("forward", "backward", "optimizer")
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """A Setting is one step: whose layers, their sizes, recipe and optimizer.

    `family` is "decoder" for surokit's, or "llama" and "qwen3" for transformers'. `recipe` is a name; `rank` adds an
    adapter. `states` is the moments' dtype; None is the weights' own. A part has `batch` sequences of `length` tokens;
    `accumulate` of them. `fusion` "fused" is `sk.fuse`, which surokit's "selective" recompute needs.
    """

    name: str
    family: Literal["decoder", "llama", "qwen3"] = "decoder"
    dtype: Literal["bf16", "fp32"] = "bf16"
    recipe: str | None = None
    rank: int = 0
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    states: Literal["fp32"] | None = None
    batch: int = 2
    length: int = 256
    accumulate: int = 1
    recompute: Recompute = "none"
    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 704
    vocab: int = 4096
    tied: bool = False
    qk_norm: bool = False
    fusion: Literal["none", "fused"] = "none"
    transposed: Literal["cached"] | None = None

    @property
    def theirs(self) -> bool:
        """Return whether transformers' layers compute."""
        return self.family != "decoder"


@dataclass(frozen=True)
class Measured:
    """A Measured holds the bytes before the step, and the most that was held in each phase of it.

    `left` outlives model and optimizer: memory that libraries keep between calls. It is in none of the others.
    """

    rest: int
    phases: Mapping[str, int]
    left: int = 0

    @property
    def peak(self) -> int:
        return max(self.phases.values())


_FEW: dict[str, Any] = {"width": 512, "ffn": 1376, "batch": 1, "length": 64}  # weights outweigh what passes
_LONE: dict[str, Any] = {"vocab": 256, "layers": 8}  # layers outweigh the loss


def _fused() -> Iterator[Setting]:
    """Yield a fused step with each recompute, all weights trained and adapters: layers outweigh the loss."""
    options: dict[str, Any] = {"fusion": "fused", "qk_norm": True, "vocab": 512, "layers": 6}
    for recipe, rank in ((None, 0), ("fp8", 0), ("fp8-rowwise", 0), ("bf16", 8), ("fp8", 8), ("qfp8", 8)):
        name = f"fused {recipe or 'bf16'}" + (" + LoRA" if rank else "")
        for recompute in get_args(Recompute):
            how = "" if recompute == "none" else f", {recompute} recompute"
            yield Setting(name + how, recipe=recipe, rank=rank, recompute=recompute, **options)
    yield Setting("fused bf16, without QK-norm", **{**options, "qk_norm": False})
    yield Setting("fused fp8 + LoRA, W' cached", recipe="fp8", rank=8, transposed="cached", **options)
    yield Setting("fused qfp8 + LoRA, few tokens", recipe="qfp8", rank=8, fusion="fused", **_FEW)
    yield Setting("fused llama bf16", family="llama", fusion="fused", **_LONE)
    yield Setting(
        "fused llama bf16 + LoRA, selective recompute",
        family="llama",
        recipe="bf16",
        rank=8,
        recompute="selective",
        fusion="fused",
        **_LONE,
    )


#: What `run` measures beside: fused steps.
FUSED = tuple(_fused())
#: What `run` measures: ours, then transformers' own layers.
SETTINGS = (
    Setting("bf16"),
    Setting("fp32", dtype="fp32"),
    Setting("bf16, 12 layers", layers=12),
    Setting("bf16, as many key-value heads", kv_heads=8),
    Setting("bf16, tied", tied=True),
    Setting("fp32, tied", dtype="fp32", tied=True),
    Setting("bf16, 1 x 1024", batch=1, length=1024),
    Setting("bf16, 8 x 128", batch=8, length=128),
    Setting("bf16, 1 x 2048, 2 layers", batch=1, length=2048, layers=2),
    Setting("bf16, vocabulary of 32768", vocab=32768, layers=2),
    Setting("bf16, vocabulary of 32768, loss in chunks", vocab=32768, layers=2, length=512),
    Setting("bf16, few tokens", **_FEW),
    Setting("fp8", recipe="fp8"),
    Setting("fp8, fp32", recipe="fp8", dtype="fp32"),
    Setting("fp8, few tokens", recipe="fp8", **_FEW),
    Setting("fp8-rowwise", recipe="fp8-rowwise"),
    Setting("fp8-rowwise, few tokens", recipe="fp8-rowwise", **_FEW),
    Setting("fp8-block", recipe="fp8-block"),
    Setting("fp8-block, few tokens", recipe="fp8-block", **_FEW),
    Setting("mxfp8", recipe="mxfp8"),
    Setting("mxfp8, few tokens", recipe="mxfp8", **_FEW),
    Setting("fp4", recipe="fp4"),
    Setting("fp4, 8 layers", recipe="fp4", layers=8),
    Setting("fp4, few tokens", recipe="fp4", **_FEW),
    Setting("bf16 + LoRA", recipe="bf16", rank=8),
    Setting("qfp8 + LoRA", recipe="qfp8", rank=8),
    Setting("qfp8 + LoRA, few tokens", recipe="qfp8", rank=8, **_FEW),
    Setting("qfp4 + LoRA", recipe="qfp4", rank=8),
    Setting("qfp4 + LoRA, few tokens", recipe="qfp4", rank=8, **_FEW),
    Setting("qnf4 + LoRA", recipe="qnf4", rank=8),
    Setting("qnf4 + LoRA, 12 layers", recipe="qnf4", rank=8, layers=12),
    Setting("qnf4 + LoRA, few tokens", recipe="qnf4", rank=8, **_FEW),
    Setting("adamw8bit", optimizer="adamw8bit"),
    Setting("adamw8bit, few tokens", optimizer="adamw8bit", **_FEW),
    Setting("sgd", optimizer="sgd"),
    Setting("float32 moments", states="fp32"),
    Setting("float32 moments, few tokens", states="fp32", **_FEW),
    Setting("accumulate 2", accumulate=2),
    Setting("accumulate 2, fp32", accumulate=2, dtype="fp32"),
    Setting("llama bf16", family="llama"),
    Setting("llama fp32", family="llama", dtype="fp32"),
    Setting("llama bf16, tied", family="llama", tied=True),
    Setting("llama bf16, small vocabulary", family="llama", **_LONE),
    Setting("llama fp32, small vocabulary", family="llama", dtype="fp32", **_LONE),
    Setting("llama fp8", family="llama", recipe="fp8"),
    Setting("llama bf16, adamw8bit", family="llama", optimizer="adamw8bit"),
    Setting("llama bf16, accumulate 2", family="llama", accumulate=2),
    Setting("llama bf16, recompute", family="llama", recompute="full"),
    Setting("llama fp32, recompute, 8 layers", family="llama", recompute="full", dtype="fp32", layers=8),
    Setting("llama bf16 + LoRA", family="llama", recipe="bf16", rank=8),
    Setting("llama bf16 + LoRA, small vocabulary", family="llama", recipe="bf16", rank=8, **_LONE),
    Setting("llama qnf4 + LoRA", family="llama", recipe="qnf4", rank=8),
    Setting("qwen3 bf16", family="qwen3"),
    Setting("qwen3 fp32", family="qwen3", dtype="fp32"),
    Setting("qwen3 bf16, small vocabulary", family="qwen3", **_LONE),
    Setting("qwen3 bf16, recompute, 12 layers", family="qwen3", recompute="full", layers=12, vocab=512),
    Setting(
        "qwen3 bf16 + LoRA, recompute", family="qwen3", recipe="bf16", rank=8, recompute="full", vocab=512, layers=8
    ),
)


def run(names: Sequence[str] | None = None, device: str | None = None) -> dict[str, Any]:
    """Measure and predict the named settings (default: all of SETTINGS; "fused": all of FUSED); return the raw result."""
    import torch

    known = {setting.name: setting for setting in (*SETTINGS, *FUSED)}
    names = [setting.name for setting in FUSED] if names == ["fused"] else names or [s.name for s in SETTINGS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"There is no setting {unknown[0]!r}: known are {', '.join(known)}.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for name in names:
        found.append((known[name], measure(known[name], device)))
        print(f"{name}: {found[-1][1].peak / MIB:.1f} MiB", file=sys.stderr)
    return result(found, device)


def result(found: Sequence[tuple[Setting, Measured]], device: str = "cpu") -> dict[str, Any]:
    """Return the raw result: each setting with its measured and predicted bytes, and the environment."""
    from surokit.environment import environment

    return {
        "benchmark": "memory: a training step's peak, predicted and measured",
        "settings": {"step": "the second", "measured": "what torch's allocator hands out"},
        "environment": environment(),
        "memory": [
            {
                "name": setting.name,
                "setting": {key: value for key, value in asdict(setting).items() if key != "name"},
                "measured": {"rest": measured.rest, **measured.phases},
                "predicted": predicted(setting, device=device),
            }
            for setting, measured in found
        ],
    }


def predicted(setting: Setting, device: str = "cpu") -> dict[str, float]:
    """Predict the bytes by phase, the loss with the forward, as `Measured` has them; "peak" is the most of them."""
    memory = planned(setting, device).memory
    phases = {phase.name: phase.bytes for phase in memory.phases}
    phases["forward"] = max(phases["forward"], phases.pop("loss"))
    return {**phases, "peak": memory.peak_gib * 2**30}


def ratio(row: Mapping[str, Any]) -> float:
    """Return the predicted peak over the measured peak of a row."""
    return float(row["predicted"]["peak"] / max(row["measured"][phase] for phase in PHASES))


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table, the worst predictions first."""
    head = ["setting", "predicted MiB", "measured MiB", "ratio", "peak in", "forward", "backward", "optimizer"]
    rows = []
    for row in sorted(data["memory"], key=lambda r: -abs(ratio(r) - 1)):
        measured, foreseen = row["measured"], row["predicted"]
        peak = max(PHASES, key=lambda phase: measured[phase])
        each = [f"{foreseen[phase] / MIB:.1f} / {measured[phase] / MIB:.1f}" for phase in PHASES]
        rows.append(
            [
                row["name"],
                f"{foreseen['peak'] / MIB:.1f}",
                f"{measured[peak] / MIB:.1f}",
                f"{ratio(row):.3f}",
                peak,
                *each,
            ]
        )
    return markdown(data, head, rows)


def measure(setting: Setting, device: str = "cpu", model_of: Callable[[], nn.Module] | None = None) -> Measured:
    """Measure the bytes of one warm step: the second one. `model_of` makes another model than the setting's."""
    import torch

    meter = Meter(torch.device(device))
    gc.collect()  # the listener also hears of the end of what an earlier one saw begin
    before = torch.cuda.memory_allocated(device) if device == "cuda" else 0
    with meter.listening():
        step, model, optimizer = _prepared(setting, device, model_of)
        step()
        with meter.following(model, optimizer):
            gc.collect()
            meter.mark(REST)
            step()
            meter.mark("end")
        del step, model, optimizer
        gc.collect()
    outside = before + meter.left
    phases = {name: max(b for n, b in meter.peaks if n == name) - outside for name in PHASES}
    return Measured(rest=meter.peaks[0][1] - outside, phases=phases, left=meter.left)


def model_of(setting: Setting, device: str = "cpu") -> nn.Module:
    """Make the model of a setting, with random weights and its recipe applied."""
    import torch

    import surokit as sk

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[setting.dtype]
    torch.manual_seed(0)
    model: nn.Module
    if setting.theirs:
        model = _theirs(setting).to(device=device, dtype=dtype)
        if setting.recompute == "full" and setting.fusion == "none":
            # transformers' new name, and the one before it
            for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
                if (enable := getattr(model, name, None)) is not None:
                    enable()
                    break
    else:
        sizes = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "tied", "qk_norm")
        config = sk.DecoderConfig(**{name: getattr(setting, name) for name in sizes}, max_length=setting.length)
        model = sk.Decoder(config, device=device, dtype=dtype)
    if (recipe := recipe_of(setting)) is not None:
        sk.apply(model, recipe)
    if setting.fusion == "fused":
        sk.fuse(model, recompute=setting.recompute, frozen="transposed" if setting.transposed else "codes")
    return model


def recipe_of(setting: Setting) -> Any:
    """Return the recipe of a setting, None without one."""
    from surokit.recipe import find_recipe

    if setting.recipe is None:
        return None
    recipe = find_recipe(setting.recipe).decode_once(False)  # whatever this machine has room for
    return recipe.lora(setting.rank) if setting.rank else recipe


def _theirs(setting: Setting) -> Any:
    import transformers

    sizes = {name: value for name, value in config_of(setting).items() if name != "model_type"}
    sizes["attn_implementation"] = "sdpa"
    if setting.family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def optimizer_of(setting: Setting) -> Any:
    """Return a specification, or a function from parameters to an optimizer."""
    import torch

    import surokit as sk

    if setting.optimizer == "sgd":
        return lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=1e-3)
    if setting.optimizer == "adamw8bit":
        return sk.AdamW8bit(lr=1e-3)
    return sk.AdamW(lr=1e-3, state_dtype=torch.float32 if setting.states == "fp32" else None)


def planned(setting: Setting, device: str = "cpu") -> Any:
    """Return the plan of a setting."""
    from surokit.planner import plan

    options: dict[str, Any] = {
        "recipe": recipe_of(setting),
        "dtype": setting.dtype,
        "optimizer": setting.optimizer,
        "state_dtype": setting.states,
        "batch": setting.batch,
        "length": setting.length,
        "accumulate": setting.accumulate,
        "recompute": setting.recompute,
        "layers": "transformers" if setting.theirs else "surokit",
        "fusion": setting.fusion,
        "transposed": setting.transposed,
        "gpu": "cpu" if device == "cpu" else "H100",  # any: it says that the GPU's kernels run
    }
    return plan(config_of(setting), **options)


def config_of(setting: Setting) -> dict[str, Any]:
    """Return the sizes of a setting's model as a config.json has them."""
    return {
        "model_type": setting.family if setting.theirs else "qwen3" if setting.qk_norm else "llama",
        "num_hidden_layers": setting.layers,
        "hidden_size": setting.width,
        "num_attention_heads": setting.heads,
        "num_key_value_heads": setting.kv_heads,
        "intermediate_size": setting.ffn,
        "vocab_size": setting.vocab,
        "tie_word_embeddings": setting.tied,
        "max_position_embeddings": setting.length,
        "head_dim": setting.width // setting.heads,
    }


def _prepared(
    setting: Setting, device: str, made: Callable[[], nn.Module] | None
) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """Return a step, and the model and optimizer that it trains."""
    import torch

    import surokit as sk

    model = model_of(setting, device) if made is None else made()
    ids = torch.randint(setting.vocab, (setting.batch * setting.accumulate, setting.length))
    batch = {"input_ids": ids, "labels": ids}
    if not setting.theirs:
        session = sk.Session(
            model,
            [batch],
            optimizer=optimizer_of(setting),
            schedule=None,
            compile=False,
            accumulate=setting.accumulate,
        )

        def ours() -> None:
            session.step(batch)

        return ours, model, session.optimizer
    spec = optimizer_of(setting)
    optimizer = spec.build(model.parameters()) if hasattr(spec, "build") else spec(model.parameters())
    parts = [
        {name: t.to(device) for name, t in zip(batch, pair)}
        for pair in zip(*(t.split(setting.batch) for t in batch.values()))
    ]

    def theirs() -> None:
        for part in parts:
            (model(**part).loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    model.train()
    return theirs, model, optimizer
