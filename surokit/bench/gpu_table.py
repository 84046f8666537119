"""Make the tables of `bench gpu`: the measured speeds beside the bars, the gain of each technique, and all of it as CSV.

Everything follows from the raw file; the numbers of a rehearsal are refused.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surokit.bench.configurations import MODELS, Configuration, target_of
from surokit.bench.result import markdown
from surokit.bench.results_store import commits
from surokit.bench.targets import DEVICE, LEAST_OF_BF16, MEANING, MOST_DRIFT, MOST_IDLE, OVER_UNSLOTH, SOURCE, TARGETS
from surokit.statistics import spread
from surokit.tables import markdown_table

_NONE = "not measured"
CAPTURED = "captured"
UNCHECKED = "UNCHECKED"


@dataclass(frozen=True)
class SystemRow:
    """A SystemRow is one system of a group: its turns, of which the medians are shown, and what else was found of it."""

    group: str
    configuration: Configuration
    turns: tuple[Mapping[str, Any], ...]
    plan: Mapping[str, Any]
    profile: Mapping[str, Any]
    problem: str

    @property
    def rates(self) -> list[float]:
        return [turn["tokens_per_s"] for turn in self.turns]

    @property
    def tokens_per_s(self) -> float | None:
        return statistics.median(self.rates) if self.turns else None

    def ratios(self, other: SystemRow | None) -> list[float]:
        """Return the ratios to another system's tokens/s, turn by turn: of the same round and the same call."""
        if other is None:
            return []
        beside = {(turn["round"], turn["call"]): turn["tokens_per_s"] for turn in other.turns}
        mine = [(turn["tokens_per_s"], beside.get((turn["round"], turn["call"]))) for turn in self.turns]
        return [rate / against for rate, against in mine if against]

    @property
    def unchecked(self) -> str:
        """Return why the configuration was not found right before it was timed; "" if it was."""
        return next((turn["unchecked"] for turn in self.turns if "unchecked" in turn), "")

    @property
    def no_graphs(self) -> str:
        """Return why the steps did not run as CUDA graphs although they should have; "" if they did."""
        graphs = [turn.get("graphs", CAPTURED) for turn in self.turns if self.configuration.graphs]
        return next((why for why in graphs if why != CAPTURED), "")

    @property
    def mfu(self) -> float | None:
        """Return model FLOPs over the dense bfloat16 peak; None without a known peak."""
        peak = self.plan.get("peak_tflops")
        if peak is None or self.tokens_per_s is None:
            return None
        return float(self.tokens_per_s * self.plan["flops_per_token"] / (peak * 1e12))

    @property
    def first(self) -> Mapping[str, Any]:
        """Return the times and losses until the system was warm, of its first start; {} if it has none."""
        return next((turn["first"] for turn in self.turns if "first" in turn), {})

    def peak_gib(self, of: str = "peak_mib") -> float | None:
        """Return the peak memory of tensors, in GiB, or ("reserved_mib") of what the allocator had taken from the device; None if
        not measured."""
        return max((turn[of] for turn in self.turns if turn.get(of)), default=0.0) / 1024 or None

    def loss_gap(self, other: SystemRow | None) -> float | None:
        """Return the largest relative distance of the first losses from another system's on the same tokens in the same order."""
        if other is None or other is self or not (self.first and other.first):
            return None
        pairs = zip(self.first["losses"], other.first["losses"])
        return max(abs(a - b) / abs(b) for a, b in pairs)


def rows(data: Mapping[str, Any]) -> dict[str, list[SystemRow]]:
    """Return the systems of each group, in the order in which they were measured."""
    found = data["gpu"]
    entries: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in found.values():
        if entry["what"] == "turn":
            entries.setdefault((entry["group"], entry["name"]), []).append(entry)
    groups: dict[str, list[SystemRow]] = {}
    for (group, name), turns in entries.items():
        c = Configuration.from_dict(turns[0]["configuration"])
        problems = [turn.get("failed") or turn.get("left_out") for turn in turns]
        groups.setdefault(group, []).append(
            SystemRow(
                group,
                c,
                tuple(turn for turn in turns if "tokens_per_s" in turn),
                found.get(f"plan/{name}", {}),
                next(
                    (e for e in found.values() if e["what"] == "profile" and (e["group"], e["name"]) == (group, name)),
                    {},
                ),
                next((problem for problem in problems if problem), ""),
            )
        )
    return groups


