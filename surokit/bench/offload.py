"""What offloading costs a step: no offload, OffloadAdamW and ZenFlow in turns, beside the formulas of surokit.planner.offload.

    python -m surokit.bench offload --out offload.json

On a CUDA device these are real steps of a Decoder over the real link. Elsewhere the device is emulated: it computes by sleeping,
for a time C, while the host's threads do their work. Gradients are real tensors that were made once; a throttled link moves them,
and the host adds them up and runs AdamW on them. What the emulation computes of the device's own part (gathering cold columns,
updating hot ones, taking weights in) is taken off the next C, in which a device does it within a hundredth. A CPU takes longer
for it than for AdamW; so C, which has to have room for it, is long, and where a case asks for a host that is busy for longer
still, its AdamW rests after its work.

In a round each way takes a turn, in a new random order; the control, OffloadAdamW, takes two, which shows the noise. A turn is
whole windows. ZenFlow's begins with a window that is not timed, so that AdamW has a job when the clock starts, as it has one when
the clock stops. Hot columns are chosen before, once. A ratio is taken within a round. Each measurement is in the file when it is
made, and the same command goes on with what is missing.

f share of the control's step in which the device waits; x share of that stall which ZenFlow removes; k hot columns; S window;
M bytes of the model; N its parameters; B the link's rate; r the host's AdamW's
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surokit.bench import result
from surokit.bench.book import Book, next_free
from surokit.bench.configurations import MODELS, TINY
from surokit.bench.process import Failed
from surokit.bench.turns import Call, OutOfTime, Turns
from surokit.planner.offload import Host, predict_offload, stall_gain
from surokit.racing.statistics import Interval, bootstrap_interval

if TYPE_CHECKING:
    import torch

    from surokit.offload.link import ThrottledLink

NONE, CONTROL, AGAIN, ZENFLOW = "none", "synchronous", "synchronous, again", "zenflow"
WAYS = (NONE, CONTROL, AGAIN, ZENFLOW)
LR = 1e-4
BAR, NEAR = 0.85, 0.02  # of the stall is removed; of the traffic's formula
K = 0.1
VERSION = 1  # of the measurements: a change of what is measured begins a new file
_NEVER = 10**6  # steps between choices of hot columns


@dataclass(frozen=True)
class Case:
    """stalled: f, that the control is brought to. link: M over the link, in units of C; None: the link alone makes f, and AdamW
    has the host's own rate. interval: S."""

    name: str
    stalled: float
    link: float | None
    interval: int

    @property
    def slowed(self) -> bool:
        return self.link is not None


# With M/B = l C and N/r = a C ZenFlow's step is max(C, (1-k) l C, (1-k) a C/S) + (1-k) l C/S. To remove x of a stall of f/(1-f) C
# it has to be below C + (1-x) f/(1-f) C. At f = .5 that is 1.15 C: landing has .15 C, so l < .66 at S = 4. At f = .93 it is 3 C,
# and a is 13: at S = 4 AdamW alone takes 3 C, at S = 8 half of it. By the link alone l is 1 at f = .5, and S = 8 leaves landing
# .11 C.
CASES = (
    Case("f = .5, AdamW", 0.5, 0.25, 4),
    Case("f = .93, AdamW", 0.93, 0.5, 8),
    Case("f = .5, link", 0.5, None, 8),
)


@dataclass(frozen=True)
class Pace:
    """windows: of a turn of ZenFlow. steps: of another way's turn, at most; turn_s: above which it takes fewer, though two."""

    windows: int = 1
    steps: int = 4
    turn_s: float = 8.0

    def of(self, step_s: float) -> int:
        return max(2, min(self.steps, int(self.turn_s / max(step_s, 1e-9))))


class Way(Protocol):
    """A system that takes turns. window: steps of a window."""

    optimizer: Any
    window: int
    parameters: int

    def begin(self) -> None: ...

    def step(self) -> None: ...

    def over(self) -> float:
        """Waits for the device; seconds to take off the clock."""
        ...

    def close(self) -> None: ...


# -- a device that sleeps


