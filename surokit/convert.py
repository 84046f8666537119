"""Apply a recipe to a model, and say for every linear layer what it got and why.

Works on any torch.nn.Module: a torch.nn.Linear becomes a surokit.nn.Linear in place, keeping its parameters, hooks and
state-dict keys, so optimizers and wrappers that hold it go on working. Adapters (ours and PEFT's) are never quantized.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from surokit.applied import is_adapter, note_recipe, recipe_of
from surokit.arguments import integer
from surokit.hardware.gpus import Gpu, find_gpu
from surokit.hardware.linear import check_peak
from surokit.hardware.machine import room_for_decoded
from surokit.layers import (
    Layer,
    OwnLayer,
    adapter_of,
    adopt,
    check_convertible,
    check_taken_over,
    is_left_quantized,
    left_alone,
    module_of,
    parameter_of,
    recipe_layers,
    rows_of,
    shape_of,
)
from surokit.nn.delayed import DelayedScales, banks_of
from surokit.nn.experts import ExpertsLinear
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import Precision
from surokit.nn.loftq import added_up
from surokit.places import check_module
from surokit.prequantized import library_of
from surokit.product import computes
from surokit.quantizer import Quantizer
from surokit.recipe import BF16, PROJECTIONS, Lora, Recipe, count_blocks, find_recipe
from surokit.report import LayerReport, LeftReport, Report
from surokit.speed import PlannedSpeed, plan_layer
from surokit.takeover import Came, notes_of, read, take_over

_FROZEN = "_surokit_frozen"  # names of the parameters that a recipe froze
# layers of which a session has decided whether they keep their decoded weight, and its bytes: all sessions share the room
_keepers: weakref.WeakKeyDictionary[OwnLayer, int] = weakref.WeakKeyDictionary()
_deciding = threading.Lock()


def apply(model: nn.Module, recipe: Recipe | str, *, gpu: str | Gpu | None = None, tokens: int = 8192) -> Report:
    """Give every linear layer of `model`, and every weight of experts, what `recipe` says, in place.

    Of a recipe that a run changes the beginning is applied: a Session goes over to the rest.

    A recipe with a storage or an adapter freezes the base model. `surokit.BF16` undoes the products of an earlier recipe; a
    stored weight is then dequantized, which does not bring back what quantizing lost. An adapter that is already there stays.

    Weights that another library quantized (surokit/prequantized.py lists them) are taken over: with their codes and scales where
    the recipe stores weights in the same way, else quantized again or decoded, and the report says what that costs.

    gpu: whose peaks the report plans the layers' times by, for a step of `tokens`: a name such as "H100", by default the one that
    the model is on.

    Raises ValueError for an unknown recipe name or GPU, a model without linear layers, an adapter whose targets match none, or one
    that is to begin with what quantizing lost (init="loftq") where a weight is stored already or has no values;
    TypeError for stored weights that a cast has spoilt. The model is then as it was.
    """
    check_module(model, "apply")
    whole = find_recipe(recipe)
    recipe = whole.parts[0]
    tokens = integer("tokens", tokens)
    planned_on = gpu_for(gpu, next(model.parameters(), torch.empty(0)).device)
    found = list(recipe_layers(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.Linear layers, so there is nothing to apply a recipe to."
        )
    blocks = count_blocks(name for name, _ in found)
    # whatever can go wrong does so here, before anything changes
    found, came = _readable(found, recipe, blocks)
    check_convertible(model, recipe, found, blocks)
    adapted = _to_adapt(model, recipe, found)
    dtype = dtype_of(model)
    for name, layer in found:
        _check(name, layer, recipe, blocks, dtype, came.get(name), name in adapted)
    histories_before = any(bank.cursor.device.type != "meta" and int(bank.cursor) for bank in banks_of(model))
    stored_before = sum(isinstance(layer, OwnLayer) and layer.storage is not None for _, layer in found)
    adapted_before = any(is_adapter(name) for name, _ in model.named_parameters())
    if came:
        take_over(model, found, came, dtype)
    layers = [(name, adopt(layer)) for name, layer in found]
    if not adapted_before:  # else whoever adapted the model wants its weights frozen
        _note_frozen(model, (parameter_of(name, layer) for name, layer in layers if name in came))
    freed = _freeze(model, recipe.frozen_base)
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    rows = [
        _convert(
            name,
            layer,
            recipe,
            blocks,
            embedded=id(layer.weight) in embedded,
            adapt=name in adapted,
            trainable=parameter_of(name, layer) in freed,
            dtype=dtype,
        )
        for name, layer in layers
    ]
    rows = [replace(row, came=came[row.layer].words) if row.layer in came else row for row in rows]
    again = {row.layer for row in rows if row.again}
    _share_scales(model, [layer for _, layer in layers], recipe)
    note_recipe(model, whole)
    notes = _idle_rules(recipe, _ruled(model, layers), blocks)
    notes += notes_of(layers, came, again, {row.layer: row.why for row in rows})
    notes += [f"a Session goes over to {change.recipe.name} {change}" for change in whole.later]
    if histories_before:
        notes.append("the delayed-scaling histories are dropped (scaling_state() keeps them for load_scaling_state())")
    if stored_before and not recipe.storage:
        notes.append(f"{stored_before} stored weights dequantized; what quantizing lost stays lost")
    if freed and (earlier := freed - {parameter_of(name, layer) for name, layer in layers if name in came}):
        notes.append(f"{len(earlier)} parameters that an earlier recipe froze are trainable again")
    if not recipe.adapter and (adapters := sum(bool(row.adapter) for row in rows)):
        notes.append(f"{adapters} adapters stay; merge_adapter() or remove_adapter() on a layer ends one")
    if recipe.keeps_decoded:
        notes.append(_of_decoded([row.decoded for row in rows if row.decoded]))
    notes += _of_adapters(recipe, adapted, layers)
    if recipe.storage and hasattr(model, "save_pretrained"):
        notes.append(_of_keeping(model))
    left = [
        LeftReport(n, type(m).__name__, why, size)
        for n, m, size, why in left_alone(model, (layer for _, layer in layers))
    ]
    device = next(model.parameters()).device
    converted = {row.layer for row in rows if row.converted}
    speed = _plan(layers, recipe, planned_on, tokens, converted) if converted else None
    nbytes = sum(p.nbytes for p in model.parameters()) + sum(row.nbytes for row in left if "codes" in row.why)
    return Report(recipe, tuple(rows), emulation(recipe, device), tuple(notes), tuple(left), nbytes, speed)


def _readable(
    found: Sequence[tuple[str, Layer]], recipe: Recipe, blocks: int
) -> tuple[list[tuple[str, Layer]], dict[str, Came]]:
    """Return the layers without those that a rule keeps and nobody can read, and the weights that other libraries quantized."""
    layers, came = [], {}
    for name, layer in found:
        try:
            weight = read(name, layer)
        except ValueError:
            if not recipe.kept_by(name, blocks):
                raise
            continue
        layers.append((name, layer))
        if weight:
            came[name] = weight
    return layers, came


def _ruled(model: nn.Module, layers: Iterable[tuple[str, Layer]]) -> list[str]:
    """Return the names that rules speak of: of layers, and of those of other libraries that stay as they are."""
    return [name for name, _ in layers] + [name for name, m in model.named_modules() if is_left_quantized(m)]


def gpu_for(gpu: str | Gpu | None, device: torch.device) -> Gpu | None:
    """Return the GPU that is named, or the one at hand if its peak is known."""
    if gpu is not None:
        return check_peak(find_gpu(gpu))
    if device.type != "cuda":
        return None
    try:
        return check_peak(find_gpu(torch.cuda.get_device_name(device)))
    except ValueError:
        return None


def _plan(
    layers: Sequence[tuple[str, OwnLayer]], recipe: Recipe, gpu: Gpu | None, tokens: int, converted: set[str]
) -> PlannedSpeed | None:
    """Return the planned times of all layers, of which some are `converted`."""
    if gpu is None:
        return None
    native = recipe.natively()
    own = native if all(gpu.multiplies(gemm.kind) for gemm in (native.forward, native.grad_input)) else recipe
    rows, left_out = [], []
    for name, layer in layers:
        if (each := rows_of(layer, tokens)) is None:
            left_out.append(name)
            continue
        shape = layer.out_features, layer.in_features
        experts = layer.experts if isinstance(layer, ExpertsLinear) else 0
        stored = layer.storage is not None
        rows.append(
            plan_layer(
                name,
                own if name in converted else None,
                shape,
                each,
                trains=layer.weight.requires_grad,
                stored=stored,
                gpu=gpu,
                experts=experts,
            )
        )
    return PlannedSpeed(gpu.name, tokens, tuple(rows), tuple(left_out)) if rows else None


def _of_adapters(recipe: Recipe, adapted: set[str], layers: Sequence[tuple[str, OwnLayer]]) -> list[str]:
    """Return how many layers have an adapter, and which targets a user named that mean none."""
    if recipe.adapter is None or not adapted:
        return []
    held = [layer for name, layer in layers if name in adapted]
    trained = sum(p.numel() for layer in held for p in adapter_of(layer))
    notes = [f"{len(held)} adapters of rank {recipe.adapter.rank}: {trained:,} numbers train"]
    if recipe.adapter.fits_errors:
        notes.append(_of_loftq(recipe.adapter, held))
    met = {target for name in adapted for target in recipe.adapter.meant(name)}
    idle = [target for target in recipe.adapter.targets if target not in met]
    if idle and recipe.adapter.targets != PROJECTIONS:
        notes.append(f"the adapter's target {', '.join(idle)} matches no layer")
    return notes


def _of_loftq(lora: Lora, held: Sequence[OwnLayer]) -> str:
    """Return how much of what quantizing lost the adapters took up when they were made."""
    fitted = [layer.taken_up for layer in held if layer.taken_up is not None]
    if not fitted:
        return "LoftQ: no adapter began with a quantization error; those that were there stay, and a weight in bf16 has none"
    others = f"; {len(held) - len(fitted)} begin without it" if len(fitted) < len(held) else ""
    share = added_up(fitted).share
    return f"LoftQ: {len(fitted)} adapters of rank {lora.rank} take up {share:.1%} of the squared quantization error{others}"


def _of_keeping(model: nn.Module) -> str:
    """Return how the model is written to disk: with save_pretrained() weights would lose their scales."""
    if hasattr(model, "peft_config"):
        return (
            "save_pretrained() of this PEFT model writes its adapter; a base that it wrote would lack the scales of its weights, "
            "and PEFT cannot merge into codes"
        )
    has_adapter = any(is_adapter(name) for name, _ in model.named_parameters())
    keeper = "surokit.save_adapter" if has_adapter else "surokit.save, which takes a surokit.Decoder"
    return f"keep this model with {keeper}: save_pretrained() would lose the scales of its weights"


@contextmanager
def precision(model: nn.Module, recipe: Recipe | str) -> Iterator[nn.Module]:
    """Compute with another recipe's products inside the `with`; weights do not move and no history is touched.

    `with surokit.precision(model, "bf16")` evaluates a model without its quantization. Stored weights stay as they are. Of a recipe
    that changes in mid-run it takes the first part, as `apply` does.
    """
    check_module(model, "precision")
    check_taken_over(model, "precision")
    recipe = find_recipe(recipe).parts[0]
    layers = {name: adopt(layer) for name, layer in recipe_layers(model)}
    blocks = count_blocks(layers)
    before = {layer: layer.precision for layer in layers.values()}
    here: dict[OwnLayer, Precision | None] = {}
    try:
        for name, layer in layers.items():
            converts = recipe.quantized_products and not skip_reason(name, layer, recipe, blocks)
            here[layer] = layer.precision = Precision(recipe) if converts else None
        yield model
    finally:
        for layer, own in before.items():
            if layer.precision is here.get(layer):  # else a recipe was applied meanwhile, which holds
                layer.precision = own


# -- delayed-scaling state, which lives apart from the state dict


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the delayed-scaling histories of a model as tensors; empty where no recipe needs them."""
    banks = banks_of(model)
    if len(banks) == 1:
        return banks[0].state_dict()
    # a recipe was applied to parts of the model one by one
    return {f"{i}.{key}": value for i, bank in enumerate(banks) for key, value in bank.state_dict().items()}


