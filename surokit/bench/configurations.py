"""List what is measured on a GPU: models, configurations, the parts of the benchmark in their order.

    Configuration("0.6b", "fp8")                            LoRA of rank 16, everything that is fast switched on
    Configuration("0.6b", "fp8", without=("norm",))         the same with one technique off
    PARTS["must"]                                           the groups that have to be measured first

A group is measured together: its configurations take turns, and ratios are taken within a turn. Plain data: no torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from surokit.bench.targets import TARGETS, Target

if TYPE_CHECKING:
    from surokit.fusion import Fusion

Train = Literal["lora", "full"]

# https://huggingface.co/Qwen/Qwen3-0.6B and its sisters -1.7B, -4B, -8B, config.json
_QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocab": 151936, "qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6}
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": {**_QWEN3, "layers": 28, "width": 1024, "heads": 16, "ffn": 3072, "tied": True},
    "1.7b": {**_QWEN3, "layers": 28, "width": 2048, "heads": 16, "ffn": 6144, "tied": True},
    "4b": {**_QWEN3, "layers": 36, "width": 2560, "heads": 32, "ffn": 9728, "tied": True},
    "8b": {**_QWEN3, "layers": 36, "width": 4096, "heads": 32, "ffn": 12288, "tied": False},
}
#: The same architecture for a rehearsal on a processor.
TINY: dict[str, Any] = {
    **_QWEN3,
    **{"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 64, "vocab": 256, "tied": True},
}


#: A small one for the smoke test, with every width in multiples of 128 so that kernels of all recipes take it.
SMALL: dict[str, Any] = {
    **_QWEN3,
    **{"layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 1024, "tied": False},
}


@dataclass(frozen=True)
class BenchWork:
    """A BenchWork is the work of a step, the same for every system: sequences of `length` tokens, `batch` of them, `accumulate`
    times."""

    batch: int = 2
    length: int = 2048
    accumulate: int = 4
    rank: int = 16
    alpha: float = 32.0
    lr: float = 1e-4

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.accumulate

    def __str__(self) -> str:
        return f"{self.batch} x {self.length} x {self.accumulate}"


@dataclass(frozen=True)
class Configuration:
    """A Configuration is one system: a model, a recipe, what trains, and how the step is carried out.

    without: fields of surokit.fusion.Fusion that are switched off; frozen, recompute: its other two. graphs: steps as CUDA
    graphs. compile: torch.compile instead. prefetch: batches on a stream of their own. attention: "" lets the layer choose,
    "flash" and "efficient" are scaled_dot_product_attention's. documents: attention stays within each document of a row.
    optimizer: "adamw" or "adamw8bit". fast_dx: the products of dx are summed as forward's are, on Hopper faster and less
    exactly. peer: the name of another library, which then trains the same in bfloat16.
    """

    model: str
    recipe: str = "bf16"
    train: Train = "lora"
    without: tuple[str, ...] = ()
    frozen: Literal["no", "codes", "transposed"] = "codes"
    recompute: Literal["none", "selective", "full"] = "none"
    graphs: bool = True
    compile: bool = False
    prefetch: bool = True
    attention: Literal["", "flash", "efficient"] = ""
    documents: bool = False
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    fast_dx: bool = False
    peer: str = ""

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the differences from the defaults, in words."""
        words = ["nothing fused"] if set(self.without) == set(FUSIONS) else [f"without {name}" for name in self.without]
        words += [f"frozen={self.frozen}"] if self.frozen != "codes" else []
        words += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        words += ["eager"] if not self.graphs and not self.compile else []
        words += ["torch.compile"] if self.compile else []
        words += ["without prefetch"] if not self.prefetch else []
        words += [f"{self.attention} attention"] if self.attention else []
        words += ["documents apart"] if self.documents else []
        words += [self.optimizer] if self.optimizer != "adamw" else []
        words += ["dx summed fast"] if self.fast_dx else []
        return tuple(words)

    @property
    def system(self) -> str:
        """Return its name within a group."""
        name = f"{self.peer} {self.recipe}" if self.peer else self.recipe
        return ", ".join((name, *self.changes))

    @property
    def name(self) -> str:
        return f"{self.model} {self.train} {self.system}"

    @property
    def fused(self) -> bool:
        """Return whether anything is computed together that torch would compute apart."""
        return not self.peer and not self.compile and set(self.without) != set(FUSIONS)

    @property
    def fusion(self) -> Fusion:
        """Return the argument of `surokit.fuse`: nothing for a peer, nor for torch's compiler, which fuses by itself."""
        from surokit.fusion import OFF, Fusion

        if self.peer or self.compile:
            return OFF
        return Fusion(frozen=self.frozen, recompute=self.recompute).without(*self.without)

    def but(self, **changes: Any) -> Configuration:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Configuration:
        return Configuration(**{**data, "without": tuple(data["without"])})


FUSIONS = ("norm", "gate", "joint", "adapters", "qk")


