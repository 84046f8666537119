"""Read result files of other clients into points of our own table.

Where a file holds single answers they become Answers, and `measures.py` computes every figure by our definition. Where it holds
figures alone, those whose definition is ours are taken over as the client states them, and no others. What a file cannot say is
unknown, and a note of each point says which client measured and what it does otherwise.

The formats are read from the clients' own sources: vllm/benchmarks/serve.py (vLLM 0.33.0), sglang/benchmark/serving.py (SGLang
0.5.23), guidellm/benchmark/schemas and guidellm/schemas (guidellm 0.8.1, as well 0.4 to 0.7), aiperf/common/models (AIPerf 0.13.0).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from surokit.serving import measures
from surokit.serving.client import Answer, State
from surokit.serving.point import Point
from surokit.serving.workload import Workload
from surokit.units import counted

Found = Mapping[str, Any]  # an object of a file

_PERCENTS = tuple(round(q * 100) for q in measures.QUANTILES)
_SAID = 300  # characters that are kept of why a request failed
_TEXT = "it sees chunks with text alone, so its first token is that of ttft_text, and tpot and e2e begin and end at such chunks"
_ALONE = "the file holds no single answers, so figures are as that client states them"
_UNSENT = "the file does not say when requests were sent"
_STATED = "so throughput is as that client states it"


def read(path: Path) -> list[Point]:
    """Read a result file of vLLM's or SGLang's benchmark, of guidellm or AIPerf, and return a point for each benchmark in it.

    Which of them wrote it is seen by its keys; the sources and versions of the formats stand at the head of this module. ValueError
    for another file, and for one that lacks a key of its kind.
    """
    objects = _objects(path)
    kind = next((kind for kind in FORMATS if objects and objects[0].keys() >= kind.keys), None)
    if kind is None:
        cause = (
            "its keys are those of no client that is known here"
            if objects
            else "it is no JSON object, nor lines of them"
        )
        files = ", ".join(f"{kind.client} ({kind.made})" for kind in FORMATS)
        raise ValueError(f"{path} is no result file that can be read: {cause}. Give one of {files}.")
    damaged = f"{path} is a damaged result of {kind.client}, or of a version with another format"
    try:
        return kind.read(objects, path)
    except KeyError as error:
        raise ValueError(f"{damaged}: it has no {error}. Make it again: {kind.made}.") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{damaged} ({error}). Make it again: {kind.made}.") from error


def _objects(path: Path) -> list[Found]:
    """Return the JSON object that a file is, or those in its lines; [] where it is neither."""
    try:
        text = path.read_text(encoding="utf-8")
        try:
            found = [json.loads(text)]
        except json.JSONDecodeError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return []
    return found if all(isinstance(each, dict) for each in found) else []


# -- vLLM and SGLang


def _vllm(objects: Sequence[Found], path: Path) -> list[Point]:
    """Read what `vllm bench serve` saves, an object a run. Its definitions are ours, as far as it has them."""
    return [_vllm_run(found, path) for found in objects]


def _vllm_run(found: Found, path: Path) -> Point:
    notes = ["measured with vLLM's benchmark, which counts an answer as whole where its stream merely ended"]
    if (burstiness := found.get("burstiness") or 1.0) != 1:
        notes.append(f"requests arrived with a burstiness of {burstiness:g}, where a Poisson process has 1")
    if ramp := found.get("ramp_up_strategy"):
        notes.append(
            f"the rate rose from {found['ramp_up_start_rps']} to {found['ramp_up_end_rps']} requests/s ({ramp})"
        )
    answers: tuple[Answer, ...] = ()
    unknown = ["ttft_text"]
    stated = _throughput(found)
    if "ttfts" in found:
        answers = _columns(found)
        if "start_times" not in found:
            notes.append(f"{_UNSENT}, {_STATED}")
        elif any(a.state != "answered" for a in answers):
            notes.append(f"the file does not say when the requests ended that were lost, {_STATED}")
        else:
            stated = {}
        unknown += [] if "queue_times" in found else ["queue"]
    else:
        notes.append(f"{_ALONE}, and its duration begins before the first request; --save-detailed keeps the answers")
        stated |= _quantiles(
            found, {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el", "queue": "client_queue_time"}
        )
        failed = found["failed"] if "failed" in found else found["num_prompts"] - found["completed"]
        stated |= {"answered": found["completed"], "failed": failed}
    return _point(
        found.get("label") or found.get("model_id") or path.stem,
        answers,
        arrivals=(found.get("request_rate"), found.get("max_concurrency")),
        totals=(stated.get("answered", 0), found["total_input_tokens"], found["total_output_tokens"]),
        notes=notes,
        date=_day(str(found.get("date", ""))),
        stated=stated,
        unknown=unknown,
    )


def _sglang(objects: Sequence[Found], path: Path) -> list[Point]:
    """Read what `python -m sglang.bench_serving` appends, a line a run."""
    return [_sglang_run(found, path) for found in objects]


def _sglang_run(found: Found, path: Path) -> Point:
    """Read one run. Its own tpot and e2e last until the stream has ended, and before SGLang's own interface its itl shares a gap
    among the tokens of a chunk: those are other figures than ours."""
    notes = [f"measured with SGLang's benchmark; {_TEXT}"]
    is_shared = found.get("backend") in ("sglang", "sglang-native")
    answers: tuple[Answer, ...] = ()
    stated = _throughput(found)
    if "ttfts" in found:
        answers = _columns(found, is_text=True, is_shared=is_shared)
        notes.append(f"{_UNSENT}, {_STATED}")
    else:
        notes.append(f"{_ALONE}, and not how many failed; --output-details keeps the answers")
        notes.append("its tpot, itl and e2e are defined otherwise and left out")
        stated |= _quantiles(found, {"ttft_text": "ttft"}) | {"answered": found["completed"]}
    return _point(
        found.get("tag") or found.get("backend") or path.stem,
        answers,
        arrivals=(found.get("request_rate"), found.get("max_concurrency")),
        totals=(found["completed"], found["total_input_tokens"], found["total_output_tokens"]),
        notes=notes,
        stated=stated,
        unknown=("ttft", "queue", "itl") if is_shared else ("ttft", "queue"),
    )


def _throughput(found: Found) -> dict[str, float]:
    return {
        "requests_per_s": found["request_throughput"],
        "input_tokens_per_s": found["total_input_tokens"] / found["duration"],
        "output_tokens_per_s": found["output_throughput"],
    }


def _quantiles(found: Found, names: Mapping[str, str]) -> dict[str, float]:
    """Return the quantiles that are in the file by our names. 0 is what these clients write where they have no value."""
    stated: dict[str, float] = {}
    for ours, theirs in names.items():
        values = {f"{ours}_p{p}_ms": found.get(f"p{p}_{theirs}_ms") for p in _PERCENTS}
        values[f"{ours}_p50_ms"] = values[f"{ours}_p50_ms"] or found.get(f"median_{theirs}_ms")
        stated |= {name: value for name, value in values.items() if value}
    return stated


def _columns(found: Found, is_text: bool = False, is_shared: bool = False) -> tuple[Answer, ...]:
    """Make answers of lists with an entry a request. is_text: its chunks are those with text; is_shared: its gaps are not those
    between chunks, and their sum is known alone."""
    ttfts: list[float] = found["ttfts"]
    sent = found.get("start_times") or [0.0] * len(ttfts)
    waited = found.get("queue_times") or [0.0] * len(ttfts)
    zero = min((s - w for s, w in zip(sent, waited)), default=0.0)
    rows = zip(
        found["input_lens"], found["output_lens"], ttfts, found["itls"], found["errors"], sent, waited, strict=True
    )
    answers = []
    for number, (inputs, outputs, ttft, itls, error, start, wait) in enumerate(rows):
        state: State = "answered" if ttft and not error else "truncated" if ttft else "failed"
        gaps = [sum(itls)] if is_shared and itls else itls
        answers.append(
            _answer(
                number,
                state,
                start - zero,
                done=start - zero + ttft + sum(itls),
                due=start - wait - zero,
                ttft=ttft or None,
                gaps=gaps,
                ttft_text=(ttft or None) if is_text else None,
                tokens=(inputs, outputs or None),
                why="" if state == "answered" else _last_line(error) or "the client does not say why",
            )
        )
    return tuple(answers)


# -- guidellm


def _guidellm(objects: Sequence[Found], path: Path) -> list[Point]:
    """Read guidellm's benchmarks.json, a point a benchmark of its sweep. Its own time per output token includes the first token's;
    here it is computed from the times of tokens that the file holds."""
    return [_guidellm_benchmark(found, path) for found in objects[0]["benchmarks"]]


def _guidellm_benchmark(found: Found, path: Path) -> Point:
    config, strategy, totals = found["config"], found["config"]["strategy"], found["metrics"]["request_totals"]
    rate, cap, kind = strategy.get("rate"), strategy.get("max_concurrency"), strategy["type_"]
    requests = [
        (status, each) for status in ("successful", "errored", "incomplete") for each in found["requests"][status] or ()
    ]
    requests.sort(key=lambda request: request[1]["request_start_time"])
    dues = [
        (each["info"]["timings"]["targeted_start"] if rate else None) or each["request_start_time"]
        for _, each in requests
    ]
    zero = min(dues, default=0.0)
    answers = tuple(
        _guidellm_answer(number, status, each, zero, due)
        for number, ((status, each), due) in enumerate(zip(requests, dues))
    )
    notes = [f"measured with guidellm; {_TEXT}"]
    if kind == "constant":
        notes.append("requests arrived evenly, not at random")
    elif kind not in ("poisson", "concurrent", "synchronous", "throughput"):
        notes.append(f"requests arrived by guidellm's strategy {kind!r}")
    if cut := sum(status == "incomplete" for status, _ in requests):
        notes.append(
            f"guidellm ended the run with {counted(cut, 'request')} under way: truncated, and no fault of the server"
        )
    phases = [config.get(name) or {} for name in ("warmup", "cooldown")]
    if any(phase.get("percent") or phase.get("value") for phase in phases):
        notes.append("requests of its warm-up and cool-down are among the answers")
    stated: dict[str, float] = {}
    if totals["total"] > len(requests):
        notes.append(
            f"the file keeps {len(requests)} of {totals['total']} requests: counts and throughput are guidellm's"
        )
        stated = _guidellm_stated(found, totals)
    streams = strategy.get("streams") or (1 if kind == "synchronous" else None)
    return _point(
        config["backend"].get("model") or path.stem,
        answers,
        arrivals=(rate, streams or (cap if cap and cap < totals["total"] else None)),
        totals=(0, 0, 0),
        requests=max(totals["total"], len(requests)),
        notes=notes,
        date=_moment(found["start_time"]),
        stated=stated,
        unknown=("ttft", "itl") if rate else ("ttft", "itl", "queue"),
    )


def _guidellm_stated(found: Found, totals: Found) -> dict[str, float]:
    """Return counts and throughput of all requests where the file keeps a sample of them."""
    metrics, seconds = found["metrics"], found["duration"]
    return {
        "answered": totals["successful"],
        "failed": totals["errored"],
        "truncated": totals["incomplete"],
        "requests_per_s": totals["successful"] / seconds,
        "input_tokens_per_s": metrics["prompt_token_count"]["successful"]["total_sum"] / seconds,
        "output_tokens_per_s": metrics["output_token_count"]["successful"]["total_sum"] / seconds,
    }


def _guidellm_answer(number: int, status: str, found: Found, zero: float, due: float) -> Answer:
    timings, sent = found["info"]["timings"], found["request_start_time"]
    first, last = timings["first_token_iteration"], timings["last_token_iteration"]
    text = timings.get("first_output_token_iteration") or first  # the other may be a token of reasoning
    lost: State = "failed" if status == "errored" and first is None else "truncated"
    why = "guidellm ended the run" if status == "incomplete" else _first_line(found["info"]["error"] or "")
    return _answer(
        number,
        "answered" if status == "successful" else lost,
        sent - zero,
        done=found["request_end_time"] - zero,
        due=due - zero,
        ttft=None if first is None else first - sent,
        gaps=() if first is None or timings["token_iterations"] < 2 else (last - first,),
        ttft_text=None if text is None else text - sent,
        tokens=(found["prompt_tokens"], found["output_tokens"]),
        counted=found["output_metrics"].get("total_tokens") is not None,
        why="" if status == "successful" else why,
    )


# -- AIPerf


def _aiperf_records(objects: Sequence[Found], path: Path) -> list[Point]:
    """Read AIPerf's profile_export.jsonl, a line a request, and from the summary beside it what the lines do not say."""
    lines = [each for each in objects if each["metadata"]["benchmark_phase"] != "warmup"]
    lines.sort(key=lambda line: line["metadata"]["request_start_ns"])
    dues = [line["metadata"].get("credit_issued_ns") for line in lines]
    starts = [line["metadata"]["request_start_ns"] for line in lines]
    zero = min((due or start for due, start in zip(dues, starts)), default=0)
    answers = tuple(_aiperf_answer(number, line, zero) for number, line in enumerate(lines))
    beside = (path.with_name(f"{path.stem}_aiperf.json"), path.with_suffix(".json"))
    summary: Found = next(
        (each for file in beside if file.exists() for each in _objects(file) if "aiperf_version" in each), {}
    )
    notes = [f"measured with AIPerf; {_TEXT}"]
    if not summary:
        notes.append(f"the file says neither the model nor how requests arrived; {beside[0].name} beside it would")
    if len(lines) < len(objects):
        notes.append(f"without {counted(len(objects) - len(lines), 'request')} of its warm-up")
    server, arrivals, more = _aiperf_config(summary.get("input_config") or {})
    return [
        _point(
            server or path.stem,
            answers,
            arrivals=arrivals,
            totals=(0, 0, 0),
            notes=[*notes, *more, *_aiperf_incomplete(summary)],
            date=_moment(zero / 1e9) if lines else "",
            unknown=("ttft",) if all(dues) else ("ttft", "queue"),
        )
    ]