def load_scaling_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Restore what `scaling_state` gave; a ValueError where the model's recipe does not fit it."""
    banks = banks_of(model)
    if not banks and state:
        raise ValueError(
            "There is a delayed-scaling state to load but the model's recipe has none: apply the same recipe first."
        )
    if banks and not state:
        raise ValueError(
            "The model's recipe needs a delayed-scaling state and there is none: it was saved by another recipe."
        )
    saved = len({key.partition(".")[0] for key in state}) if "history" not in state else 1
    if saved != len(banks):
        raise ValueError(
            f"The delayed-scaling state holds {saved} histories and the model has {len(banks)}: apply the recipe to the "
            "same parts of the model as before."
        )
    for i, bank in enumerate(banks):
        prefix = f"{i}." if saved > 1 else ""
        bank.load_state_dict({key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)})


def roll_scales(model: nn.Module) -> None:
    """Close a step of delayed scaling by hand, for loops without a torch optimizer; optimizers do it by themselves."""
    for bank in banks_of(model):
        bank.roll()


# -- one layer


def _check(
    name: str, layer: Layer, recipe: Recipe, blocks: int, dtype: torch.dtype, came: Came | None, adapt: bool
) -> None:
    """Raise what `_convert` would; its storage meets a matrix of the weight's kind without data."""
    why = skip_reason(name, layer, recipe, blocks)
    stored = came.weight.quantizer if came else _stored_in(layer)
    if recipe.storage and not why and stored != recipe.storage:
        kind = layer.weight.dtype if stored is None else dtype
        trial = Linear(1, 1, device="meta")
        trial.weight = nn.Parameter(torch.empty(1, layer.in_features, dtype=kind, device="meta"), requires_grad=False)
        trial.store(recipe.storage)
    has_adapter = isinstance(layer, OwnLayer) and layer.has_adapter
    if adapt and not why and not has_adapter and recipe.adapter and recipe.adapter.fits_errors:
        _check_loftq(name, layer, stored)


