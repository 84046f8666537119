"""Check the options of offloading optimizers when they are given: a ValueError names the one that is out of range."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from surokit.offload.link import Link, link_for
from surokit.optim.adamw import check_adamw


def check_offloading(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of any optimizer `name` whose state is on the host."""
    check_adamw(name, options)
    lr, link = options["lr"], options["link"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise ValueError(f"{name}: lr is read on the host every step, and this one is on {lr.device}: give a float.")
    if not isinstance(link, Link | None):
        raise ValueError(
            f"{name}: link={link!r} must be a Link of surokit.offload.link, or None for that of the parameters' device."
        )
    _share(name, options, "pt_reserved_cores_perc")


def check_zenflow(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of ZenFlow."""
    check_offloading(name, options)
    _share(name, options, "topk_ratio")
    _share(name, options, "auto_ratio")
    for option in ("overlap_step", "offload"):
        if not isinstance(options[option], bool):
            raise ValueError(f"{name}: {option}={options[option]!r} must be True or False.")
    for option in ("update_interval", "select_interval"):
        if options[option] != "auto" and not _whole(options[option], 1):
            raise ValueError(f'{name}: {option}={options[option]!r} must be an integer of at least 1, or "auto".')
    for option in ("max_interval", "slots", "steps_per_epoch"):
        absent = option == "steps_per_epoch" and options[option] is None
        if not absent and not _whole(options[option], 1):
            raise ValueError(f"{name}: {option}={options[option]!r} must be an integer of at least 1.")
    if not _whole(rounds := options["full_warm_up_rounds"], 0):
        raise ValueError(f"{name}: full_warm_up_rounds={rounds!r} must be an integer that is not negative.")
    if (strategy := options["select_strategy"]) not in ("auto", "step", "epoch"):
        raise ValueError(f'{name}: select_strategy={strategy!r} must be "auto", "step" or "epoch".')
    if strategy == "epoch" and options["steps_per_epoch"] is None:
        raise ValueError(
            f'{name}: select_strategy="epoch" needs steps_per_epoch, the number of steps that an epoch has.'
        )
    if (update := options["cold_update"]) not in ("deepspeed", "time-corrected"):
        raise ValueError(f'{name}: cold_update={update!r} must be "deepspeed" or "time-corrected".')
    if update == "time-corrected" and options["overlap_step"]:
        raise ValueError(
            f'{name}: cold_update="time-corrected" trains worse with overlap than without correction: '
            "give overlap_step=False with it."
        )
    if options["offload"]:
        raise ValueError(
            f"{name}: offload=True would keep hot columns on the host too, whose update the device would wait for each step: "
            "choose a smaller topk_ratio, or surokit.OffloadAdamW for a host that holds everything."
        )


def check_group(name: str, group: Mapping[str, Any], of_all: Collection[str]) -> None:
    """Check a parameter group of ZenFlow; `of_all`: options that are not a group's."""
    if found := [option for option in of_all if option in group]:
        raise ValueError(f"{name}: {found[0]} is one for all groups: give it to {name} itself, and none to a group.")
    if not isinstance(offload := group.get("offload", True), bool):
        raise ValueError(
            f'{name}: "offload": {offload!r} of a group must be True, or False for parameters that stay on the device.'
        )


def link_of(optimizer: Optimizer, given: Link | None) -> Link:
    """Return the link that an optimizer was given, or that of its parameters' device. Raises ValueError where it was given
    another device's."""
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    if given is not None and given.device != device:
        raise ValueError(
            f"{type(optimizer).__name__}: the link is that of {given.device}, and the parameters are on {device}: give a link of "
            "their device, or none."
        )
    return given or link_for(device)


def _share(name: str, options: Mapping[str, Any], option: str) -> None:
    value = options[option]
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"{name}: {option}={value!r} is a share, from 0 to 1.")


def _whole(value: Any, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