class Sleeper:
    """An emulated device: C seconds of computing are slept, less what the emulation worked itself in its place since."""

    def __init__(self, compute_s: float) -> None:
        self.compute_s, self.owed_s, self.worked_s = compute_s, 0.0, 0.0

    @contextlib.contextmanager
    def works(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begun
            self.owed_s, self.worked_s = self.owed_s + took, self.worked_s + took

    def compute(self) -> None:
        from surokit.offload.timeline import span

        begun = time.perf_counter()
        pays = min(self.owed_s, self.compute_s)
        self.owed_s -= pays
        with span("compute"):
            while (left := begun + self.compute_s - pays - time.perf_counter()) > 0:
                time.sleep(left)


def _link(device: Sleeper, gb_s: float) -> ThrottledLink:
    from surokit.offload.link import ThrottledLink

    class Emulated(ThrottledLink):
        """What fills and takes is the device's work."""

        def down(self, fill: Any, to: Any, reads: Any = ()) -> Any:
            return super().down(self._own(fill), to, reads)

        def up(self, source: Any, take: Any) -> Any:
            return super().up(source, self._own(take))

        def _own(self, work: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
            def own(staging: torch.Tensor) -> None:
                with device.works():
                    work(staging)

            return own

    return Emulated(gb_s)


class Emulated:
    """A way on a Sleeper. rest_s: that AdamW rests for each parameter that it updates."""

    def __init__(
        self, way: str, work: Sequence[Any], device: Sleeper, gb_s: float, rest_s: float = 0.0, interval: int = 4
    ) -> None:
        import torch

        import surokit as sk

        self.device, self.rest_s = device, rest_s
        self.params = [torch.nn.Parameter(g.clone()) for g in work]
        self.parameters = sum(g.numel() for g in work)
        self.window = interval if way == ZENFLOW else 1
        self.optimizer: Any = None
        for p, g in zip(self.params, work):
            p.grad = g
        if way == CONTROL:
            # one thread, as ZenFlow's AdamW has here: two that wait for one another are at the mercy of what else runs
            self.optimizer = sk.OffloadAdamW(self.params, pt_reserved_cores_perc=0.5, link=_link(device, gb_s))
            self.optimizer._worker.delay = self._rest
        elif way == ZENFLOW:

            class OnSleeper(sk.ZenFlow):
                """Hot columns are the device's work too, and so is their choice."""

                def _update_hot(self, parts: Any) -> None:
                    with device.works():
                        super()._update_hot(parts)

            options: dict[str, Any] = {"topk_ratio": K, "update_interval": interval, **_CHOSEN_ONCE}
            self.optimizer = OnSleeper(self.params, link=_link(device, gb_s), **options)
            self.optimizer._crew.adam.delay = self._rest
        if self.optimizer is not None:
            self.optimizer.step()  # makes the states, and chooses columns
            for _ in range(2 * self.window - 1):
                self.optimizer.step()
            _drain(self.optimizer)

    def _rest(self) -> float:
        """Before each of AdamW's jobs, on its thread: for as many parameters as the job has."""
        from surokit.offload.workers import beat

        jobs = len(self.optimizer._transfers) if self.window == 1 else 1
        cold = 1.0 if self.window == 1 else 1 - K
        over = time.perf_counter() + self.rest_s * self.parameters * cold / max(jobs, 1)
        while (left := over - time.perf_counter()) > 0:
            time.sleep(min(left, 0.05))
            beat()
        return 0.0

    def begin(self) -> None:
        self.device.owed_s = 0.0

    def step(self) -> None:
        self.device.compute()
        if self.optimizer is not None:
            self.optimizer.step()

    def over(self) -> float:
        owed, self.device.owed_s = self.device.owed_s, 0.0
        return min(owed, self.device.compute_s)  # has room in the C to come; what has none is time

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.link.close()
            self.optimizer._stop()


_CHOSEN_ONCE = {"select_strategy": "step", "select_interval": _NEVER}


def gradients(millions: float) -> list[Any]:
    """bf16, in matrices of a decoder's layers, of about so many million elements; columns differ in size, as they do in models."""
    import torch

    torch.manual_seed(0)
    width, ffn = 1024, 2816
    layer = [(width, width)] * 2 + [(width // 2, width)] * 2 + [(ffn, width)] * 2 + [(width, ffn)]
    if millions < 4:
        layer = [(64, 64), (96, 64)]
    size = sum(rows * columns for rows, columns in layer)
    shapes = layer * max(1, round(1e6 * millions / size))
    return [(torch.randn(rows, columns) * torch.rand(columns).square() * 1e-2).bfloat16() for rows, columns in shapes]


# -- a model that trains


@dataclass(frozen=True)
class Work:
    """Tokens of a step: `accumulate` micro-batches of `batch` rows of `length`."""

    shape: dict[str, Any]
    batch: int = 2
    length: int = 2048
    accumulate: int = 4

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.accumulate


class Real:
    """A Decoder with random weights in bf16 and one of the optimizers, on random tokens. Raises Failed where memory is short."""

    def __init__(self, way: str, work: Work, device: str, interval: int) -> None:
        import torch

        self.way, self.work, self.device = way, work, torch.device(device)
        self.window = interval if way == ZENFLOW else 1
        self.model: Any = None
        self.optimizer: Any = None
        short = ""
        try:
            self._build(interval)
            for _ in range(2 * self.window):
                self.step()
            self.over()
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            short = str(error).splitlines()[0]
        if short:  # behind the error, whose frames hold what was built
            self.close()
            raise Failed(f"{way} has not the memory it needs: {short}", "memory")

    def _build(self, interval: int) -> None:
        import torch

        import surokit as sk

        torch.manual_seed(0)
        config = sk.DecoderConfig(**self.work.shape, max_length=self.work.length)
        self.model = sk.Decoder(config, device=self.device, dtype=torch.bfloat16)
        if self.device.type == "cuda":
            sk.fuse(self.model)
        params = list(self.model.parameters())
        self.parameters = sum(p.numel() for p in params)
        if self.way == NONE:
            self.optimizer = sk.AdamW(params, lr=LR, state_dtype=torch.float32)
        elif self.way == CONTROL:
            self.optimizer = sk.OffloadAdamW(params, lr=LR)
        else:
            self.optimizer = sk.ZenFlow(params, lr=LR, topk_ratio=K, update_interval=interval, **_CHOSEN_ONCE)
        self.ids = torch.randint(self.work.shape["vocab"], (self.work.batch, self.work.length), device=self.device)

    def begin(self) -> None:
        self.over()

    def step(self) -> None:
        for _ in range(self.work.accumulate):
            (self.model(input_ids=self.ids, labels=self.ids).loss / self.work.accumulate).backward()
        if self.way == CONTROL:
            self.over()  # it would wait for the backward pass as well, and count that
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def over(self) -> float:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 0.0

    def close(self) -> None:
        import gc

        import torch

        if hasattr(self.optimizer, "_stop"):
            self.optimizer._stop()
        self.model = self.optimizer = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# -- turns


def turn(way: Way, steps: int) -> dict[str, Any]:
    """So many steps on the clock: ms a step; by the optimizer's own account of the same steps what the host waited for, ms a step,
    and bytes over the model's."""
    optimizer = way.optimizer
    if way.window > 1:
        way.begin()
        for _ in range(way.window):
            way.step()
    way.begin()
    before = _counts(optimizer)
    begun = time.perf_counter()
    for _ in range(steps):
        way.step()
    owed_s = way.over()
    took_s = time.perf_counter() - begun - owed_s
    after = _counts(optimizer)
    _drain(optimizer)
    found: dict[str, Any] = {"steps": steps, "ms": 1e3 * took_s / steps, "owed_ms": 1e3 * owed_s}
    if before:
        per = {name: (after[name] - before[name]) / steps for name in before}
        size = optimizer.accounts.model_bytes
        found["waits"] = {name[5:]: value for name, value in per.items() if name.startswith("wait ")}
        found |= {name: per[name] / size for name in ("down", "up", "migrated")}
        found["device_waits"] = per["device_waits"]
    return found


def _counts(optimizer: Any) -> dict[str, float]:
    accounts = getattr(optimizer, "accounts", None)
    if accounts is None:
        return {}
    migrated, setup = accounts.bytes["migration"], accounts.bytes["setup"]
    return {
        **{f"wait {cause}": ms for cause, ms in accounts.stall_by_cause.items()},
        "device_waits": optimizer.link.device_stall_ms(),
        "down": optimizer.link.bytes_down - migrated[0] - setup[0],  # the link's own count
        "up": optimizer.link.bytes_up - migrated[1] - setup[1],
        "migrated": migrated[0] + migrated[1],
    }


def _drain(optimizer: Any) -> None:
    if hasattr(optimizer, "drain"):
        optimizer.drain()


def host_busy(way: Way, steps: int) -> dict[str, float]:
    """Seconds a step that each of the host's threads works, without its waits."""
    from surokit.offload.timeline import recorded

    way.begin()
    for _ in range(way.window - 1):
        way.step()
    with recorded() as timeline:
        for _ in range(steps):
            way.step()
        way.over()
        _drain(way.optimizer)
    return {lane: timeline.busy_s(lane) / steps for lane in ("adam", "accumulator")}


# -- the measurement


def run(
    device: str | None = None,
    rounds: int = 8,
    minutes: float = 20.0,
    millions: float = 25.0,
    layers: int | None = None,
    interval: int | None = None,
    cases: Sequence[str] = (),
    out: Path | None = None,
    new: bool = False,
    rehearse: bool = False,
) -> dict[str, Any]:
    """Measure what is missing of the file for so many minutes; its data.

    device: "cpu" or "cuda"; None is a GPU where there is one. rehearse: the code of a GPU with a tiny decoder on a processor.
    millions: parameters of the emulated model, in millions. layers: of the 1.7B decoder, 28 unless given; interval: S there, 4
    unless given. cases: words of names of emulated cases; all of them unless given. new: the next free name instead of `out`.
    Raises ValueError for arguments out of range, and RuntimeError without the device.
    """
    import torch

    if rounds < 2 or not minutes > 0 or not millions > 0:
        raise ValueError(
            f"offload needs at least 2 rounds, minutes and millions above 0, not {rounds}, {minutes:g} and {millions:g}."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device: without --device cuda the device is emulated.")
    real = rehearse or (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    if not real and (layers is not None or interval is not None):
        raise ValueError(
            "layers and interval are of the decoder on a GPU: an emulated case has its own, choose among cases."
        )
    out = out or Path("offload-rehearsal.json" if rehearse else "offload.json")
    ends_s = time.monotonic() + 60 * minutes
    if real:
        shape = TINY if rehearse else {**MODELS["1.7b"], **({} if layers is None else {"layers": layers})}
        work = Work(shape, *((1, 32, 2) if rehearse else ()))
        settings: dict[str, Any] = {**asdict(work), "interval": interval or 4, "tokens": work.tokens}
        name = "offload: training steps" + (", rehearsed on a processor" if rehearse else "")
        chosen: list[Case] = [Case("real steps", math.nan, math.nan, interval or 4)]
    else:
        name, settings = "offload: an emulated device", {"parameters": sum(g.numel() for g in gradients(millions))}
        chosen = [case for case in CASES if not cases or any(part in case.name for part in cases)]
        if not chosen:
            raise ValueError(f"cases={list(cases)}: known are {', '.join(repr(case.name) for case in CASES)}.")
    head = {"benchmark": name, "version": VERSION, "settings": {**settings, "k": K}, "rehearsal": rehearse}
    book = Book(next_free(out) if new else out, "offload", head, {"minutes": minutes, "rounds": rounds})
    try:
        for case in chosen:
            bench = Bench(book, case, Call(ends_s, grace_s=60.0), rounds, Pace(2, 8) if real else Pace())
            if real:
                bench.real(work, "cpu" if rehearse else "cuda")
            else:
                bench.emulated(gradients(millions))
    except OutOfTime as end:
        print(f"{end} Call it again to go on.", file=sys.stderr)
    print(f"raw result: {book.path}", file=sys.stderr)
    return book.data


class Bench:
    """One case in one call."""

    def __init__(self, book: Book, case: Case, call: Call, rounds: int, pace: Pace = Pace()) -> None:
        self.book, self.case, self.call, self.count, self.pace = book, case, call, rounds, pace

    def emulated(self, work: Sequence[Any]) -> None:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)  # what stands for the device takes one core, as its workers are to have the others
        try:
            chosen = self._kept("setting", 60.0, lambda until_s: {"setting": setting(self.case, work)})
            if "setting" in chosen:
                s = chosen["setting"]
                device = Sleeper(s["compute_ms"] / 1e3)
                options = {"gb_s": s["link_gb_s"], "rest_s": s["rest_s"], "interval": self.case.interval}
                self._turns(lambda way: Emulated(way, work, device, **options), s["link_gb_s"], s["rest_s"])
        finally:
            torch.set_num_threads(before)

    def real(self, work: Work, device: str) -> None:
        rates = self._kept("setting", 30.0, lambda until_s: {"setting": {"link_gb_s": _link_gb_s(device)}})
        gb_s = rates.get("setting", {}).get("link_gb_s")
        self._turns(lambda way: Real(way, work, device, self.case.interval), gb_s, 0.0, together=True)

    def _turns(self, make: Callable[[str], Way], gb_s: float | None, rest_s: float, together: bool = False) -> None:
        """together: all are built before the first turn, so that what lacks room for all is known."""
        keys = ["rates", *(f"{number}/{way}" for number in range(self.count) for way in WAYS)]
        if all(self.book.done(f"{self.case.name}/{key}") for key in keys):
            return
        with closing(Turns[str, Way](lambda way, until_s: make(way), alone=())) as turns:
            for way in (NONE, CONTROL, ZENFLOW) if together else ():
                with contextlib.suppress(Failed):  # its turn says so
                    turns.opened(way, math.inf)
            for number in range(self.count):
                for way in random.Random(number).sample(WAYS, len(WAYS)):
                    self._turn(turns, way, number)
            if turns_of(self.book.data, self.case.name)[NONE]:
                self._kept("rates", 60.0, lambda until_s: {"rates": self._rates(turns, until_s, gb_s, rest_s)})

    def _turn(self, turns: Turns[str, Way], way: str, number: int) -> None:
        name = CONTROL if way == AGAIN else way

        def timed(until_s: float) -> dict[str, Any]:
            system = turns.opened(name, until_s)
            steps = self.pace.windows * system.window if way == ZENFLOW else self.pace.of(self._step_s(name))
            found = {"turn": turn(system, steps), "alone": turns.alone(name)}
            if turns.alone(name):
                turns.close(name)
            return found

        self._kept(f"{number}/{way}", 0.0, timed)

    def _step_s(self, way: str) -> float:
        """Of a step, as its turns so far say."""
        prefix = f"{self.case.name}/"
        took = [each["turn"]["ms"] for key, each in self.book.found.items() if key.startswith(prefix) and "turn" in each
                and key.endswith(f"/{way}")]  # fmt: skip
        return statistics.median(took) / 1e3 if took else math.inf

    def _rates(self, turns: Turns[str, Way], until_s: float, gb_s: float | None, rest_s: float) -> dict[str, Any]:
        """Of the host's threads in this case, and what the planner predicts with them."""
        control = turns.opened(CONTROL, until_s)
        adam_s, n = host_busy(control, 2)["adam"] + rest_s * control.parameters, control.parameters
        if turns.alone(CONTROL):
            turns.close(CONTROL)
        zenflow = turns.opened(ZENFLOW, until_s)
        busy = host_busy(zenflow, zenflow.window)
        found: dict[str, Any] = {
            "parameters": n,
            "link_gb_s": gb_s,
            "adam_params_s": n / adam_s,
            "adding_params_s": (1 - K) * n / busy["accumulator"],
            "zenflow_adam_params_s": (1 - K) * n / self.case.interval / busy["adam"],
        }
        if gb_s:
            found["predicted"] = self._predicted(found)
        return found

    def _predicted(self, rates: Mapping[str, Any]) -> dict[str, Any]:
        none_ms = statistics.median(each["ms"] for each in turns_of(self.book.data, self.case.name)[NONE])
        host = Host(rates["link_gb_s"], rates["adam_params_s"], accumulate_params_s=rates["adding_params_s"])
        o = predict_offload(
            none_ms, rates["parameters"], host, topk_ratio=K, update_interval=self.case.interval, gradient_bytes=2
        )
        return {
            **{name: getattr(o, name) for name in ("synchronous_ms", "zenflow_ms", "stalled", "removed", "gain")},
            "binds": o.binds,
        }

    def _kept(self, key: str, need_s: float, work: Callable[[float], Mapping[str, Any]]) -> dict[str, Any]:
        full = f"{self.case.name}/{key}"
        if self.book.done(full):
            return self.book[full]
        about = {"case": asdict(self.case), "what": key.rpartition("/")[2]}
        return self.book.put(full, {**about, **self.call.tried(full, need_s, work)})


def _link_gb_s(device: str) -> float | None:
    import surokit as sk

    if device == "cpu":
        return 100.0  # a rehearsal's prediction means nothing
    ceilings = sk.calibrate(device, seconds=5.0, cache=False, progress=False).ceilings
    return ceilings.host_gb_s if ceilings else None


def setting(case: Case, work: Sequence[Any]) -> dict[str, Any]:
    """C, the link's rate and AdamW's rest of a case.

    C is twice what the emulation computes in a step of ZenFlow in the device's place, which takes longer when the host works beside
    it. Then the control runs, and AdamW's rest, or in a case of the link its rate, is corrected until the control is stalled for
    the share that the case asks for.
    """
    n, size = sum(g.numel() for g in work), sum(g.nbytes for g in work)
    device = Sleeper(0.0)
    with closing(Emulated(ZENFLOW, work, device, 1e3, interval=case.interval)) as way:
        worked = []
        for _ in range(3):
            before = device.worked_s
            turn(way, case.interval)
            worked.append((device.worked_s - before) / (2 * case.interval))
    c = 2 * statistics.median(worked)
    wanted_s = case.stalled / (1 - case.stalled) * c
    gb_s, rest_s = size / 1e9 / (case.link * c if case.link is not None else wanted_s), 0.0
    device = Sleeper(c)
    found: list[dict[str, float]] = []
    for _ in range(8):
        with closing(Emulated(CONTROL, work, device, gb_s, rest_s)) as way:
            stall_s = statistics.median(turn(way, 1)["ms"] for _ in range(3 if case.stalled > 0.8 else 7)) / 1e3 - c
        found.append({"link_gb_s": gb_s, "rest_s": rest_s, "stalled": stall_s / (c + stall_s)})
        if abs(stall_s / wanted_s - 1) < 0.02:
            break
        if case.slowed:
            rest_s = max(0.0, rest_s + (wanted_s - stall_s) / n)
        else:
            gb_s *= stall_s / wanted_s
    best = min(found, key=lambda each: abs(each["stalled"] - case.stalled))
    return {"compute_ms": 1e3 * c, "emulated_ms": 1e3 * statistics.median(worked), **best, "tried": found}


# -- figures


def turns_of(data: Mapping[str, Any], case: str) -> dict[str, list[dict[str, Any]]]:
    """Turns of each way, in the order of the rounds, of the rounds that are whole."""
    rounds: dict[str, dict[str, dict[str, Any]]] = {}
    for key, each in data["offload"].items():
        name, number, way = (*key.split("/"), "", "")[:3]
        if name == case and "turn" in each:
            rounds.setdefault(number, {})[way] = each["turn"]
    whole = [rounds[number] for number in sorted(rounds, key=int) if len(rounds[number]) == len(WAYS)]
    return {way: [found[way] for found in whole] for way in WAYS}


def figures(data: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Of a case: step_ms by way and gain, as Intervals; f; x by the clock, and low and high of it; the gain that the waits explain
    (emulated devices only); bytes over the model's, the formula, and which bars are met."""
    turns = turns_of(data, case)
    ms = {way: [each["ms"] for each in turns[way]] for way in WAYS}
    s = next(each["case"]["interval"] for key, each in data["offload"].items() if key.startswith(f"{case}/"))
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


def waits(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """ms a step by cause, mean; where weights land what the device waited, and not what it did."""
    by = {cause: statistics.mean(each["waits"][cause] for each in turns) for cause in turns[0]["waits"]}
    by["landing"] = min(by["landing"], statistics.mean(each["device_waits"] for each in turns))
    return by


def _explained(turns: Mapping[str, Sequence[Mapping[str, Any]]], f: float) -> float:
    """1 / (1 - x f) with the x that the optimizers' accounts of their waits give."""
    control, zenflow = (sum(waits(turns[way]).values()) for way in (CONTROL, ZENFLOW))
    return 1 / (1 - (1 - zenflow / control) * f)


def cases_of(data: Mapping[str, Any]) -> list[str]:
    """Those with whole rounds."""
    names: Iterable[str] = dict.fromkeys(key.partition("/")[0] for key in data["offload"])
    return [name for name in names if turns_of(data, name)[NONE]]


def table(data: Mapping[str, Any]) -> str:
    """A row a way and case; under them the conditions and each bar, met or missed."""
    head = ["case", "way", "step ms (95 %)", "waits ms, by cause", "stall removed (95 %)", "gain (95 %)",
            "1/(1 - x f), x by waits", "planned gain", "down + up, x M", "(1-k)(1+1/S)"]  # fmt: skip
    rows, notes = [], []
    for case in cases_of(data):
        found, turns = figures(data, case), turns_of(data, case)
        rates = data["offload"].get(f"{case}/rates", {}).get("rates", {})
        predicted = rates.get("predicted")
        for way in WAYS:
            cells = [case, way, _span(found["step_ms"][way], ".1f")]
            zen = way == ZENFLOW
            if way == NONE:
                rows.append([*cells, *[""] * (len(head) - 3)])
                continue
            by = waits(turns[way])
            cells.append(", ".join(f"{cause} {ms:.1f}" for cause, ms in by.items() if ms >= 0.05) or "none")
            cells.append(_span(found["removed"], ".1%") if zen else "")
            cells.append(_span(found["gain"] if zen else found["again"], ".3f") if way != CONTROL else "")
            cells.append(f"{found['explained']:.2f}" if zen and not math.isnan(found["explained"]) else "")
            cells.append(f"{predicted['gain']:.2f}" if zen and predicted else "")
            down, up = (statistics.mean(each[direction] for each in turns[way]) for direction in ("down", "up"))
            cells += [f"{down:.4f} + {up:.4f}", f"{found['formula']:.4f}" if zen else "2"]
            rows.append(cells)
        notes.append(_note(data, case, found, rates))
    if not rows:
        return "No round is whole yet: call it again."
    if data.get("rehearsal"):
        notes.insert(0, "- A rehearsal on a processor: the times mean nothing.")
    return result.markdown(data, head, rows) + "\n\n" + "\n".join(notes)


def _note(data: Mapping[str, Any], case: str, found: Mapping[str, Any], rates: Mapping[str, Any]) -> str:
    made = data["offload"].get(f"{case}/setting", {})
    s, about = made.get("setting", {}), made.get("case", {})
    words = [f"f = {found['f']:.3f}, k = {K:g}, S = {about.get('interval')}, {len(turns_of(data, case)[NONE])} rounds"]
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


def _most_owed_ms(data: Mapping[str, Any], case: str) -> float:
    return max(each.get("owed_ms", 0.0) for turns in turns_of(data, case).values() for each in turns)


def _span(value: Interval, form: str) -> str:
    ends = f" ({value.low:{form}} to {value.high:{form}})" if value.known else ""
    return f"{value.mid:{form}}{ends}"