def _check_loftq(name: str, layer: Layer, stored: Quantizer | None) -> None:
    """Raise ValueError where it is not known what quantizing the weight loses."""
    if stored is not None:
        raise ValueError(
            f'{name} is stored already, in {stored}, and what quantizing it lost is not known any more: for init="loftq" apply the '
            "recipe to a model whose weights are not quantized, or leave the init out."
        )
    if layer.weight.is_meta:
        raise ValueError(
            f'{name} has no values yet (it is on the meta device), and init="loftq" begins with what quantizing them loses: load '
            "the model on a device, or leave the init out."
        )


def _stored_in(layer: Layer) -> Quantizer | None:
    """Return how a weight is stored. TypeError where a cast has spoilt it."""
    if isinstance(layer, OwnLayer) and layer.storage is not None:
        assert layer.stored is not None
        return layer.storage
    return None


def _convert(
    name: str,
    layer: OwnLayer,
    recipe: Recipe,
    blocks: int,
    *,
    embedded: bool,
    adapt: bool,
    trainable: bool,
    dtype: torch.dtype,
) -> LayerReport:
    """Quantize and adapt one layer; products that need histories get them afterwards. trainable: a weight that is no longer
    stored."""
    why = skip_reason(name, layer, recipe, blocks)
    if layer.precision is not None and layer.precision.scales is not None:
        layer.precision.scales.layers.discard(module_of(layer))
    layer.precision = None
    if recipe.storage and not why and embedded:
        why = "shares its weight with an embedding"
    wanted = None if why else recipe.storage
    lora = recipe.adapter if adapt and not layer.has_adapter else None
    again = False
    if layer.storage != wanted and wanted:
        again = store(name, layer, wanted, lora, dtype)
    elif layer.storage != wanted:
        layer.set_dense(layer.dense_weight(dtype), trainable)
    products = on_device(recipe, layer.weight.device)
    if not why and products.quantized_products:
        layer.precision = Precision(products)
    layer.keep_decoded(bool(recipe.keeps_decoded))
    if lora is not None and not layer.has_adapter:
        layer.add_adapter(lora, dtype)
    return LayerReport(
        layer=name,
        shape=shape_of(layer),
        products=recipe.name if layer.precision else "bf16",
        storage=str(layer.storage or ""),
        adapter=f"r={layer.lora_rank}" if layer.has_adapter else "",
        why=why if recipe.quantized else "",
        nbytes=sum(p.nbytes for p in layer.parameters()),
        planned_speed=planned_speed(layer, recipe),
        decoded=_decoded_bytes(layer, dtype) if layer.keeps_now else 0,
        again=again,
        taken_up=layer.taken_up.share if layer.taken_up else None,
    )