def _aiperf_answer(number: int, line: Found, zero: int) -> Answer:
    about, error = line["metadata"], line.get("error") or {}
    values = {name: each["value"] for name, each in line["metrics"].items()}
    ttft = _seconds(values.get("time_to_first_token"))
    text = _seconds(values.get("time_to_first_output_token"))  # the other may be a token of reasoning
    outputs = values.get("usage_completion_tokens")
    lost: State | None = "truncated" if about.get("was_cancelled") or (error and ttft) else "failed" if error else None
    sent = (about["request_start_ns"] - zero) / 1e9
    return _answer(
        number,
        lost or "answered",
        sent,
        done=(about["request_end_ns"] - zero) / 1e9,
        due=((about.get("credit_issued_ns") or about["request_start_ns"]) - zero) / 1e9,
        ttft=ttft,
        gaps=[gap / 1e3 for gap in values.get("inter_chunk_latency", ())],
        ttft_text=ttft if text is None else text,
        tokens=(
            values.get("usage_prompt_tokens", values.get("input_sequence_length")),
            values.get("output_sequence_length") if outputs is None else outputs,
        ),
        counted=outputs is not None,
        why=(_first_line(error.get("message") or "") or "AIPerf cancelled it") if lost else "",
        status=error.get("code"),
    )