def table(data: Mapping[str, Any]) -> str:
    """Make Markdown: the targets' table with the measured speeds, the gain of each technique, and what else is known.

    Raises ValueError for a rehearsal.
    """
    if data["rehearsal"]:
        raise ValueError(
            "These are the numbers of a rehearsal on a processor, which mean nothing: no table takes them."
        )
    groups = rows(data)
    text = [_targets_table(data, groups)]
    if any(row.configuration.changes for group in groups.values() for row in group):
        text.append(_techniques_table(data, groups))
    return "\n\n".join([*text, "\n".join(f"- {line}" for line in _lines(data, groups))])


def shown(data: Mapping[str, Any]) -> str:
    """Return the text that a call prints: the table, or for a rehearsal the list of measurements and of those that did not
    work."""
    if not data["rehearsal"]:
        return table(data)
    found = data["gpu"].values()
    counts = {what: sum(each["what"] == what for each in found) for what in dict.fromkeys(e["what"] for e in found)}
    problems = dict.fromkeys(p for e in found if (p := e.get("failed") or e.get("left_out")))
    lines = [f"A rehearsal: {', '.join(f'{n} {what}' for what, n in counts.items())}; its numbers mean nothing."]
    return "\n".join([*lines, *(f"- {problem}" for problem in problems)])


# -- the targets


_HEAD = (
    *(
        "configuration",
        "tokens/s (median, range)",
        "gate",
        "target",
        "stretch",
        "reached",
        "x Unsloth BF16",
        "x our BF16",
    ),
    *("MFU", "of light", "of predicted", "idle", "launches", "peak / reserved GiB", "first step s", "loss gap", "note"),
)


def _targets_table(data: Mapping[str, Any], groups: Mapping[str, list[SystemRow]]) -> str:
    lines = []
    shown: set[tuple[str, str, str]] = set()
    bars = {(t.model, t.train, t.recipe): t for t in TARGETS}
    for group in groups.values():
        bf16 = _bf16(group)
        unsloth = next((row for row in group if row.configuration.peer == "unsloth"), None)
        for row in group:
            c = row.configuration
            target = target_of(c)
            if c.changes or (target is None and not c.peer):
                continue
            own = (c.model, c.train, c.recipe)
            if not c.peer:
                if own in shown:  # also the baseline of a group of techniques
                    continue
                shown.add(own)
            words = target.words() if target else ("", "", "")
            reached = "" if target is None else _reached(row, target.bars(_own_bf16(row, bf16)), data)
            lines.append(
                [c.name, _rate(row), *words, reached, _times(row, unsloth), _times(row, bf16), *_rest(row, bf16, data)]
            )
    for own, target in bars.items():
        if own not in shown:
            lines.append([" ".join(own), _NONE, *target.words(), *[""] * (len(_HEAD) - 5)])
    return markdown({**data, "settings": _settings(data)}, _HEAD, lines)


def _settings(data: Mapping[str, Any]) -> dict[str, Any]:
    s = data["settings"]
    environment = data["environment"]
    return {
        "steps of": f"{s['batch']} x {s['length']} x {s['accumulate']} tokens",
        "LoRA rank": s["rank"],
        "weights": "random",
        "calls": len(data["calls"]),
        "commit": " and ".join(_commits(data)) or environment["commit"] or "unknown",
    }


def _commits(data: Mapping[str, Any]) -> list[str]:
    """Return the commits that turns of the file were measured with."""
    return commits(data, (each for each in data["gpu"].values() if each["what"] == "turn" and "tokens_per_s" in each))