def store(name: str, layer: OwnLayer, storage: Quantizer, lora: Lora | None, dtype: torch.dtype) -> bool:
    """Store the weight of a layer, and give it the adapter `lora` where that begins with what this loses (init="loftq").

    Returns whether the weight was stored in another way before and had to be quantized again. dtype: of the adapter. Raises
    ValueError where it is not known what is lost.
    """
    if lora is None or not lora.fits_errors:
        return layer.store(storage)
    _check_loftq(name, layer, layer.storage)
    original = layer.dense_weight()
    again = layer.store(storage)
    layer.add_adapter(lora, dtype, original)
    return again


def keep_decoded(model: nn.Module) -> str:
    """Decode the stored weights of a model on a CPU once, where its recipe leaves that open and this machine has room for them.

    Returns what is told of it, "" where nothing changes.
    """
    recipe = recipe_of(model)
    if recipe is None or recipe.storage is None or recipe.keeps_decoded is not None:
        return ""

    layers = [layer for _, layer in recipe_layers(model) if isinstance(layer, OwnLayer) and layer.decodes]
    dtype = dtype_of(model)
    kept = [_decoded_bytes(layer, dtype) for layer in layers]
    on_cpu = all(_is_on_cpu(layer) for layer in layers)
    own = set(layers)
    with _deciding:
        others = sum(n for layer, n in _keepers.items() if layer not in own and layer.keeps_now and _is_on_cpu(layer))
        keep = bool(kept) and on_cpu and others + sum(kept) <= room_for_decoded()
        for layer, nbytes in zip(layers, kept):
            layer.keep_decoded(keep)
            _keepers[layer] = nbytes
    return f"{_of_decoded(kept)}; recipe.decode_once(False) saves them" if keep else ""