def _aiperf_summary(objects: Sequence[Found], path: Path) -> list[Point]:
    """Read AIPerf's profile_export_aiperf.json, the figures of a run. Its inter-token latency is our tpot where it counted as many
    tokens as the server; its inter-chunk latency is our itl."""
    (found,) = objects

    def figure(name: str, which: str = "avg") -> Any:
        return found.get(name, {}).get(which)

    server, arrivals, more = _aiperf_config(found["input_config"])
    failed = figure("error_request_count") or 0
    answered = (figure("request_count") or 0) if failed else found["request_count"]["avg"]
    own, theirs = figure("output_sequence_length") or 0, figure("usage_completion_tokens")
    inputs, outputs = figure("usage_prompt_tokens") or figure("input_sequence_length") or 0, theirs or own
    notes = [f"measured with AIPerf; {_TEXT}", f"{_ALONE}; its profile_export.jsonl holds the answers", *more]
    taken = {
        "ttft_text": "time_to_first_output_token" if "time_to_first_output_token" in found else "time_to_first_token",
        "itl": "inter_chunk_latency",
        "e2e": "request_latency",
    }
    if theirs in (None, own):
        taken["tpot"] = "inter_token_latency"
    else:
        notes.append("its tokenizer counts other tokens than the server, so its time per token is left out")
    values = {f"{ours}_p{p}_ms": figure(name, f"p{p}") for ours, name in taken.items() for p in _PERCENTS}
    if rate := figure("request_throughput"):
        values |= {"requests_per_s": rate, "input_tokens_per_s": rate * inputs, "output_tokens_per_s": rate * outputs}
    return [
        _point(
            server or path.stem,
            (),
            arrivals=arrivals,
            totals=(answered, answered * inputs, answered * outputs),
            notes=[*notes, *_aiperf_incomplete(found)],
            date=str(found.get("start_time", "")).partition(".")[0],
            stated={name: value for name, value in values.items() if value is not None}
            | {"answered": answered, "failed": failed},
        )
    ]


