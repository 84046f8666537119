"""Health says nothing of sound runs and finds what was spoiled, within a stated number of steps."""

from __future__ import annotations

import ast
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surokit.runs import health
from surokit.runs.health import FIRST, Event, Health
from surokit.train import AdamW, Cosine, Session
from tests.train.toys import VOCAB, Toy

ALARMS = {"spike", "grad_spike", "nonfinite", "skipped", "plateau", "diverging", "unstable"}


def curve(
    steps: int, seed: int = 0, start: float = 10.0, floor: float = 2.0, power: float = 0.3, noise: float = 0.03
) -> list[dict[str, Any]]:
    """A sound run: a power law with noise, gradient norms that fall from a tall start and have a tail, warm-up and cosine."""
    dice = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        level = floor + (start - floor) * (1 + step / 10) ** -power
        lr = 1e-3 * min(step / 50, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        norm = (0.5 + 5 / (1 + step / 20)) * math.exp(dice.gauss(0, 0.2))
        rows.append({"loss": level * (1 + dice.gauss(0, noise)), "grad_norm": norm, "lr": lr})
    return rows


def told(rows: list[dict[str, Any]]) -> list[Event]:
    doctor = Health()
    return [event for step, row in enumerate(rows, 1) for event in doctor.add(step, **row)]


def alarms(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(event.step, event.kind) for event in told(rows) if event.kind in ALARMS]


def first(rows: list[dict[str, Any]], *kinds: str) -> int | None:
    return next((step for step, kind in alarms(rows) if kind in kinds), None)


SOUND: dict[str, dict[str, Any]] = {
    "pretraining": {"steps": 3_000},
    "slow power law": {"steps": 3_000, "power": 0.05, "floor": 0.0, "start": 4.0, "noise": 0.01},
    "noisy, small batches": {"steps": 2_000, "noise": 0.12},
    "fast": {"steps": 500, "power": 1.0},
    "fine-tuning": {"steps": 600, "start": 1.8, "floor": 1.1, "power": 0.5, "noise": 0.1},
    "close to zero": {"steps": 1_000, "start": 2.0, "floor": 0.0, "power": 1.5, "noise": 0.2},
}


@pytest.mark.parametrize("recipe", SOUND)
def test_sound_runs_raise_no_alarm(recipe: str):
    assert {seed: found for seed in range(20) if (found := alarms(curve(seed=seed, **SOUND[recipe])))} == {}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at", [30, 200, 900])
def test_a_spike_is_told_at_its_step(seed: int, at: int):
    rows = curve(1_000, seed)
    rows[at - 1]["loss"] *= 2
    assert alarms(rows) == [(at, "spike")]


@pytest.mark.parametrize("loss", [50.0, 1e6, 1e30])
def test_one_loss_out_of_all_bounds_is_a_spike_and_no_more(loss: float):
    rows = curve(1_000)
    rows[499]["loss"] = loss
    assert alarms(rows) == [(500, "spike")]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.2, 0.3])
def test_a_step_up_that_stays_is_told_within_ten_steps(seed: int, share: float):
    """Some losses are too close for one alone: three in a row are not."""
    rows = curve(1_000, seed)
    for row in rows[500:]:
        row["loss"] *= 1 + share
    found = first(rows, "spike")
    assert found is not None
    assert 501 <= found <= 510


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at", [40, 700])
def test_a_gradient_spike_is_told_at_its_step(seed: int, at: int):
    rows = curve(1_000, seed)
    rows[at - 1]["grad_norm"] *= 20
    assert alarms(rows) == [(at, "grad_spike")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told_at_once(value: float):
    rows = curve(200)
    rows[0]["loss"] = rows[99]["grad_norm"] = value
    events = [event for event in told(rows) if event.kind in ALARMS]
    assert [(e.step, e.kind) for e in events] == [(1, "nonfinite"), (100, "nonfinite")]
    assert events[0].text.startswith("loss not finite")
    assert events[1].text.startswith("gradient norm not finite")


def test_neighbours_are_one_event():
    rows = curve(300)
    for step in range(150, 160):
        rows[step] |= {"loss": math.nan, "skipped": True}
    assert alarms(rows) == [(151, "skipped")]


def test_a_loss_that_stays_nan_is_diverging_after_three_steps():
    rows = curve(200)
    for row in rows[99:]:
        row["loss"] = math.nan
    assert alarms(rows) == [(100, "nonfinite"), (102, "diverging")]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.004, 0.02, 0.1])
def test_a_loss_that_rises_is_diverging(seed: int, share: float):
    """By a share of itself a step, from step 501: told once it is a fifth above its best for 20 steps."""
    rows = curve(1_000, seed)
    for step, row in enumerate(rows[500:], 1):
        row["loss"] *= (1 + share) ** min(step, 400)
    found = first(rows, "diverging")
    assert found is not None
    assert found <= 500 + math.log(1.2 + 0.15) / math.log(1 + share) + 45


def test_a_run_that_only_gets_worse_is_diverging():
    rows = [{"loss": 3.0 + 0.05 * step} for step in range(100)]
    found = first(rows, "diverging")
    assert found is not None
    assert found <= 60