def _bf16(group: Sequence[SystemRow]) -> SystemRow | None:
    return next((row for row in group if row.configuration.recipe == "bf16" and not row.configuration.peer), None)


def _own_bf16(row: SystemRow, bf16: SystemRow | None) -> float | None:
    """Return bfloat16's tokens/s by the turns beside this row's: a share of it is then the ratio that the table shows."""
    ratios = row.ratios(bf16)
    return row.tokens_per_s / statistics.median(ratios) if ratios and row.tokens_per_s is not None else None


def _reached(row: SystemRow, bars: Sequence[float | None], data: Mapping[str, Any]) -> str:
    """Return the highest bar that was reached, on the device that the bars are for."""
    if row.tokens_per_s is None or DEVICE not in data["environment"]["device"].split():  # a GH200 is another one
        return ""
    if row.unchecked:
        return UNCHECKED.lower()
    held = [
        name for name, bar in zip(("gate", "target", "stretch"), bars) if bar is not None and row.tokens_per_s >= bar
    ]
    return held[-1] if held else "no" if bars[0] is not None else ""


def _rate(row: SystemRow) -> str:
    if not row.turns:
        return _NONE
    low, middle, high = spread(row.rates)
    marks = [f"**{UNCHECKED}**"] * bool(row.unchecked) + ["**NO CUDA GRAPHS**"] * bool(row.no_graphs)
    return " ".join([f"{middle:,.0f} ({low:,.0f} to {high:,.0f})", *marks])