def _aiperf_config(config: Found) -> tuple[str, tuple[Any, Any], list[str]]:
    """Return the model, rate and concurrency that a run was started with, of versions with phases and earlier ones, and notes."""
    if "loadgen" in config or "model_names" in config.get("endpoint", {}):
        load = config.get("loadgen") or {}
        return ", ".join(config["endpoint"]["model_names"]), (load.get("request_rate"), load.get("concurrency")), []
    server = ", ".join(model["name"] for model in config.get("models", {}).get("items", ()))
    phases = [phase for phase in config.get("phases", ()) if phase.get("kind") != "warmup"]
    if len(phases) != 1:
        return server, (None, None), ["requests arrived in several phases"] if phases else []
    (phase,) = phases
    even = phase["type"] not in ("concurrency", "poisson")
    notes = [f"requests arrived by AIPerf's schedule {phase['type']!r}, not as a Poisson process"] if even else []
    return server, (phase.get("rate"), phase.get("concurrency")), notes


def _aiperf_incomplete(summary: Found) -> list[str]:
    return [] if summary.get("is_complete", True) else [f"the run is incomplete: {summary.get('incomplete_reason')}"]


# -- what they share


def _answer(
    number: int,
    state: State,
    sent: float,
    *,
    done: float,
    due: float,
    ttft: float | None,
    gaps: Sequence[float],
    ttft_text: float | None,
    tokens: tuple[int | None, int | None],
    counted: bool = False,
    why: str = "",
    status: int | None = None,
) -> Answer:
    """Make an answer. sent, done, due: seconds since the first request; ttft, ttft_text: since sending, None where there is no
    chunk; gaps: between the chunks after the first, or one to the last where the others are unknown."""
    chunks = () if ttft is None else tuple(accumulate(gaps, initial=sent + ttft))
    inputs, outputs = tokens
    return Answer(
        number=number,
        due=round(due, 6),
        began=round(due, 6),
        sent=round(sent, 6),
        done=round(done, 6),
        state=state,
        why=why,
        chunks=tuple(round(chunk, 6) for chunk in chunks),
        text=None if ttft_text is None else round(sent + ttft_text, 6),
        input_tokens=inputs,
        output_tokens=outputs,
        counted=counted,
        status=status,
    )


