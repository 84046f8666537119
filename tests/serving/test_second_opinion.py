"""Another client measures the same server: guidellm's own, on guidellm's mock server, whose times are fixed.

guidellm lies beside the environment, where `make test-guidellm` puts it. With the same PYTHONPATH, the raw file is made by hand:

    python -m tests.serving.test_second_opinion docs/measurements/serving-second-opinion.json
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

import pytest

import surokit as sk
from surokit.bench.result import write
from surokit.environment import environment
from surokit.serving.measures import duration_s, e2e_ms
from surokit.serving.prompts import WORDS, texts
from surokit.serving.starting import ServerProcess

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        find_spec("guidellm") is None, reason="guidellm is not on the path: `make test-guidellm` installs it apart"
    ),
]

TTFT_MS, ITL_MS, TOKENS, REQUESTS, STREAMS, ROUNDS = 200, 20, 64, 40, 4, 3
# The server's Python collects what it has loaded some 45 requests after its start, and stands still for a quarter of a second:
# either client sees it.
UNINTERRUPTED = "import gc, runpy; gc.disable(); runpy.run_module('guidellm', run_name='__main__')"
MOCK = ["mock-server", "--ttft-ms", str(TTFT_MS), "--ttft-ms-std", "0", "--itl-ms", str(ITL_MS), "--itl-ms-std", "0"]
PROMPTS = tuple(texts(WORDS, [TOKENS] * REQUESTS))
WORK = sk.Workload(
    requests=REQUESTS, input_tokens=TOKENS, output_tokens=TOKENS, concurrency=STREAMS, prompts=PROMPTS, seed=0
)
ALONE = {  # one process that asks, as ours is; nothing is looked for at Hugging Face
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

# Where guidellm 0.8.1 differs, by its source:
# - `inter_token_latency_ms` is our tpot, one number a request (schemas/base/request_stats.py); it keeps no times between chunks, so
#   our itl has nothing beside it. `time_per_output_token_ms` has the first token in it: up to the last token, over all tokens.
# - A token is a chunk with text, so the last one comes before the empty chunk with the reason, which our e2e and tpot end in, as
#   vLLM's do; the mock server sends both at once.
# - A request begins with the first byte of its head, ours before it has a connection, and ends behind [DONE], ours with the last
#   chunk that has a choice (backends/openai/http.py): parts of a millisecond.
# - Requests/s are answers over the time from the first request's start to the last one's end, as ours are. But an answer goes
#   through queues to another process before the next request is sent (scheduler/worker.py): a place is empty for 4 to 10 ms then,
#   with ours for 0 to 1 ms (`between_ms`), and its first requests wait some 20 ms longer for the first token. So its load is
#   lower, and its requests/s by up to 1 %.
FIGURES = {
    "requests_per_s": "requests_per_second",
    "output_tokens_per_s": "output_tokens_per_second",
    "ttft_p50_ms": "time_to_first_token_ms",
    "tpot_p50_ms": "inter_token_latency_ms",
    "e2e_per_token_p50_ms": "time_per_output_token_ms",
    "e2e_p50_ms": "request_latency",
}
TOLERANCE = 0.02


def ours(url):
    (point,) = sk.serve_bench(url, workload=WORK).points
    assert point.count("answered") == REQUESTS
    assert point.short == 0
    e2e = e2e_ms(point.answers)
    row = {**point.row(), "e2e_per_token_p50_ms": median(e2e / [a.output_tokens for a in point.answers])}
    return {name: float(row[name]) for name in FIGURES} | between(duration_s(point.answers), e2e.tolist())


def theirs(url, folder):
    prompts, out = folder / "prompts.jsonl", folder / "found.json"
    prompts.write_text("".join(json.dumps({"prompt": p, "output_tokens_count": TOKENS}) + "\n" for p in PROMPTS))
    guidellm(
        "run",
        "--backend",
        f"kind=openai_http,target={url.removesuffix('/v1')},request_format=/v1/completions,http2=false",
        *("--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={out}", "--disable-console"),
        folder=folder,
    )
    (found,) = json.loads(out.read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {
        "successful": REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": REQUESTS,
    }
    requests = found["requests"]["successful"]
    assert {each["output_tokens"] for each in requests} == {TOKENS}
    figures = {}
    for name, key in FIGURES.items():
        of = found["metrics"][key]["successful"]
        figures[name] = of["percentiles"]["p50"] if "p50" in name else of["mean"]
    figures["e2e_p50_ms"] *= 1e3  # it has that in seconds
    return figures | between(found["duration"], [1e3 * each["request_latency"] for each in requests])


def between(seconds, e2e):
    """Returns what a place is empty between two requests, in the mean."""
    return {"between_ms": 1e3 * seconds * STREAMS / REQUESTS - fmean(e2e)}


def guidellm(*words, folder):
    settings = {**os.environ, **ALONE, "HF_HOME": str(folder)}
    ended = subprocess.run([sys.executable, "-m", "guidellm", *words], env=settings, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout[-1000:]}{ended.stderr[-3000:]}"


def measured(folder):
    """Returns the figures of both clients, a list of rounds each, which took turns."""
    command = [sys.executable, "-c", UNINTERRUPTED, *MOCK, "--port", "{port}"]
    clients: dict[str, list[dict[str, float]]] = {"surokit": [], "guidellm": []}
    with ServerProcess(command, environment={**ALONE, "HF_HOME": str(folder)}, log=folder / "log.txt") as server:
        for _ in range(ROUNDS):
            clients["surokit"].append(ours(server.url))
            clients["guidellm"].append(theirs(server.url, folder))
    return {
        "benchmark": "guidellm's mock server, measured by surokit and by guidellm in turns",
        "settings": {
            "time to first token ms": TTFT_MS,
            "between tokens ms": ITL_MS,
            "requests": REQUESTS,
            "at once": STREAMS,
            "output tokens": TOKENS,
            "rounds": ROUNDS,
        },
        "environment": {**environment(), "guidellm": version("guidellm")},
        "serving": {"clients": clients},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("guidellm"))["serving"]["clients"]


@pytest.mark.parametrize("name", FIGURES)
def test_another_client_finds_the_same(found, name):
    """Of each the best round: what else the machine does makes times longer and rates lower."""
    best = min if name.endswith("_ms") else max
    mine, other = (best(each[name] for each in found[client]) for client in ("surokit", "guidellm"))
    assert mine == pytest.approx(other, rel=TOLERANCE), found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        write(measured(Path(place)), Path(sys.argv[1]))