def test_it_is_over_when_the_loss_is_back():
    rows = curve(600)
    for row in rows[300:400]:
        row["loss"] *= 1.8
    doctor, phases = Health(), {}
    for step, row in enumerate(rows, 1):
        doctor.add(step, **row)
        phases[step] = doctor.phase
    assert phases[350] == "diverging"
    assert phases[420] == "converging"
    assert [e.text for e in told(rows) if e.kind == "phase"] == ["converging again, after diverging"]


def test_three_spikes_are_unstable_until_two_hundred_steps_had_none():
    rows = curve(1_000)
    for at in (300, 340, 380):
        rows[at - 1]["loss"] *= 2
    assert alarms(rows) == [(300, "spike"), (340, "spike"), (380, "spike"), (380, "unstable")]
    doctor, phases = Health(), {}
    for step, row in enumerate(rows, 1):
        doctor.add(step, **row)
        phases[step] = doctor.phase
    assert [phases[at] for at in (379, 380, 580, 581)] == ["converging", "unstable", "unstable", "converging"]


@pytest.mark.parametrize("seed", range(5))
def test_a_flat_loss_is_a_plateau_and_told_while_the_learning_rate_is_high(seed: int):
    dice = random.Random(seed)
    flat = [{"loss": 3.3 * (1 + dice.gauss(0, 0.03)), "lr": 1e-3} for _ in range(1_000)]
    found = first(flat, "plateau")
    assert found is not None
    assert found <= 700
    cooled = curve(2_000, seed, noise=0.01)[:1_000] + [
        {"loss": 4.0 * (1 + dice.gauss(0, 0.01)), "lr": 1e-5} for _ in range(3_500)
    ]
    assert first(cooled, "plateau") is None  # an end, no alarm
    doctor = Health()
    for step, row in enumerate(cooled, 1):
        doctor.add(step, **row)
    assert doctor.phase == "plateau"


@pytest.mark.parametrize("steps", [500, 2_000, 5_000])
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_a_slow_but_steady_fall_is_no_plateau(steps: int, noise: float):
    """Less than half a percent between the windows at first, and yet no doubt of it."""
    for seed in range(10):
        dice = random.Random(seed)
        rows = [
            {"loss": (1.07 - 0.17 * step / steps) * (1 + dice.gauss(0, noise)), "lr": 1e-3} for step in range(steps)
        ]
        assert alarms(rows) == []


@pytest.mark.parametrize(("fall", "most"), [(0.003, 0.15), (0.005, 0.05)])
def test_a_slow_fall_that_noise_hides_is_seldom_told_as_a_plateau(fall: float, most: float):
    """By `fall` of itself in 75 steps, at 1 % noise: half a standard deviation over the windows of the first look."""
    found = 0
    for seed in range(100):
        dice = random.Random(seed)
        rows = [{"loss": (1 - fall) ** (t / 75) * (1 + dice.gauss(0, 0.01)), "lr": 1e-3} for t in range(600)]
        found += first(rows, "plateau") is not None
    assert found <= 100 * most


def test_a_flat_loss_with_little_noise_is_told_soon():
    for noise, median, latest in ((0.003, 200, 320), (0.01, 200, 360)):
        told_at = []
        for seed in range(40):
            dice = random.Random(seed)
            step = first([{"loss": 3 * (1 + dice.gauss(0, noise)), "lr": 1e-3} for _ in range(500)], "plateau")
            told_at.append(500 if step is None else step)
        assert sorted(told_at)[20] <= median
        assert max(told_at) <= latest


def test_the_phases_of_a_sound_run():
    doctor, phases = Health(), [""]
    assert doctor.phase == ""
    for step, row in enumerate(curve(300), 1):
        doctor.add(step, **row)
        if doctor.phase != phases[-1]:
            phases.append(doctor.phase)
    assert phases == ["", "warm-up", "converging"]


def test_without_a_learning_rate_warm_up_is_the_first_losses():
    doctor, phases = Health(), []
    for step in range(1, FIRST + 1):
        doctor.add(step, loss=3.0)
        phases.append(doctor.phase)
    assert phases == ["warm-up"] * (FIRST - 1) + ["converging"]


def test_every_alarm_says_what_to_do():
    rows = curve(1_000)
    for at in (300, 340, 380):
        rows[at - 1]["loss"] *= 3
        rows[at - 1]["grad_norm"] *= 30
    rows[500]["loss"] = math.nan
    for row in rows[600:]:
        row["loss"] *= 3
    events = [event for event in told(rows) if event.kind in ALARMS]
    assert {event.kind for event in events} == ALARMS - {"skipped", "plateau"}
    assert all(event.text and event.suggestion for event in events)
    assert events[0].to_dict() == {
        "step": 300,
        "kind": "grad_spike",
        "text": events[0].text,
        "suggestion": events[0].suggestion,
    }


odd = st.one_of(
    st.none(), st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1e308, -1e308, 5e-324])
)


