"""Launch a function on 1, 2, 4 ... processes and measure how fast its session trains on each number of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from surokit.efficiency.scaling import Rate, Scaling
from surokit.launching.call import packed
from surokit.launching.launch import HANG_S, Launch, check_outside, processes_for, threads_of_each
from surokit.launching.output import Shown

PROFILED = 5  # steps


def scale(
    train: Callable[..., Any],
    *args: Any,
    gpus: Sequence[int] = (1, 2, 4),
    folder: str | Path | None = None,
    hang_s: float | None = HANG_S,
    output: Shown = "first",
    **kwargs: Any,
) -> Scaling:
    """Call `train(*args, **kwargs)` on each number of processes, as `surokit.launch` does, and compare how fast it trains.

    train: makes a Session with parallel=surokit.Parallel(...), runs some 20 steps or more, and returns the session. Each process
    trains on batches of its own, so that a step of more processes has more tokens; to divide one batch among them, let the function
    make its batches smaller by surokit.ranks.rank_here().world. The rate is the session's sustained one, without its first
    steps; then a few more steps are profiled on all ranks, to say what is lost to what.

    gpus: numbers of processes. folder: keeps what was measured, of one function; a second call goes on from there. An interrupt
    ends the run that is being measured and returns what there is; a second one ends at once.

    TypeError where the function returns no session; LaunchError as `surokit.launch`.
    """
    check_outside("scale")
    if not gpus or len(set(gpus)) < len(gpus):
        raise ValueError(f"scale(gpus={gpus!r}): different numbers of processes, such as (1, 2, 4).")
    file = None if folder is None else Path(folder) / "scaling.json"
    kept = Scaling.load(file) if file is not None and file.exists() else None
    rates = {rate.gpus: rate for rate in kept.rates} if kept else {}
    if kept:
        numbers = ", ".join(str(n) for n in sorted(rates))
        print(f"surokit: {numbers} processes were measured before, on {kept.device}: read from {file}", file=sys.stderr)
    device = kept.device if kept else ""
    call = packed(_measured, (train, args, kwargs), {})
    for n in sorted(gpus):
        if n in rates:
            continue
        print(f"surokit: measuring {n} process{'es' * (n > 1)}", file=sys.stderr, flush=True)
        running = Launch(processes_for(n, 0), 0, hang_s, output)
        # every process has the same share of a CPU, however many there are
        running.start(call, threads=threads_of_each(max(gpus)))
        found = running.wait()
        if running.was_stopped:
            break
        device = found.pop("device")
        rates[n] = Rate(n, **found)
        if file is not None:
            Scaling(rates.values(), device).save(file)
    if not rates:
        raise KeyboardInterrupt
    return Scaling(rates.values(), device)


def _measured(train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Do the call in one of the processes; the first returns the fields of a Rate, and the device."""
    from surokit.profiler import RankProfiles, profile
    from surokit.train.run_info import device_name
    from surokit.train.session import Session

    session = train(*args, **kwargs)
    if not isinstance(session, Session):
        raise TypeError(
            f"scale(train): the function returns the session that it trained, not a {type(session).__name__}."
        )
    if not session.steps:
        raise ValueError("scale(train): the session took no step: call session.run(20) in the function.")
    summary = session.summary()
    with profile(steps=PROFILED, warmup=1) as found:
        session.run(PROFILED + 1)
    ranks = RankProfiles.gather(found)
    if ranks is None:
        return None
    tokens_per_step = summary.tokens / summary.steps  # steps may differ
    step_ms = 1e3 * tokens_per_step / summary.tokens_per_s
    # profiled steps are slower, so their shares count
    of = {
        name: ranks.summary[name] / ranks.summary["wall_ms"] * step_ms
        for name in ("transfer_ms", "skew_ms", "compute_ms")
    }
    return {
        "device": device_name(session.device),
        "tokens_per_s": summary.tokens_per_s,
        "tokens_per_step": tokens_per_step,
        "communication_ms": of["transfer_ms"],
        "waiting_ms": of["skew_ms"],
        "computing_ms": of["compute_ms"],
    }
