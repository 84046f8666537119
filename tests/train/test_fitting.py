"""A training that fits itself to a time, on machines of any speed: their clock and their steps are faked."""

import pytest
import torch

import surokit as sk
from tests.refusals import refused

SIZES = {"tiny": 1.0, "small": 5.0, "large": 25.0}  # seconds of a step of all sessions, on a machine of speed 1
PARTS = (0.2, 0.3, 0.5)  # of it, for each of three recipes


class Machine:
    """A clock, and sessions that move it on.

    speed: how much faster they are than SIZES says. first: how many times as long a first step takes. room: the largest that fits.
    """

    def __init__(self, speed=1.0, first=1.0, room="large"):
        self.now, self.speed, self.first, self.room = 1000.0, speed, first, room
        self.made: list[tuple[float, int]] = []
        self.error: Exception = torch.OutOfMemoryError("CUDA out of memory")

    def clock(self):
        return self.now

    def sessions(self, size, steps):
        for part in PARTS:
            session = Pretended(self, size * part / self.speed)
            self.made.append((size, steps))
            if size > SIZES[self.room]:
                raise self.error
            yield session

    def fit(self, seconds, **settings):
        return sk.fit_to_time(SIZES, self.sessions, seconds=seconds, clock=self.clock, **settings)

    def train(self, fit):
        """Do what was chosen."""
        for session in self.sessions(fit.size, fit.steps):
            session.started = True
            session.run(fit.steps)


class Pretended:
    def __init__(self, machine, step_s):
        self.machine, self.step_s, self.started = machine, step_s, False

    def run(self, steps):
        self.machine.now += self.step_s * (steps if self.started else steps - 1 + self.machine.first)
        self.started = True


@pytest.mark.parametrize("speed", [3, 20, 60, 100, 1000, 20_000])
def test_it_ends_in_time_on_any_machine(speed):
    machine = Machine(speed)
    began = machine.now
    fit = machine.fit(30)
    machine.train(fit)
    assert machine.now - began <= 30
    assert 40 <= fit.steps <= 120
    assert fit.size == SIZES[fit.name]


def test_where_even_the_smallest_is_slow_it_trains_the_fewest_steps_and_says_so():
    fit = Machine(0.5).fit(30)
    assert (fit.name, fit.steps) == ("tiny", 40)
    said = repr(fit).splitlines()[0]
    assert "so about 80 s in all. Only" in said
    assert said.endswith("s are left, but no fewer steps were asked for.")
    fit = Machine(0.2).fit(30)
    assert (fit.steps, fit.left_s) == (40, 0)
    assert "Only 0 s are left" in repr(fit)


@pytest.mark.parametrize(
    ("speed", "name", "steps"),
    [(3, "tiny", 82), (6, "tiny", 120), (20, "small", 107), (60, "large", 61), (1000, "large", 120)],
)
def test_a_faster_machine_takes_a_larger_model_then_more_steps(speed, name, steps):
    fit = Machine(speed).fit(30)
    assert (fit.name, fit.steps) == (name, steps)
    assert fit.step_s == pytest.approx(SIZES[name] / speed)
    assert fit.expected_s <= fit.left_s < 30


def test_twenty_times_slower_it_still_ends_in_time_and_with_less():
    usual, slow = Machine(100), Machine(100 / 20)
    fits = usual.fit(30), slow.fit(30)
    assert SIZES[fits[1].name] < SIZES[fits[0].name]
    slow.train(fits[1])
    assert slow.now <= 1000 + 30


def test_a_larger_size_needs_the_fewest_steps():
    # of `large` a step takes .5 s and its trial 1.5 s: 44 steps would fit
    machine = Machine(50)
    assert machine.fit(30, steps=(40, 60)).name == "large"
    fit = Machine(50).fit(30, steps=(60, 60))
    assert fit.name == "small"
    assert list(fit.tried) == ["tiny", "small", "large"]
    assert "Of large, fewer than 60 steps would end in time." in repr(fit)


def test_what_is_surely_too_large_is_not_tried():
    machine = Machine(20)
    fit = machine.fit(30)
    assert {size for size, _ in machine.made} == {SIZES["tiny"], SIZES["small"]}
    assert list(fit.tried) == ["tiny", "small"]


def test_the_first_step_is_not_the_pace_and_its_time_is_gone():
    fit = Machine(20, first=100).fit(30)
    assert fit.step_s == pytest.approx(SIZES["tiny"] / 20)
    assert fit.left_s < 30 - 100 * SIZES["tiny"] / 20


def test_a_hiccup_of_the_machine_is_not_its_pace():
    """The first timing of every session takes a hundred times as long, as when another program has the processor: alone it takes
    longer than the trial of a session should."""
    machine = Machine(1000)
    runs = []

    class Disturbed(Pretended):
        def run(self, steps):
            runs.append(self)
            self.machine.now += self.step_s * steps * (100 if runs.count(self) == 2 else 1)

    def sessions(size, steps):
        return [Disturbed(machine, size * part / machine.speed) for part in PARTS]

    fit = sk.fit_to_time(SIZES, sessions, seconds=300, clock=machine.clock)
    assert (fit.name, fit.steps) == ("large", 120)
    assert fit.step_s == pytest.approx(SIZES["large"] / 1000)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_a_size_without_room_is_too_large(error):
    machine = Machine(1000, room="small")
    machine.error = error
    fit = machine.fit(30)
    assert fit.name == "small"
    assert fit.tried["large"] is None
    assert "large has no room" in repr(fit)
    assert fit.larger == "large has no room in memory."
    machine.error = RuntimeError("shapes do not match")
    with refused(RuntimeError):
        machine.fit(30)
    with refused(MemoryError):
        sk.fit_to_time({"huge": 26.0}, Machine().sessions, seconds=30)


def test_it_says_what_it_chose_and_why():
    assert repr(Machine(20).fit(30)).splitlines() == [
        "small, 107 steps: 0.25 s for a step of all sessions, so about 27 s in all.",
        "Measured, a step: tiny 0.05 s, small 0.25 s. The next larger one, large, would take too long.",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"sizes": {}},
        {"seconds": 0},
        {"seconds": float("nan")},
        {"steps": (0, 5)},
        {"steps": (6, 5)},
    ],
)
def test_what_makes_no_sense_is_refused(arguments):
    with refused(ValueError):
        sk.fit_to_time(**({"sizes": SIZES, "new_sessions": Machine().sessions, "seconds": 30} | arguments))


def test_real_sessions_fit():
    def new_sessions(width, steps):
        torch.manual_seed(0)
        model = sk.Decoder(sk.DecoderConfig(layers=1, width=width, heads=2, kv_heads=1, vocab=64, ffn=48))
        ids = torch.randint(64, (2, 16))
        first = sk.Session(model, [{"input_ids": ids, "labels": ids}], schedule=sk.Cosine(warmup=1, steps=steps))
        return [first, first.fork(recipe=sk.FP8)]

    fit = sk.fit_to_time({"small": 16, "large": 32}, new_sessions, seconds=60, steps=(1, 3))
    assert fit.size in (16, 32)
    assert 1 <= fit.steps <= 3
