"""`explore` shows a plan with sliders, to see what fits before a GPU is used.

    explore(sk.plan(config, batch=1, length=4096, gpu="H100", recipe="qfp8"))

Every change plans again, which takes milliseconds, and redraws one picture: the memory of one GPU as a stacked bar against what
the GPU has, and the figures of time and cost. The controls are ipywidgets and live as long as the kernel. The picture is an
ordinary output beside them, SVG with the plan's own text in the bundle, updated in place under a display id: a notebook that is
saved, exported or opened again still shows the last one. Arguments that cannot be planned leave their sentence on the picture.

Without ipywidgets the picture stands alone; outside a notebook the plan is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from textwrap import wrap
from typing import TYPE_CHECKING, Any, get_args

from surokit import units
from surokit.planner import GPUS
from surokit.planner.counts.flops import Recompute
from surokit.planner.counts.memory import Memory
from surokit.planner.picture import BarPart, parts_of
from surokit.planner.words import Line, verdict
from surokit.widgets.figure import Theme, _css, _text
from surokit.widgets.panel import in_notebook
from surokit.widgets.picture import Bundle, cut

if TYPE_CHECKING:
    from surokit.planner.planning import Plan

NOT_GIVEN = "not given"
_POWERS = {"batch": (1, 2**10), "length": (2**7, 2**17), "gpus": (1, 2**14)}
_CHOICES: dict[str, dict[str, Any]] = {
    "recompute": {name: name for name in get_args(Recompute)},
    "optimizer": {name: name for name in ("adamw", "adamw8bit", "sgd")},
    "zero": {"0": 0, "1": 1, "2": 2, "3": 3},
}
_WORDS = {"gpus": "GPUs", "gpu": "GPU", "zero": "ZeRO stage"}
# groups of lines that stand above, or say nothing of time and money
_DRAWN = ("model", "compute", "memory of one GPU", "memory of one CPU")
# group -> (class of the fill in figure.py's style, opacity)
_FILLS = {
    "weights": ("f0", 1.0),
    "copies of weights": ("f5", 1.0),
    "adapter": ("f3", 1.0),
    "gradients": ("f1", 1.0),
    "optimizer": ("f2", 1.0),
    "activations": ("f4", 1.0),
    "logits and loss": ("f4", 0.5),
    "KV cache": ("f3", 0.55),
    "workspace": ("h", 0.7),
    "other": ("m", 0.7),
    "slack": ("m", 0.3),
}


def explore(plan: Plan, theme: Theme = "auto") -> Explorer:
    """Show a plan with sliders for batch, length and GPUs, and choices of recipe, GPU, recompute, optimizer and ZeRO stage.

    In a notebook the returned Explorer shows itself as the last expression of a cell, and `.plan` is the plan of its controls.
    Anywhere else the plan is printed.

    Raises TypeError if `plan` is not a Plan.
    """
    if not isinstance(getattr(plan, "memory", None), Memory):
        raise TypeError(f"explore() got a {type(plan).__name__}: pass a plan, explore(sk.plan(...)).")
    explorer = Explorer(plan, theme)
    if not in_notebook():
        print(plan)
    return explorer


class Explorer:
    """An Explorer has controls and a picture of one plan.

    `plan` is the plan of the controls as they stand; if they contradict each other, it is the last plan that could be made, and
    `error` says why. `controls` are the ipywidgets by argument, empty without ipywidgets: setting a `.value` is like moving the
    control by hand. `set(batch=4)` plans with any argument of `sk.plan`, also one without a control.
    """

    def __init__(self, plan: Plan, theme: Theme = "auto") -> None:
        self.plan = plan
        self.error: str | None = None
        self.options = _options(plan)
        self.controls: dict[str, Any] = {}
        self._given = plan
        self._more: dict[str, Any] = {}
        self._theme: Theme = theme
        self._handle: Any = None
        if find_spec("ipywidgets") is not None:
            self.controls = _controls(self.options, plan)
            for control in self.controls.values():
                control.observe(self._changed, "value")

    def set(self, **changes: Any) -> Plan:
        """Plan with other arguments, as the controls do; returns the plan.

        Raises ValueError or TypeError, as `sk.plan` does.
        """
        made = self.plan.but(**changes)
        self._more.update(changes)
        self.plan, self.error = made, None
        self._redraw()
        return made

    def bundle(self) -> Bundle:
        """Return the display message: the picture, and the plan in words."""
        words = repr(self.plan)
        if self.error is not None:
            words = f"{self.error}\nThe last plan that could be made:\n\n{words}"
        return {"text/plain": words, "image/svg+xml": picture(self.plan, self.error, self._theme)}

    def _changed(self, change: Mapping[str, Any]) -> None:
        name = next(name for name, control in self.controls.items() if control is change["owner"])
        self._more.pop(name, None)
        chosen = {name: self.options[name][control.value] for name, control in self.controls.items()}
        try:
            self.plan, self.error = self._given.but(**{**chosen, **self._more}), None
        except (ValueError, TypeError) as error:
            self.error = " ".join(str(error).split())
        self._redraw()

    def _redraw(self) -> None:
        if self._handle is not None:
            self._handle.update(self.bundle(), raw=True)

    def _ipython_display_(self) -> None:
        if not in_notebook():
            print(self.plan)
            return
        from IPython.display import display

        if self.controls:
            display(_controls_bundle(self.controls), raw=True)
        else:
            print("Sliders need ipywidgets: pip install ipywidgets")
        self._handle = display(self.bundle(), raw=True, display_id=True)

    def __repr__(self) -> str:
        return f"<Explorer of {self.plan.title}>"


def _options(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the choices of every control, as label -> argument. The plan's own argument is always among them."""
    from surokit.recipe import BF16, recipes

    options: dict[str, dict[str, Any]] = {}
    for name, (low, high) in _POWERS.items():
        sizes = {low * 2**i for i in range((high // low).bit_length())}
        own = getattr(plan.setup, name)
        sizes |= {own} if own is not None else set()
        options[name] = {NOT_GIVEN: None} if own is None else {}
        options[name] |= {f"{size:,}": size for size in sorted(sizes)}
    named: dict[str, Any] = {name: recipe for name, recipe in recipes.items() if name == recipe.name}
    options["recipe"] = named | {"bf16 + LoRA": BF16.lora()}
    options["gpu"] = {NOT_GIVEN: None} | {gpu.name: gpu for gpu in GPUS.values()}
    options |= {name: dict(choices) for name, choices in _CHOICES.items()}
    for name, value in _own(plan).items():
        if value not in options[name].values():
            label = str(getattr(value, "name", getattr(plan.setup, name, value)))
            label = f"{label}, as given" if label in options[name] else label
            options[name] = {label: value} | options[name]
    return options


def _own(plan: Plan) -> dict[str, Any]:
    """Return the plan's own arguments for the drop-down controls, with names resolved to objects."""
    from surokit.recipe import BF16

    of_session = plan.subject.own.arguments.get("optimizer", plan.setup.optimizer)
    optimizer = plan.given.get("optimizer", of_session)
    return {
        "recipe": BF16 if plan.recipe is None else plan.recipe,
        "gpu": plan.gpu,
        "recompute": plan.setup.recompute,
        "optimizer": "sgd" if plan.setup.optimizer == "none" else optimizer,
        "zero": plan.setup.zero,
    }


def _label(options: Mapping[str, Any], value: Any) -> str:
    return next(label for label, each in options.items() if each is value or each == value)


def _controls(options: Mapping[str, Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
    import ipywidgets as widgets

    own = {name: getattr(plan.setup, name) for name in _POWERS} | _own(plan)
    controls: dict[str, Any] = {}
    for name, choices in options.items():
        kind = widgets.SelectionSlider if name in _POWERS else widgets.Dropdown
        controls[name] = kind(
            options=list(choices),
            value=_label(choices, own[name]),
            description=_WORDS.get(name, name),
            style={"description_width": "7em"},
            layout={"width": "24em" if name in _POWERS else "21em"},
        )
    return controls


def _controls_bundle(controls: Mapping[str, Any]) -> dict[str, Any]:
    """Return a display message of the controls in two columns; where no kernel draws them, a line of text stands in their place."""
    import ipywidgets as widgets

    sliders = widgets.VBox([control for name, control in controls.items() if name in _POWERS])
    choices = [control for name, control in controls.items() if name not in _POWERS]
    box = widgets.HBox([sliders, widgets.VBox(choices)], layout={"flex_flow": "row wrap"})
    bundle: dict[str, Any] = dict(box._repr_mimebundle_())
    return {**bundle, "text/plain": "The sliders of this plan come with a running kernel; below is where they stood."}


# --- The picture ---


def picture(plan: Plan, error: str | None = None, theme: Theme = "auto", width: int = 640) -> str:
    """Draw a plan as SVG: a bar of its memory against the GPU's, the bar's parts by name, the figures of a step and of the run, and
    up to three notes."""
    y = 22.0
    out: list[str] = []
    if error is not None:
        for text in wrap(f"{error} This is the last plan that could be made:", 92):
            out.append(_text(14, y, text, "v"))
            y += 17
        y += 8
    y = _bar(plan, out, y, width)
    y = _parts(plan.memory, out, y, width)
    rows = [line for line in plan.lines() if line.group not in _DRAWN and line.term[0] != " "]
    rows = [line for line in rows if line.term != "tokens a second, estimated"]  # the step says it
    for line in rows:
        out += [_text(14, y, line.term, "m"), _text(250, y, line.text, "k", "end"), _text(262, y, _how(line), "m")]
        y += 19
    y += 6 if rows else 0
    for note in plan.notes[:3]:
        for text in wrap(f"note: {note}", 92):
            out.append(_text(14, y, text, "m"))
            y += 17
    height = round(y + 2)
    said = verdict(plan)[0]
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sk plan" role="img" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" style="max-width:100%;height:auto"><title>{escape(f"Plan: {plan.title}")}</title>'
        f"<desc>{escape(said)}</desc><style>{_css(theme)}.sk.plan .k{{font-size:12px}}</style>"
        '<defs><pattern id="sk-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path class="r" d="M0 3H6" style="stroke-width:1.6"/></pattern></defs>'
        f'<rect class="b" width="{width}" height="{height}" rx="8"/>'
    )
    return start + "".join(out) + "</svg>"


def _how(line: Line) -> str:
    if line.kind == "optimistic":
        return "optimistic, at the datasheet's rates"
    return cut(f"{line.kind}, {line.brief}" if line.brief else line.kind, 54)


def _bar(plan: Plan, out: list[str], y: float, width: int) -> float:
    """Draw name, arguments, verdict and the bar, and return the y of the next line."""
    memory, setup = plan.memory, plan.setup
    words, warning = verdict(plan)
    recipe = "bf16" if plan.recipe is None else str(getattr(plan.recipe, "name", plan.recipe))
    device = plan.gpu.name if plan.gpu else "GPU"
    tokens = "" if setup.batch is None or setup.length is None else f"{setup.batch:,} x {setup.length:,} tokens, "
    name = f"{units.count(plan.parameters)} parameters, {recipe}, {tokens}{setup.gpus:,} x {device}"
    rest = [f"ZeRO {setup.zero}", f"recompute {setup.recompute}", f"optimizer {setup.optimizer}"]
    rest = rest if setup.training else ["a forward pass and its KV cache"]
    out += [_text(14, y + 2, cut(name, 70), "h"), _text(14, y + 21, ", ".join(rest), "m")]
    y += 41
    if warning:
        out.append(f'<path class="v" d="M14 {y:g}h11l-5.5-10z" style="stroke:none"/>')
    out.append(_text(31 if warning else 14, y, cut(words, 96), "v" if warning else "m"))

    limit = None if plan.gpu is None else plan.gpu.room_gib
    top, tall, left, right = y + 13, 30.0, 14.0, width - 14.0
    parts = parts_of(memory)
    longest = max(sum(part.gib for part in parts), memory.gib)
    reach = 1.02 * max(longest, limit if limit is not None and limit <= 12 * longest else 0.0)
    x = left
    for part in parts:
        wide = part.gib / reach * (right - left)
        box = f'x="{x:.1f}" y="{top:g}" width="{max(wide - 0.8, 0.4):.1f}" height="{tall:g}"'
        tip = escape(f"{part.group}: {units.gib(part.gib)}, {'exact' if part.exact else 'approximate'}")
        out += _box(part, box, f"<title>{tip}</title>")
        x += wide
    if limit is not None and limit <= 12 * longest:
        at = left + limit / reach * (right - left)
        out.append(f'<rect class="h" x="{at - 1:.1f}" y="{top - 5:g}" width="2" height="{tall + 10:g}"/>')
    return top + tall + 24


def _box(part: BarPart, box: str, inside: str = "") -> list[str]:
    css, opacity = _FILLS[part.group]
    drawn = [f'<rect class="{css}" fill-opacity="{opacity:g}" {box}>{inside}</rect>']
    return drawn if part.exact else [*drawn, f'<rect fill="url(#sk-hatch)" pointer-events="none" {box}/>']


def _parts(memory: Memory, out: list[str], y: float, width: int) -> float:
    """Draw the bar's legend, each part with its memory, in three columns, and return the y of the next line."""
    parts, columns = parts_of(memory), 3
    for number, part in enumerate(parts):
        row, column = divmod(number, columns)
        x, at = 14 + column * (width - 28) / columns, y + 19 * row
        out += _box(part, f'x="{x:.1f}" y="{at - 10:g}" width="12" height="12"')
        words = f'<tspan class="m">{escape(part.group)}</tspan><tspan class="k" dx="6">{units.gib(part.gib)}</tspan>'
        out.append(f'<text x="{x + 18:.1f}" y="{at:g}">{words}</text>')
    y += 19 * -(-len(parts) // columns)
    out.append(_text(14, y, "solid: exact from shapes and dtypes; hatched: approximate", "t"))
    return y + 26
