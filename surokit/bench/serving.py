"""Measure transformers serve with a small decoder as it is and in 4 bits, a plan beside it; "client" is serve_bench's own delay, on
a server whose times are known (stub.py).

The raw result has every answer, with the time of each of its chunks.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.tables import markdown_table
from surokit.units import three_digits

if TYPE_CHECKING:
    from surokit.serving.served import ServeBench

FIRST_MS, EACH_MS = 50.0, 10.0  # of the stub
AT_ONCE = (1, 2, 4)
CLIENT_AT_ONCE, CLIENT_TOKENS = (16, 64, 256), 8
#: Requests, tokens in and out of each.
SIZES = {"33M": (48, 128, 32), "tiny": (4, 32, 4)}


def run(what: str = "server", model: str = "33M") -> dict[str, Any]:
    """Measure, and return the raw result. model: one of dissection's, for the server."""
    return _client(model == "tiny") if what == "client" else _server(model)


def _server(model: str) -> dict[str, Any]:
    import torch

    import surokit as sk
    from surokit import texts
    from surokit.bench.dissection import MODELS
    from surokit.environment import environment
    from surokit.serving.served import described

    words, fields, _ = MODELS[model]
    requests, inputs, outputs = SIZES[model]
    config = sk.DecoderConfig(**fields)
    tokenizer = sk.train_tokenizer(texts.SHAKESPEARE, vocab_size=1024)
    work = sk.Workload(requests=requests, input_tokens=inputs, output_tokens=outputs)
    works = work.concurrencies(*AT_ONCE)
    found = sk.ServeBench([])
    with tempfile.TemporaryDirectory() as own:
        place = Path(own)
        torch.manual_seed(0)
        sk.save(sk.Decoder(config, dtype=torch.bfloat16), place / "bf16")
        sk.save(sk.load(place / "bf16", device="cpu", recipe=sk.BF16.store(sk.QNF4)), place / "nf4")
        with sk.ServerProcess(_transformers(place / "hub"), environment=_environment(place / "hub")) as server:
            for name in ("bf16", "nf4"):
                tokenizer.save(place / name)
                found = found.add(sk.serve_bench(server.url, str(place / name), works, server=name))
    planned = sk.ServeBench([]).planned(sk.plan(config, gpu=sk.calibrate("cpu")), "planned, bf16", works)
    return {
        "benchmark": f"transformers serve: {words}, random weights, one thread; {inputs} tokens in, {outputs} out",
        "settings": {"requests a point": requests, "seed": work.seed},
        "environment": environment(),
        "serving": {
            "points": [
                {**described(point), "answers": [answer.line() for answer in point.answers]}
                for point in found.add(planned).points
            ]
        },
    }


def _transformers(hub: Path) -> list[str]:
    hub.mkdir()
    return [sys.executable, "-m", "transformers.cli.transformers", "serve", "--device", "cpu", "--port", "{port}"]


def _environment(hub: Path) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _client(is_short: bool) -> dict[str, Any]:
    import surokit as sk
    from surokit.environment import environment

    stub = [sys.executable, "-m", "surokit.bench.stub", "--port", "{port}"]
    rows = []
    with sk.ServerProcess([*stub, "--first-ms", str(FIRST_MS), "--each-ms", str(EACH_MS)]) as server:
        for at_once in CLIENT_AT_ONCE:
            requests = at_once if is_short else max(40 * at_once, 10_000 if at_once == CLIENT_AT_ONCE[-1] else 0)
            work = sk.Workload(requests=requests, input_tokens=20, output_tokens=CLIENT_TOKENS, concurrency=at_once)
            (point,) = sk.serve_bench(server.url, workload=work).points
            delay = point.delay
            assert delay is not None
            rows.append({"at_once": at_once, **point.row(), "cpu": delay.cpu, "late_p99_ms": delay.late_p99_ms})
    return {
        "benchmark": "serve_bench on a server whose times are known",
        "settings": {
            "first token after": f"{FIRST_MS:g} ms",
            "each other after": f"{EACH_MS:g} ms",
            "tokens": CLIENT_TOKENS,
        },
        "environment": environment(),
        "serving": {"client": rows},
    }


def found_in(data: Mapping[str, Any]) -> ServeBench:
    """Return the points of a raw result."""
    import surokit as sk
    from surokit.serving.served import point_of

    return sk.ServeBench(point_of(values, values["answers"]) for values in data["serving"]["points"])


def table(data: Mapping[str, Any]) -> str:
    """Make the table of a raw result in Markdown."""
    if "client" in data["serving"]:
        return _client_table(data)
    if "clients" in data["serving"]:
        return _clients_table(data)
    header = (
        "server",
        "arrivals",
        "answered",
        "requests/s",
        "tokens/s",
        "TTFT p50, ms",
        "p99",
        "TPOT p50, ms",
        "p99",
        "e2e p50, ms",
    )
    rows = []
    for point in found_in(data).points:
        said = point.throughput()
        spreads = (("ttft", 0.5), ("ttft", 0.99), ("tpot", 0.5), ("tpot", 0.99), ("e2e", 0.5))
        rows.append(
            (
                point.server,
                point.workload.name,
                f"{point.count('answered')}",
                three_digits(said["requests_per_s"]),
                three_digits(said["output_tokens_per_s"]),
                *(three_digits(point.spread(name, q).mid) for name, q in spreads),
            )
        )
    return _markdown(data, header, rows, 2)


def _client_table(data: Mapping[str, Any]) -> str:
    header = (
        "at once",
        "requests",
        "requests/s",
        "a core",
        "TTFT beyond 50 ms, p50 / p99",
        "TPOT beyond 10 ms, p50 / p99",
        "late by, p99 of looks",
    )
    rows = [
        (
            f"{row['at_once']}",
            f"{row['answered']:,}",
            three_digits(row["requests_per_s"]),
            three_digits(row["requests_per_s"] / row["cpu"]),
            *(
                " / ".join(f"{row[f'{name}_p{q}_ms'] - ms:.2f}" for q in (50, 99))
                for name, ms in (("ttft", FIRST_MS), ("tpot", EACH_MS))
            ),
            f"{row['late_p99_ms']:.1f} ms",
        )
        for row in data["serving"]["client"]
    ]
    return _markdown(data, header, rows, 2)


def _clients_table(data: Mapping[str, Any]) -> str:
    """Make the table of several clients before one server, a column a client: of each figure the median and the range of rounds."""
    from statistics import median

    clients = data["serving"]["clients"]
    names = next(iter(clients.values()))[0]

    def cell(client: str, name: str) -> str:
        found = [row[name] for row in clients[client]]
        return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    rows = [(name, *(cell(client, name) for client in clients)) for name in names]
    return _markdown(data, ("figure", *clients), rows, 1)


def _markdown(data: Mapping[str, Any], header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Make the table and its footer; the first columns, `words` of them, are no numbers."""
    from surokit.bench.result import footer

    return "\n".join([markdown_table(rows, header=header, right=range(words, len(header))), "", footer(data)])


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Draw the distributions of a raw result."""
    from surokit.bench.result import save_picture

    save_picture(found_in(data).plot(), path, digest(data))


def digest(data: Mapping[str, Any]) -> str:
    """Return the fingerprint of what the picture shows."""
    from surokit.bench.result import fingerprint

    return fingerprint(data["serving"]["points"])