@given(st.lists(st.tuples(odd, odd, odd, st.booleans()), max_size=120))
def test_any_numbers_are_taken_in(rows: list[tuple[float | None, float | None, float | None, bool]]):
    doctor = Health()
    for step, (loss, norm, lr, skipped) in enumerate(rows, 1):
        for event in doctor.add(step, loss=loss, grad_norm=norm, lr=lr, skipped=skipped):
            assert event.text
    assert doctor.phase in ("", "warm-up", "converging", "plateau", "unstable", "diverging")


def test_memory_is_bounded():
    doctor = Health()
    for step in range(1, 50_000):
        doctor.add(step, loss=3.0 + 9 * (step % 500 == 0), grad_norm=1.0, lr=1e-3)
    assert len(doctor._blocks) < health.BLOCKS
    assert len(doctor._episodes) <= health.UNSTABLE_EVENTS
    assert len(doctor._last) <= 3


def test_it_knows_no_torch():
    names = [
        name
        for node in ast.walk(ast.parse(Path(health.__file__).read_text(encoding="utf-8")))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
        )
    ]
    assert set(names) <= {"__future__", "math", "collections", "collections.abc", "dataclasses", "typing"}


# --- our own small sessions ---

STEPS, FAULT = 240, 150


def batches(seed: int, shuffled: bool = False, bad: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Sequences that can be learnt: each token is mostly a fixed function of the one before."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for number in range(STEPS):
        ids = torch.randint(VOCAB, (8, 16), generator=generator)
        for place in range(1, 16):
            follows = torch.rand(8, generator=generator) < 0.8
            ids[:, place] = torch.where(follows, (5 * ids[:, place - 1] + 3) % VOCAB, ids[:, place])
        labels = ids.clone()
        if shuffled:
            labels = labels.flatten()[torch.randperm(labels.numel(), generator=generator)].view_as(labels)
        if number == bad:
            labels = (labels + 7) % VOCAB
        out.append({"input_ids": ids, "labels": labels})
    return out


def trained(seed: int, fault: str = "", recipe: Any = None) -> list[dict[str, Any]]:
    """Rows of a session of ours with a planted fault at step FAULT + 1, or from the start."""
    data = batches(seed, fault == "labels shuffled", FAULT if fault == "a bad batch" else None)
    hot = 100.0 if fault == "learning rate x 100" else 1.0
    cosine = Cosine(warmup=20, steps=STEPS)
    constant = fault == "labels shuffled"
    model = Toy(seed)
    session = Session(
        model,
        data,
        optimizer=AdamW(lr=3e-2),
        recipe=recipe,
        schedule=lambda step: 1.0 if constant else cosine(step) * (hot if step >= FAULT else 1.0),
        seed=seed,
    )
    session.run(FAULT)
    if fault == "a gradient spike":
        hooks = [p.register_hook(lambda gradient: 30 * gradient) for p in model.parameters()]
        session.run(1)
        for hook in hooks:
            hook.remove()
    if fault == "NaN":
        with torch.no_grad():
            model.hidden.weight[0, 0] = math.nan
        session.run(2)
    else:
        session.run(STEPS - session.steps)
    return [{"loss": r.loss, "grad_norm": r.grad_norm, "lr": r.lr, "skipped": bool(r.skipped)} for r in session.records]


FAULTS = {
    "learning rate x 100": ({"spike", "grad_spike", "diverging"}, FAULT + 10),
    "a bad batch": ({"spike", "grad_spike"}, FAULT + 1),
    "a gradient spike": ({"grad_spike"}, FAULT + 1),
    "NaN": ({"nonfinite", "skipped"}, FAULT + 1),
    "labels shuffled": ({"plateau"}, STEPS),
}


@pytest.mark.filterwarnings("ignore:A step that is not finite")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_a_session(fault: str):
    kinds, latest = FAULTS[fault]
    found = first(trained(0, fault), *kinds)
    assert found is not None
    assert (0 if fault == "labels shuffled" else FAULT) < found <= latest


def test_a_sound_session_raises_no_alarm():
    assert alarms(trained(0)) == []


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:A step that is not finite")
def test_the_study():
    """Every seed and recipe without an alarm, every fault found in time; what was seen is written to docs/measurements."""
    import surokit as sk
    from surokit.environment import environment

    sound = {
        name: {seed: alarms(trained(seed, recipe=sk.recipes.get(name))) for seed in range(20)}
        for name in ("as given", "fp8", "mxfp8")
    }
    found = {fault: [first(trained(seed, fault), *FAULTS[fault][0]) for seed in range(20)] for fault in FAULTS}
    study = {"environment": environment(), "steps": STEPS, "fault_after": FAULT, "sound": sound, "found_at": found}
    path = Path(__file__).parents[2] / "docs" / "measurements" / "health.json"
    path.write_text(json.dumps(study, indent=1) + "\n", encoding="utf-8")
    assert not any(events for runs in sound.values() for events in runs.values())
    for fault, steps in found.items():
        assert all(at is not None and at <= FAULTS[fault][1] for at in steps), fault
