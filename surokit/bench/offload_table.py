"""Compute the figures of a case from the raw file of `bench offload`, and make the table with its bars.

f share of the control's step in which the device waits; x share of that stall which ZenFlow removes; k hot columns; S window;
M bytes of the model; B the link's rate
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surokit.bench import result
from surokit.bench.offload_ways import AGAIN, CONTROL, NONE, WAYS, ZENFLOW, K
from surokit.bench.results_store import mixed
from surokit.planner.offload.formulas import stall_gain
from surokit.statistics import Interval, bootstrap_interval

BAR, NEAR = 0.85, 0.02  # of the stall is removed; of the traffic's formula


def turns_of(data: Mapping[str, Any], case: str) -> dict[str, list[dict[str, Any]]]:
    """Return the turns of each way, in the order of the rounds, from the rounds that are whole."""
    rounds: dict[str, dict[str, dict[str, Any]]] = {}
    for key, each in data["offload"].items():
        name, number, way = (*key.split("/"), "", "")[:3]
        if name == case and "turn" in each:
            rounds.setdefault(number, {})[way] = each["turn"]
    whole = [rounds[number] for number in sorted(rounds, key=int) if len(rounds[number]) == len(WAYS)]
    return {way: [found[way] for found in whole] for way in WAYS}


def cases_of(data: Mapping[str, Any]) -> list[str]:
    """Return the cases with whole rounds."""
    return [name for name in _cases(data) if turns_of(data, name)[NONE]]


def _cases(data: Mapping[str, Any]) -> Iterable[str]:
    return dict.fromkeys(key.partition("/")[0] for key in data["offload"])


def figures(data: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Return the figures of a case.

    step_ms by way and gain, as Intervals; f; x by the clock, and low and high of it; the gain that the waits explain
    (emulated devices only); bytes over the model's, the formula, and which bars are met.
    """
    turns = turns_of(data, case)
    ms = {way: [each["ms"] for each in turns[way]] for way in WAYS}
    s = _interval(data, case)
    step_ms = {way: bootstrap_interval(ms[way]) for way in WAYS}
    gain = bootstrap_interval([a / b for a, b in zip(ms[CONTROL], ms[ZENFLOW])])
    f = 1 - step_ms[NONE].mid / step_ms[CONTROL].mid
    removed = Interval(*((1 - 1 / each) / f for each in gain))
    zen = turns[ZENFLOW]
    down, up = (statistics.mean(each[way] for each in zen) for way in ("down", "up"))
    formula = (1 - K) * (1 + 1 / s)
    needed = stall_gain(min(max(f, 0.0), 1.0), BAR)
    return {
        "step_ms": step_ms,
        "again": bootstrap_interval([a / b for a, b in zip(ms[AGAIN], ms[CONTROL])]),
        "gain": gain,
        "f": f,
        "removed": removed,
        "explained": _explained(turns, f) if "emulated" in data["benchmark"] else math.nan,
        "needed": needed,
        "down": down,
        "up": up,
        "formula": formula,
        "bars": {
            f"traffic within {NEAR:.0%} of the formula": abs((down + up) / formula - 1) <= NEAR,
            f"at least {BAR:.0%} of the stall removed": removed.mid >= BAR,
            f"gain at least 1 / (1 - {BAR} f) = {needed:.2f}": gain.mid >= needed,
        },
    }


def _interval(data: Mapping[str, Any], case: str) -> int:
    s: int = next(each["case"]["interval"] for key, each in data["offload"].items() if key.startswith(f"{case}/"))
    return s