@dataclass(frozen=True)
class BenchGroup:
    """A BenchGroup is a set of configurations that take turns for so many rounds; the others are compared with the first."""

    name: str
    configurations: tuple[Configuration, ...]
    rounds: int = 4


@dataclass(frozen=True)
class BenchPart:
    """A BenchPart is some groups, or some other measurement, under a name. minutes: about how long it takes on an H200.

    smoke: (recipe, what trains) whose small step is compared with the definition; no speed is measured there.
    """

    name: str
    words: str
    minutes: int
    groups: tuple[BenchGroup, ...] = ()
    starts: tuple[Configuration, ...] = ()
    sustained: tuple[Configuration, ...] = ()
    smoke: tuple[tuple[str, Train], ...] = ()

    def configurations(self) -> Iterator[Configuration]:
        for group in self.groups:
            yield from group.configurations
        yield from self.starts
        yield from self.sustained


def _beside_unsloth(model: str, rounds: int) -> BenchGroup:
    ours = tuple(Configuration(model, recipe) for recipe in ("bf16", "fp8", "qfp8"))
    peer = Configuration(model, "bf16", peer="unsloth")
    return BenchGroup(f"{model} lora", (*ours, peer), rounds)


def _apart(name: str, base: Configuration, *changes: dict[str, Any], rounds: int = 2) -> BenchGroup:
    """Make a group of a configuration and the same with each of the changes."""
    return BenchGroup(name, (base, *(base.but(**change) for change in changes)), rounds)


def _recipes() -> Iterator[tuple[str, Train]]:
    """Yield every recipe: first those of the first figures, LoRA over frozen weights, then those with all weights trained."""
    yield from ((recipe, "lora") for recipe in ("bf16", "fp8", "qfp8", "qfp4", "qnf4"))
    yield from ((recipe, "full") for recipe in ("bf16", "fp8", "fp8-current", "fp8-rowwise", "fp8-block"))
    yield from ((recipe, "full") for recipe in ("fp4", "mxfp8", "mxfp4", "quartet-ii"))


def _parts() -> Iterator[BenchPart]:
    small, large = Configuration("0.6b", "fp8"), Configuration("8b", "qfp8")
    yield BenchPart(
        "smoke", "a small step of every recipe against the definition, in two minutes", 2, smoke=tuple(_recipes())
    )
    yield BenchPart(
        "must", "LoRA on 0.6B and 8B, beside Unsloth", 12, (_beside_unsloth("0.6b", 4), _beside_unsloth("8b", 3))
    )
    yield BenchPart(
        "sizes", "LoRA on 1.7B and 4B, beside Unsloth", 10, (_beside_unsloth("1.7b", 3), _beside_unsloth("4b", 3))
    )
    yield BenchPart(
        "full",
        "every weight trained: 0.6B, and 8B with bfloat16 states",
        7,
        tuple(
            BenchGroup(f"{m} full", (Configuration(m, "bf16", "full"), Configuration(m, "fp8", "full")), 3)
            for m in ("0.6b", "8b")
        ),
    )
    yield BenchPart(
        "four-bit",
        "LoRA over QFP4 and QNF4",
        7,
        tuple(
            BenchGroup(f"{m} lora, four bits", tuple(Configuration(m, r) for r in ("bf16", "qfp4", "qnf4")), 2)
            for m in ("0.6b", "8b")
        ),
    )
    yield BenchPart(
        "techniques",
        "each technique switched off in turn",
        19,
        (
            _apart("0.6b lora fp8: fusion", small, *({"without": (name,)} for name in FUSIONS), {"without": FUSIONS}),
            _apart(
                "0.6b lora fp8: the step",
                small,
                {"graphs": False},
                {"graphs": False, "without": FUSIONS},
                {"graphs": False, "compile": True},
                {"prefetch": False},
                {"recompute": "selective"},
                {"recompute": "full"},
            ),
            _apart(
                "0.6b lora fp8: attention",
                small,
                {"attention": "flash"},
                {"attention": "efficient"},
                {"documents": True},
            ),
            _apart(
                "8b lora fp8: backward's products",
                Configuration("8b", "fp8"),
                {"fast_dx": True},
                {"frozen": "transposed"},
            ),
            _apart(
                "8b lora qfp8: memory",
                large,
                {"frozen": "transposed"},
                {"frozen": "no"},
                {"recompute": "selective"},
                {"recompute": "full"},
            ),
        ),
    )
    yield BenchPart("sustained", "five minutes without a pause", 7, sustained=(small,))
    yield BenchPart(
        "start",
        "time to the first step, caches empty and full",
        4,
        starts=(small, small.but(graphs=False, compile=True)),
    )


#: In the order in which they are measured; correctness and ceilings come before any of them.
PARTS: dict[str, BenchPart] = {part.name: part for part in _parts()}


def target_of(configuration: Configuration) -> Target | None:
    """Return the bar of a configuration; None for a peer, and where something differs from the defaults."""
    if configuration.peer or configuration.changes:
        return None
    own = (configuration.model, configuration.train, configuration.recipe)
    return next((t for t in TARGETS if (t.model, t.train, t.recipe) == own), None)