def _is_on_cpu(layer: OwnLayer) -> bool:
    return layer.weight.device.type == "cpu"


def _decoded_bytes(layer: OwnLayer, dtype: torch.dtype) -> int:
    return math.prod(shape_of(layer)) * dtype.itemsize


def _of_decoded(kept: Sequence[int]) -> str:
    return f"{len(kept)} weights decoded once: up to {sum(kept) / 2**20:.1f} MiB more"


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes in: of its first parameter, scales of stored weights excepted."""
    layers = (layer for _, layer in recipe_layers(model))
    scales = {id(p) for layer in layers if isinstance(layer, OwnLayer) for p in layer.stored_scales}
    foreign = [(library, m) for m in model.modules() if (library := library_of(m))]
    scales |= {id(p) for _, m in foreign for p in m.parameters(recurse=False)}
    named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point() and p.itemsize > 1]
    usable = [p.dtype for n, p in named if id(p) not in scales and not n.endswith("bias")]
    said = (dtype for library, m in foreign if (dtype := library.dtype(m)))
    biases = (p.dtype for n, p in named if n.endswith("bias"))
    return next(itertools.chain(usable, said, biases), torch.bfloat16)


def skip_reason(name: str, layer: Layer, recipe: Recipe, blocks: int) -> str:
    """Return why `recipe` leaves this layer in bfloat16, or "" where it does not. `blocks` is how many the model has."""
    if not recipe.quantized:
        return "the recipe is bf16"
    if rule := recipe.kept_by(name, blocks):
        return f"rule {rule}"
    if min(layer.in_features, layer.out_features) < recipe.min_features:
        return f"fewer than {recipe.min_features} features"
    speed = planned_speed(layer, recipe) if recipe.pays else None
    if speed is not None and recipe.pays and speed <= 1:
        return f"{speed:.2f} x the speed of bf16, planned for {recipe.pays.tokens:,} tokens on {recipe.pays.gpu}"
    return ""


def planned_speed(layer: Layer, recipe: Recipe) -> float | None:
    """Return how much faster than bfloat16 the layer's products are planned to be where the recipe says `keep_slower`; else
    None."""
    if recipe.pays is None or recipe.storage or not recipe.quantized_products:
        return None  # a stored weight saves memory, whatever its products do
    if (tokens := rows_of(layer, recipe.pays.tokens)) is None:
        return None
    gpu, shape = find_gpu(recipe.pays.gpu), (layer.out_features, layer.in_features)
    return plan_layer("", recipe, shape, tokens, trains=not recipe.frozen_base, stored=False, gpu=gpu).speed


def _idle_rules(recipe: Recipe, names: Sequence[str], blocks: int) -> list[str]:
    """Return notes on the rules that speak of no layer: a slip of the pen, or a share of too few blocks. Every recipe keeps
    lm_head, there or not."""
    spoken = [rule for rule in recipe.rules if rule not in BF16.rules and (rule.pattern or rule.last_share)]
    idle = [rule for rule in spoken if not any(rule.applies(name, blocks) for name in names)]
    return [f"the rule {r} " + ("matches no layer" if r.pattern else f"covers no block of {blocks}") for r in idle]


def _freeze(model: nn.Module, frozen: bool) -> set[str]:
    """Freeze everything but adapters, remembering what was trainable; or give back what an earlier recipe froze.

    Returns the names of those that were given back; a stored weight's codes stay as they are, whatever replaces them may train.
    """
    before: set[str] = getattr(model, _FROZEN, set())
    for name, parameter in model.named_parameters():
        if frozen and parameter.requires_grad and not is_adapter(name):
            parameter.requires_grad_(False)
            before.add(name)
        elif not frozen and name in before and parameter.is_floating_point() and parameter.itemsize > 1:
            parameter.requires_grad_(True)
    setattr(model, _FROZEN, before if frozen else set())
    return set() if frozen else before


def came_stored(model: nn.Module) -> None:
    """Count stored weights that were loaded, not made by a recipe, among those a recipe froze: another may train them again."""
    stored = ((n, layer) for n, layer in recipe_layers(model) if isinstance(layer, OwnLayer) and layer.storage)
    _note_frozen(model, (parameter_of(name, layer) for name, layer in stored))


def _note_frozen(model: nn.Module, parameters: Iterable[str]) -> None:
    setattr(model, _FROZEN, getattr(model, _FROZEN, set()) | {*parameters})


def _share_scales(model: nn.Module, layers: Sequence[OwnLayer], recipe: Recipe) -> None:
    """One bank of histories for all layers with delayed quantizers."""
    quantizers = [q for g in recipe.gemms for q in (g.a, g.b) if q and q.delayed]
    users = [layer for layer in layers if layer.precision]
    if not quantizers or not users:
        return
    history = max(getattr(q.scaling, "history", 0) for q in quantizers)
    bank = DelayedScales(history, sum(layer.slots for layer in users), model, users[0].weight.device)
    first = 0
    for layer in users:
        layer.precision = Precision(recipe, bank, first)
        first += layer.slots
        bank.layers.add(module_of(layer))


def _to_adapt(model: nn.Module, recipe: Recipe, layers: Sequence[tuple[str, Layer]]) -> set[str]:
    """Return the names of the layers that get an adapter: the recipe's targets, or none where PEFT has put its own around them."""
    if recipe.adapter is None:
        return set()
    names = {name for name, _ in layers}
    parents = {name.partition(".lora_")[0] for name, _ in model.named_modules() if ".lora_" in name}
    experts = {name.rpartition(".")[0] for name, layer in layers if isinstance(layer, ExpertsLinear)}
    if parents - names - experts:
        return set()
    targets = {name for name in names if recipe.adapter.meant(name)}
    if not targets:
        known = ", ".join(sorted({name.split(".")[-1] for name in names}))
        raise ValueError(
            f"No linear layer is called {', '.join(recipe.adapter.targets)}: the model has {known}. "
            "Name the layers to adapt with recipe.lora(targets=(...))."
        )
    for name, layer in layers:
        if name not in targets or not isinstance(layer, OwnLayer) or not layer.has_adapter:
            continue
        held, wants = (layer.lora_rank, layer.lora_alpha), (recipe.adapter.rank, recipe.adapter.alpha)
        if held != wants:
            raise ValueError(
                f"{name} has an adapter of rank {held[0]} and alpha {held[1]:g}, and the recipe wants {wants[0]} and "
                f"{wants[1]:g}: merge_adapter() or remove_adapter() first."
            )
    return targets