def _point(
    server: str,
    answers: tuple[Answer, ...],
    *,
    arrivals: tuple[Any, int | None],
    totals: tuple[float, float, float],
    notes: Sequence[str],
    requests: int = 0,
    date: str = "",
    stated: Mapping[str, float] | None = None,
    unknown: Iterable[str] = (),
) -> Point:
    """Make a point. arrivals: the rate and how many at once; totals: answers, their input and output tokens, where there are no
    single ones; requests: how many there were, where not all are in the file."""
    whole, stated = measures.answered(answers), stated or {}
    at, most = arrivals
    rate = float(at) if isinstance(at, int | float) and 0 < at < math.inf else None
    if whole:
        totals = (len(whole), sum(a.input_tokens or 0 for a in whole), sum(a.output_tokens or 0 for a in whole))
    count, *tokens = totals
    means = [max(1, round(total / count)) if count else 1 for total in tokens]
    more = []
    if rate and most:
        more.append(f"at most {most} requests were under way at once")
    if not all(tokens):
        more.append("how many tokens were asked for and answered is not known: 1 stands for it")
    if silent := sum(not a.chunks for a in whole):
        more.append(f"{counted(silent, 'answer')} came in one piece, not as a stream, so no times are known of them")
    return Point(
        server,
        Workload(
            requests=requests
            or len(answers)
            or max(1, round(sum(stated.get(name, 0) for name in ("answered", "failed")))),
            input_tokens=means[0],
            output_tokens=means[1],
            rate=rate,
            concurrency=None if rate else most,
        ),
        answers,
        notes=(*notes, *more),
        date=date,
        stated=stated,
        unknown=(*unknown, "short"),
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _moment(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="seconds")


def _day(text: str) -> str:
    """Write 20251127-114522 as 2025-11-27T11:45:22; another text stays as it is."""
    try:
        return datetime.strptime(text, "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        return text


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:_SAID]


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[::-1]), "")[:_SAID]  # of a traceback, what was raised


@dataclass(frozen=True)
class Format:
    """A Format is one kind of result file. made: how its client writes it. keys: that its objects have and no other kind's."""

    client: str
    made: str
    keys: frozenset[str]
    read: Callable[[Sequence[Found], Path], list[Point]]


FORMATS = (
    Format("guidellm", "`guidellm run --output kind=json`", frozenset({"benchmarks"}), _guidellm),
    Format("AIPerf", "`aiperf profile`, its profile_export.jsonl", frozenset({"metadata", "metrics"}), _aiperf_records),
    Format(
        "AIPerf", "`aiperf profile`, its profile_export_aiperf.json", frozenset({"aiperf_version"}), _aiperf_summary
    ),
    Format(
        "SGLang",
        "`python -m sglang.bench_serving --output-file`",
        frozenset({"request_throughput", "total_output_tokens_retokenized"}),
        _sglang,
    ),
    Format("vLLM", "`vllm bench serve --save-result`", frozenset({"request_throughput"}), _vllm),
)


__all__ = ["FORMATS", "Format", "read"]
