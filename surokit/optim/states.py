"""Make the parameter groups of an optimizer, and read states of an AdamW that another one saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surokit.optim.spec import Parameters, with_plain_numbers
from surokit.optim.tensors import is_sharded, is_vector, local, memory_order

#: The moments in the state of a parameter that AdamW updates.
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_states(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    moments: Callable[[Tensor], tuple[str, ...]] = lambda p: ADAMW_MOMENTS,
    maker: str = "an AdamW",
) -> dict[Tensor, dict[str, Any] | None]:
    """Return each parameter's entries in a state dict with the optimizer's groups. ValueError where these are not its `moments`,
    which are AdamW's unless given, or not this parameter's; `maker` names who would have them."""
    groups, name = state_dict["param_groups"], type(optimizer).__name__
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in groups for index in group["params"]]
    sources = {p: state_dict["state"].get(index) for p, index in zip(params, saved)}
    if any(source and not {"step", *moments(p)} <= source.keys() for p, source in sources.items()):
        raise ValueError(
            f"This state was not made by {maker}: load it into the optimizer that made it, not into {name}."
        )
    for index, (p, source) in zip(saved, sources.items()):
        if not source:
            continue
        here, held = local([p])[0], local([source[moments(p)[0]]])[0].shape
        if held != (here.permute(memory_order(here)) if "master" in source else here).shape:
            processes = ", in as many processes," if is_sharded(p) else ""
            raise ValueError(
                f"Parameter {index} of the state is {list(held)}, and here it is {list(here.shape)}: load it into an optimizer "
                f"over the same model, with the same parameter groups{processes} in the same order."
            )
    return sources


def in_groups_of(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a state dict to the optimizer's parameter groups; ValueError where it has others, or has amsgrad or maximize.

    One group over all parameters of the iterable that the optimizer was made of, frozen ones too, as torch's AdamW has it, becomes
    those of `decay_groups`: with the options of that one, and the weight decay that they have here.
    """
    check_state(optimizer, state_dict)
    name, here, saved = type(optimizer).__name__, optimizer.param_groups, state_dict["param_groups"]
    made_by, made_for = (
        "Muon" if any("use_muon" in group for group in groups) else "AdamW" for groups in (saved, here)
    )
    if made_by != made_for:
        raise ValueError(f"The state is that of {made_by}, and this is {name}: go on with the optimizer that it is of.")
    if any(group.get("amsgrad") or group.get("maximize") for group in saved):
        raise ValueError(f"This optimizer state was made with amsgrad or maximize, which {name} does not have here.")
    sizes, held = ([len(group["params"]) for group in groups] for groups in (here, saved))
    given, order = given_order(optimizer).get("given_order", (0, []))
    one_iterable = held == [given] and len(order) == sum(sizes)
    # where all are matrices, our own state has one group too, whose decay counts; torch's says "amsgrad"
    if sizes == held and not (one_iterable and "amsgrad" in saved[0]):
        return state_dict
    if not one_iterable:
        raise ValueError(
            f"The state has parameter groups of {held} tensors, and this {name} of {sizes}: give {name} the same parameters in the "
            "same groups."
        )
    options = {
        option: value for option, value in saved[0].items() if option not in ("params", "param_names", "amsgrad")
    }
    numbers = iter([saved[0]["params"][i] for i in order])
    groups = [
        {**options, "weight_decay": group["weight_decay"], "params": [next(numbers) for _ in group["params"]]}
        for group in here
    ]
    state = {number: state_dict["state"].get(number) for group in groups for number in group["params"]}
    return {**state_dict, "state": {n: of for n, of in state.items() if of}, "param_groups": groups}


def check_state(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError where this is no state of an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"{type(optimizer).__name__}.load_state_dict takes what an optimizer's state_dict() gave, a dict with state and "
            f"param_groups, and not {type(state_dict).__name__}."
        )


def decay_groups(optimizer: torch.optim.Optimizer, params: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups of the trainable `params`, with weight decay from two dimensions up. Groups pass as they are.

    params: where they are pairs with names, as named_parameters() has them, a bias that has a row for each expert is known by its
    weight, and gets no decay. The optimizer remembers in which order it was given them (`given_order`). ValueError where
    nothing is trainable.
    """
    name = type(optimizer).__name__
    if isinstance(params, Tensor | nn.Module):
        kind = "one tensor" if isinstance(params, Tensor) else "a module"
        raise TypeError(f"{name} takes an iterable of parameters, for example model.parameters(), not {kind}.")
    every = list(params)
    if every and isinstance(every[0], dict):
        return [with_plain_numbers(group) for group in every]  # type: ignore[arg-type]
    named: list[Any] = [each if isinstance(each, tuple) and len(each) == 2 else ("", each) for each in every]
    if not all(isinstance(p, Tensor) for _, p in named):
        raise TypeError(f"{name} takes parameters, with their names or without, or torch's parameter groups.")
    tensors: list[Tensor] = [p for _, p in named]
    check_trains(name, tensors)
    trained = [i for i, p in enumerate(tensors) if p.requires_grad]
    by_name = dict(named)
    vectors = [i for i in trained if is_vector(named[i][0], tensors[i], by_name)]
    matrices = sorted(set(trained) - set(vectors))
    vars(optimizer)["given_order"] = len(tensors), matrices + vectors
    return [
        {"params": [tensors[i] for i in group], "weight_decay": decay}
        for group, decay in ((matrices, weight_decay), (vectors, 0.0))
        if group
    ]


def check_trains(name: str, params: Sequence[Tensor]) -> None:
    """Raise ValueError where no parameter requires a gradient; `name`: of the optimizer."""
    if not any(p.requires_grad for p in params):
        raise ValueError(
            f"{name}: there is nothing to train: no parameter requires a gradient. "
            "Unfreeze some, or add an adapter with recipe.lora()."
        )


def given_order(optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, list[int]]]:
    """Return the optimizer's attribute `given_order` by its name, {} where it has none: how many parameters the iterable had that
    `decay_groups` took apart, and each one's place in it."""
    return {name: value for name, value in vars(optimizer).items() if name == "given_order"}