def on_device(recipe: Recipe, device: torch.device) -> Recipe:
    """Return the recipe as `device` carries it out: with its native products where it has some and the device computes them."""
    native = recipe.natively()
    computed = all(computes(gemm.a, gemm.b, device) for gemm in (native.forward, native.grad_input))
    return native if recipe.where_native and computed else recipe


def emulation(recipe: Recipe, device: torch.device) -> str:
    """Return what of a recipe `device` does not compute natively, in a few words; "" where it computes all of it."""
    names = ("forward", "grad_input", "grad_weight")
    recipe = on_device(recipe, device)
    quantized = {name: gemm for name, gemm in zip(names, recipe.gemms) if gemm.quantized}
    if not quantized:
        return f"stored in {recipe.storage.format}, products in bf16" if recipe.storage else ""
    slow = {name: gemm for name, gemm in quantized.items() if not computes(gemm.a, gemm.b, device)}
    emulated = [name for name, gemm in slow.items() if gemm.a and gemm.b]
    wide = [name for name in slow if name not in emulated]  # one operand is not quantized: there is nothing to emulate
    if len(emulated) == len(quantized):
        return f"emulated on {device.type}"
    said = [
        f"{', '.join(names)} {how}" for names, how in ((emulated, "emulated"), (wide, "multiplied in bf16")) if names
    ]
    return "; ".join(said)


__all__ = [
    "Report",
    "apply",
    "emulation",
    "load_scaling_state",
    "precision",
    "recipe_of",
    "roll_scales",
    "scaling_state",
]