def waits(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean ms a step by cause; where weights land, only the device's wait counts, and not its work."""
    by = {cause: statistics.mean(each["waits"][cause] for each in turns) for cause in turns[0]["waits"]}
    by["landing"] = min(by["landing"], statistics.mean(each["device_waits"] for each in turns))
    return by


def _explained(turns: Mapping[str, Sequence[Mapping[str, Any]]], f: float) -> float:
    """Return 1 / (1 - x f) with the x that the optimizers' accounts of their waits give."""
    control, zenflow = (sum(waits(turns[way]).values()) for way in (CONTROL, ZENFLOW))
    return 1 / (1 - (1 - zenflow / control) * f)


def table(data: Mapping[str, Any]) -> str:
    """Make a row a way and case; under them the conditions and each bar, met or missed, and the failures."""
    head = ["case", "way", "step ms (95 %)", "waits ms, by cause", "stall removed (95 %)", "gain (95 %)",
            "1/(1 - x f), x by waits", "planned gain", "down + up, x M", "(1-k)(1+1/S)"]  # fmt: skip
    rows = [row for case in cases_of(data) for row in _rows(data, case)]
    notes = [_note(data, case) for case in cases_of(data)]
    notes += [_seen(data, case) for case in _cases(data) if _looks(data, case)]
    for key, each in data["offload"].items():
        notes += [f"- {key}: {each[why]}" for why in ("failed", "left_out") if why in each]
    notes += [f"- {line}" for line in mixed(data, data["offload"].values())]
    if data.get("rehearsal"):
        notes.insert(0, "- A rehearsal on a processor: the times mean nothing.")
    told = "\n".join(notes)
    if not rows:
        return "No round is whole yet: call it again." + ("\n\n" + told if told else "")
    return result.markdown(data, head, rows) + "\n\n" + told


def _rows(data: Mapping[str, Any], case: str) -> list[list[str]]:
    found, turns = figures(data, case), turns_of(data, case)
    predicted = data["offload"].get(f"{case}/rates", {}).get("rates", {}).get("predicted")
    rows = [[case, NONE, _span(found["step_ms"][NONE], ".1f"), *[""] * 7]]
    for way in (CONTROL, AGAIN, ZENFLOW):
        zen = way == ZENFLOW
        by = waits(turns[way])
        down, up = (statistics.mean(each[direction] for each in turns[way]) for direction in ("down", "up"))
        cells = [case, way, _span(found["step_ms"][way], ".1f")]
        cells.append(", ".join(f"{cause} {ms:.1f}" for cause, ms in by.items() if ms >= 0.05) or "none")
        cells.append(_span(found["removed"], ".1%") if zen else "")
        cells.append(_span(found["gain"] if zen else found["again"], ".3f") if way != CONTROL else "")
        cells.append(f"{found['explained']:.2f}" if zen and not math.isnan(found["explained"]) else "")
        cells.append(f"{predicted['gain']:.2f}" if zen and predicted else "")
        cells += [f"{down:.4f} + {up:.4f}", f"{found['formula']:.4f}" if zen else "2"]
        rows.append(cells)
    return rows


def _note(data: Mapping[str, Any], case: str) -> str:
    """Return the conditions of a case, and its bars."""
    found = figures(data, case)
    s = data["offload"].get(f"{case}/setting", {}).get("setting", {})
    rates = data["offload"].get(f"{case}/rates", {}).get("rates", {})
    rounds = len(turns_of(data, case)[NONE])
    words = [f"f = {found['f']:.3f}, k = {K:g}, S = {_interval(data, case)}, {rounds} rounds"]
    if "compute_ms" in s:
        words.append(
            f"C = {s['compute_ms']:.0f} ms, slept, less {s['emulated_ms']:.0f} ms of the device's part that the CPU computes "
            f"(at most {_most_owed_ms(data, case):.0f} ms of it still owed when a turn's clock stopped); "
            + ("AdamW slowed by resting" if s["rest_s"] else "AdamW at the host's own rate")
        )
    if rates:
        speeds = ("adam_params_s", "zenflow_adam_params_s", "adding_params_s")
        adam, own, adding = (f"{rates[name] / 1e6:.0f}" for name in speeds)
        words.append(
            f"link {rates['link_gb_s'] or math.nan:.3g} GB/s; million parameters a second: AdamW {adam} (in ZenFlow's thread {own}"
            f"{', without rests' if s.get('rest_s') else ''}), adding {adding}"
        )
    if any(data["offload"].get(f"{case}/{number}/{way}", {}).get("alone") for number in range(99) for way in WAYS):
        words.append("built anew for each turn, as memory did not hold all of them")
    bars = "; ".join(f"{name}: {'met' if met else 'MISSED'}" for name, met in found["bars"].items())
    return f"- {case}: {'; '.join(words)}. {bars}."


# -- steps by themselves


def _looks(data: Mapping[str, Any], case: str) -> dict[str, dict[str, Any]]:
    """Return the observations of the steps of each way."""
    prefix = f"{case}/steps/"
    found = ((key.removeprefix(prefix), each) for key, each in data["offload"].items() if key.startswith(prefix))
    return {way: each["seen"] for way, each in found if "seen" in each}


def landing_ms(seen: Mapping[str, Any], interval: int) -> float:
    """Return how much longer the device took in the last step of a window than in the others, median."""
    ends = seen["update_ms"][interval - 1 :: interval]
    others = [ms for number, ms in enumerate(seen["update_ms"], start=1) if number % interval]
    return statistics.median(ends) - (statistics.median(others) if others else 0.0)


def _seen(data: Mapping[str, Any], case: str) -> str:
    words = []
    for way, seen in _looks(data, case).items():
        computed, updated, host = (statistics.median(seen[name]) for name in ("compute_ms", "update_ms", "host_ms"))
        said = [
            f"forward and backward {computed:.1f} ms, the optimizer {updated:.1f} ms on the device and {host:.1f} ms of the host"
        ]
        if seen["reserved_mib"]:
            first, last = seen["reserved_mib"][0], seen["reserved_mib"][-1]
            said.append(
                f"memory {seen['peak_mib']:,.0f} MiB, reserved {first:,.0f} after the first and {last:,.0f} after the last of "
                f"{seen['steps']} steps"
            )
        if "idle_ms" in seen:
            said.append(f"the device without work for {seen['idle_ms']:.1f} ms a step")
        if way == ZENFLOW:
            s = _interval(data, case)
            said.append(f"a window's last step {landing_ms(seen, s):.1f} ms longer")
            gb_s = data["offload"].get(f"{case}/setting", {}).get("setting", {}).get("link_gb_s")
            if gb_s:
                said.append(f"landing as planned {1e-6 * (1 - K) * seen['model_bytes'] / gb_s:.1f} ms, (1-k) M/B")
        words.append(f"{way}: {', '.join(said)}")
    return f"- {case}, medians of single steps: {'; '.join(words)}."


def _most_owed_ms(data: Mapping[str, Any], case: str) -> float:
    return max(each.get("owed_ms", 0.0) for turns in turns_of(data, case).values() for each in turns)


def _span(value: Interval, form: str) -> str:
    ends = f" ({value.low:{form}} to {value.high:{form}})" if value.known else ""
    return f"{value.mid:{form}}{ends}"