def _times(row: SystemRow, other: SystemRow | None) -> str:
    ratios = [] if row is other else row.ratios(other)
    if not ratios:
        return ""
    low, middle, high = spread(ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _rest(row: SystemRow, bf16: SystemRow | None, file: Mapping[str, Any]) -> list[str]:
    floor_ms, rate = row.plan.get("floor_ms"), row.tokens_per_s
    tokens = row.turns[0]["tokens"] / row.turns[0]["steps"] if row.turns else 0
    light = None if floor_ms is None or rate is None else floor_ms / (tokens / rate * 1e3)
    predicted = row.plan.get("predicted_tokens_per_s")
    gap = row.loss_gap(bf16)
    first = row.first
    notes = [row.problem, first.get("note", "") if row.configuration.peer else ""]
    if row.unchecked:
        notes.append(f"unchecked: {row.unchecked}")
    if row.no_graphs:
        notes.append(f"no CUDA graphs: {row.no_graphs}")
    if not row.no_graphs and row.configuration.graphs and row.profile.get("graphs", CAPTURED) != CAPTURED:
        notes.append("profiled without graphs")
    if len(_commits(file)) > 1:
        notes.append(f"commit {' and '.join(commits(file, row.turns))}")
    if any(turn.get("alone") for turn in row.turns):
        notes.append("built anew for each turn")
    return [
        _share(row.mfu),
        _share(light),
        "" if rate is None or predicted is None else f"{rate / predicted:.0%}",
        _share(row.profile.get("idle")),
        ""
        if row.profile.get("launches") is None
        else f"{row.profile['launches'] + row.profile['graph_launches']:,.0f}",
        " / ".join(f"{gib:.1f}" for of in ("peak_mib", "reserved_mib") if (gib := row.peak_gib(of)) is not None),
        f"{(first.get('build_s') or 0) + first['first_step_s']:.1f}" if first else "",
        "" if gap is None else f"{gap:.2%}",
        "; ".join(note for note in notes if note),
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


# -- techniques


def _techniques_table(data: Mapping[str, Any], groups: Mapping[str, list[SystemRow]]) -> str:
    head = (
        "technique",
        "tokens/s (median, range)",
        "x the group's first",
        "idle",
        "launches",
        "peak / reserved GiB",
        "loss gap",
        "note",
    )
    lines: list[tuple[str, ...]] = []
    for group in groups.values():
        if any(row.configuration.changes for row in group):
            for row in group:
                idle, launches, peak, _, gap, note = _rest(row, group[0], data)[3:]
                lines.append(
                    (row.configuration.name, _rate(row), _times(row, group[0]), idle, launches, peak, gap, note)
                )
    return markdown_table(lines, header=head)


# -- lines below


def _lines(data: Mapping[str, Any], groups: Mapping[str, list[SystemRow]]) -> Iterator[str]:
    found = data["gpu"]
    yield f"{MEANING} {SOURCE}"
    yield from _beside_unsloth(groups)
    for key, each in found.items():
        kind, _, name = key.partition("/")
        if kind == "turn":  # in the tables above
            continue
        if problem := each.get("failed") or each.get("left_out"):
            yield f"{key}: {problem}"
        elif kind == "sustained" and "tokens_per_s" in each:
            yield _sustained(name, each)
        elif kind == "start" and "empty" in each:
            yield f"{name}: first step after {_first(each['empty'])} with empty caches, {_first(each['full'])} with full ones"
        elif kind == "ceilings":
            yield _ceilings(name, each)
        elif kind == "choices":
            yield from _choices(each)
        elif kind in ("correct", "smoke"):
            yield _correctness(name if kind == "correct" else key, each)


def _beside_unsloth(groups: Mapping[str, list[SystemRow]]) -> Iterator[str]:
    """Yield the ratio to Unsloth's bfloat16 in the same run, the mean over the models that were measured."""
    for recipe, (bar, goal) in OVER_UNSLOTH.items():
        means = {}
        doubt = ""
        for group in groups.values():
            unsloth = next((row for row in group if row.configuration.peer == "unsloth" and row.turns), None)
            mine = next(
                (row for row in group if row.configuration.recipe == recipe and not row.configuration.peer), None
            )
            if mine is not None and (ratios := mine.ratios(unsloth)):
                means[mine.configuration.model] = statistics.median(ratios)
                doubt = doubt or mine.unchecked
        if means:
            mean = statistics.mean(means.values())
            verdict = "goal reached" if mean >= goal else "bar reached" if mean >= bar else "below the bar"
            verdict = UNCHECKED.lower() if doubt else verdict
            so_far = "" if means.keys() == MODELS.keys() else " so far, on these models alone"
            yield (
                f"{recipe} over Unsloth BF16, mean of {', '.join(means)}: {mean:.2f} x (bar {bar}, goal {goal}): {verdict}{so_far}"
            )
    for recipe, bar in LEAST_OF_BF16.items():
        for group in groups.values():
            mine = next(
                (row for row in group if row.configuration.recipe == recipe and not row.configuration.changes), None
            )
            if mine is not None and (ratios := mine.ratios(_bf16(group))):
                middle = statistics.median(ratios)
                verdict = "holds" if middle >= bar else "does not hold"
                verdict = UNCHECKED.lower() if mine.unchecked else verdict
                yield f"{mine.configuration.name}: {middle:.2f} x its own BF16 (at least {bar}): {verdict}"
    for group in groups.values():
        by = {(row.configuration.recipe, row.configuration.peer): row for row in group if not row.configuration.changes}
        mine, peer = by.get(("qfp8", "")), by.get(("bf16", "unsloth"))
        if mine and peer and (own_gib := mine.peak_gib()) and (gib := peer.peak_gib()):
            verdict = "holds" if own_gib < gib else "does not hold"
            yield f"{mine.configuration.name}: peak {own_gib:.1f} GiB, below Unsloth BF16's {gib:.1f}: {verdict}"


def _sustained(name: str, each: Mapping[str, Any]) -> str:
    idle = each["sampled_idle_frac"] if each["sampled_idle_frac"] is not None else each["idle_frac"]
    drift = each["drift"]
    bars = []
    if idle is not None:
        bars.append(f"idle {idle:.1%} (below {MOST_IDLE:.0%}: {'holds' if idle < MOST_IDLE else 'does not hold'})")
    if drift is not None:
        bars.append(
            f"drift {drift:+.1%} (within {MOST_DRIFT:.0%}: {'holds' if abs(drift) < MOST_DRIFT else 'does not hold'})"
        )
    if each.get("graphs", CAPTURED) != CAPTURED:
        bars.append(f"**NO CUDA GRAPHS**: {each['graphs']}")
    if "unchecked" in each:
        bars.append(f"**{UNCHECKED}**: {each['unchecked']}")
    return f"{name}, {each['minutes']:.1f} minutes without a pause: {each['tokens_per_s']:,.0f} tokens/s, {', '.join(bars)}"


def _first(state: Mapping[str, Any]) -> str:
    first_s = state["build_s"] + state["first_step_s"]
    steps = state["warm_up_steps"]
    return f"{first_s:.1f} s ({first_s + state['warm_up_s']:.1f} s to the end of step {steps}, {state['all_s']:.1f} s in all)"


def _ceilings(name: str, each: Mapping[str, Any]) -> str:
    if "gpu" in each:
        reached = each["gpu"].get("ceilings", {})
        units = {
            "bf16_tflops": "bf16 {:.0f} TFLOPS",
            "fp8_tflops": "fp8 {:.0f} TFLOPS",
            "bandwidth_tb_s": "copy {:.2f} TB/s",
        }
        said = [text.format(reached[field]) for field, text in units.items() if reached.get(field) is not None]
        return f"The device reaches: {', '.join(said)}"
    shapes = [
        f"{p['product']} {p['bf16_tflops']:.0f}" + (f" / {p['fp8_tflops']:.0f}" if p["fp8_tflops"] is not None else "")
        for p in each["products"]
    ]
    return f"Products of {name} over {each['tokens']:,} tokens, TFLOPS bf16 / fp8: {', '.join(shapes)}"


def _choices(each: Mapping[str, Any]) -> Iterator[str]:
    """Say which kernels transpose codes, and which operations are not served by the first choice of kernel."""
    backends = {row["op"]: row["backend"] for row in each["choices"] if row["op"].startswith("transpose")}
    yield f"Codes are transposed by {' and '.join(dict.fromkeys(backends.values()))} ({', '.join(backends)})"
    if "missed" in each:
        yield f"**NOT THE FIRST CHOICE**: {each['missed']}"


def _correctness(name: str, each: Mapping[str, Any]) -> str:
    fused, graphs = each["fused"], each["graphs"]
    right = {True: "right", False: "WRONG"}
    far = f"worst gradient {fused['worst']['fused']:.2%} from float32, apart {fused['worst']['apart']:.2%}"
    replay = f"{right[graphs['ok']]} ({'the same bits' if graphs['same_bits'] else 'close'})"
    if not graphs["captured"]:
        replay = f"none to check: {graphs['reason']}"
    return f"{name}: fused {right[fused['ok']]} ({far}); graphs {replay}"


# -- CSV

_COLUMNS = (
    *("group", "configuration", "model", "train", "recipe", "peer", "changes", "round", "call", "date", "tokens_per_s"),
    *("seconds", "steps", "tokens", "peak_mib", "alone", "graphs", "first_step_s", "commit", "unchecked", "failed"),
    "left_out",
)


def write_csv(data: Mapping[str, Any], path: Path) -> None:
    """Write one line a turn; the first column says whether it is a rehearsal's."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(("rehearsal", *_COLUMNS))
        for each in data["gpu"].values():
            if each["what"] == "turn":
                c = Configuration.from_dict(each["configuration"])
                known = {**each, "configuration": c.name, "changes": "; ".join(c.changes), "peer": c.peer}
                known |= {"model": c.model, "train": c.train, "recipe": c.recipe}
                known["first_step_s"] = each.get("first", {}).get("first_step_s")
                out.writerow((data["rehearsal"], *(known.get(name) for name in _COLUMNS)))
