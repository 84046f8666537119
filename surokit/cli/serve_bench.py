"""Run `surokit serve-bench`: the arguments of `sk.serve_bench` and `sk.Workload` under their own names."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from surokit import units
from surokit.cli.options import add_with_examples, check_picture, number

if TYPE_CHECKING:
    from surokit.serving.served import ServeBench
    from surokit.serving.workload import Workload

_EXAMPLES = """\
examples:
  surokit serve-bench http://127.0.0.1:8000/v1                            1000 requests of 512 tokens in one burst
  surokit serve-bench http://127.0.0.1:8000/v1 --rate 1 2 4 8 --limits ttft=500 tpot=50 --folder runs/vllm
  surokit serve-bench --start "vllm serve Qwen/Qwen3-8B --port {port}" --concurrency 1 8 64 --beside runs/sglang theirs.json"""


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    bench = add_with_examples(
        commands,
        "serve-bench",
        help="throughput and latencies of a server with OpenAI's HTTP interface",
        examples=_EXAMPLES,
    )
    bench.add_argument(
        "url", metavar="URL", nargs="?", help="of the interface; without it --start says how it is started"
    )
    bench.add_argument(
        "--start", metavar="COMMAND", help='starts the server, and ends it: "{port}" becomes a free port'
    )
    bench.add_argument("--model", metavar="NAME", help="as the server names it; the only one that it has")
    bench.add_argument("--server", metavar="NAME", default="", help="its name in the table (its address)")
    bench.add_argument("--requests", type=int, default=1000, metavar="N", help="(1000)")
    bench.add_argument("--input-tokens", type=int, default=512, metavar="N", help="of each prompt (512)")
    bench.add_argument("--output-tokens", type=int, default=128, metavar="N", help="of each answer (128)")
    arrivals = bench.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--rate", type=number, nargs="+", metavar="N", help="requests that arrive a second; several are a sweep"
    )
    arrivals.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N", help="requests at once; several are a sweep"
    )
    bench.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="your own prompts, one a line, sent in turn, instead of --input-tokens",
    )
    bench.add_argument("--chat", action="store_true", help="messages to chat/completions, not texts to completions")
    bench.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of arrivals and, with the time, of prompts (0)"
    )
    bench.add_argument(
        "--connections", type=int, default=1024, metavar="N", help="at most so many requests at once (1024)"
    )
    bench.add_argument("--stall-s", type=number, default=60, metavar="N", help="seconds without a byte (60)")
    bench.add_argument("--limit-s", type=number, default=600, metavar="N", help="seconds of a whole request (600)")
    bench.add_argument("--folder", type=Path, help="keep every answer there; a second call goes on with the rest")
    bench.add_argument(
        "--beside", nargs="+", default=(), metavar="PATH", help="folders, or files of other clients, in the same table"
    )
    bench.add_argument(
        "--limits", nargs="+", default=(), metavar="NAME=MS", help="of a good answer: ttft=500 tpot=50 e2e=5000"
    )
    bench.add_argument("--usd-per-hour", type=number, metavar="N", help="price of the server")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="the distributions: .png, .svg or .pdf")
    bench.add_argument("--plot-sweep", type=Path, metavar="FILE", help="throughput and latencies over the sweep")
    bench.add_argument("--csv", type=Path, metavar="FILE", help="the whole table with its intervals")
    bench.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure a server and print the table beside that of others: 130 where an interrupt left workloads out."""
    import surokit as sk
    from surokit.serving.measures import check_limits

    if (arguments.url is None) == (arguments.start is None):
        raise ValueError(
            "serve-bench: give the address of a server that runs, or --start with the line that starts one."
        )
    check_picture(arguments.plot)
    check_picture(arguments.plot_sweep)
    limits = dict(map(_limit, arguments.limits))
    check_limits(limits)  # before anything is measured
    named = ("requests", "input_tokens", "output_tokens", "chat", "seed")
    if arguments.csv is not None and not arguments.csv.parent.is_dir():
        raise ValueError(f"--csv {arguments.csv}: there is no folder {arguments.csv.parent}.")
    prompts = () if arguments.prompts is None else tuple(filter(None, arguments.prompts.read_text().splitlines()))
    if arguments.prompts is not None and not prompts:
        raise ValueError(f"--prompts {arguments.prompts}: the file has no lines with text.")
    work = sk.Workload(**{name: getattr(arguments, name) for name in named}, prompts=prompts)
    works = [work]
    if arguments.rate or arguments.concurrency:
        works = work.rates(*arguments.rate) if arguments.rate else work.concurrencies(*arguments.concurrency)
    others = [sk.ServeBench.load(path) for path in arguments.beside]
    given = {
        name: getattr(arguments, name) for name in ("model", "server", "folder", "connections", "stall_s", "limit_s")
    }
    if not arguments.server:
        # of a server that is started the port is another one each time
        line = arguments.start and shlex.split(arguments.start)
        given["server"] = Path(line[0]).name if line else urlsplit(arguments.url or "").netloc
    _check_names(given["server"], works, list(zip(arguments.beside, others)))
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(sk.ServerProcess(arguments.start)).url
        found = sk.serve_bench(url, workload=works, **given)
    measured = [point.workload for point in found.points]
    if others:
        print(found)  # it is measured, whatever the others are
    for other in others:
        found = found.add(other)
    print(found)
    for name, share in found.goodput(**limits).items() if limits else ():
        print(f"  {name}: {share:.1%} of the requests within {', '.join(arguments.limits)} ms")
    for name, usd in found.cost(arguments.usd_per_hour).items() if arguments.usd_per_hour else ():
        print(f"  {name}: {units.value(usd, 'USD')} for a million output tokens")
    if (kept := found.saturation(found.points[0].server)) and len(measured) > 1:
        print(f"  {kept.name}: the last point that the server keeps up with")
    whole = all(work in measured for work in works)
    if arguments.csv is not None:
        found.table().to_csv(arguments.csv, index=False)
    if arguments.plot is not None:
        found.plot().savefig(arguments.plot, dpi=150)
    if arguments.plot_sweep is not None and (whole or len(measured) > 1):
        found.plot_sweep().savefig(arguments.plot_sweep, dpi=150)
    return 0 if whole else 130


def _check_names(server: str, works: list[Workload], beside: list[tuple[str, ServeBench]]) -> None:
    """Raise ValueError, before anything is measured, where two points would have one name and workload in the table."""
    there = {(server, work) for work in works}
    for path, other in beside:
        for point in other.points:
            if (point.server, point.workload) in there:
                raise ValueError(
                    f"--beside {path}: its point of {point.server!r} under {point.workload.name} would be there twice: give the "
                    "server another name with --server, or leave the path out."
                )
        there.update((point.server, point.workload) for point in other.points)


def _limit(text: str) -> tuple[str, float]:
    """Read a limit in milliseconds, as in ttft=500."""
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--limits {text!r}: write a time and its milliseconds, as in ttft=500.") from None
