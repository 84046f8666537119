"""Run the command line, `surokit doctor | plan | race | reproduce | dissect | serve-bench | watch | launch | export | quickstart`:
each is the function of that name.

A user's error prints one line to stderr and exits with 2; a failing notebook exits with 1, an interrupt or a stop with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import math
import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from surokit import units

if TYPE_CHECKING:
    from surokit.planner.inverse.recipe_choice import RecipeChoice
    from surokit.planner.planning import Plan
    from surokit.racing.comparability import Difference
    from surokit.racing.reproduced import Reproduction
    from surokit.recipe import Init, Recipe


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaint on one line, and about a command's options from that command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


class _UsageError(ValueError):
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    try:
        arguments = make_parser().parse_args(argv)
        arguments.argv = list(sys.argv[1:] if argv is None else argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough, as in `surokit plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"surokit: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("surokit: interrupted", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    import surokit

    parser = _Parser(prog="surokit", description="Train, watch and compare low-precision recipes.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"surokit {surokit.__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="doctor | plan | race | reproduce | dissect | serve-bench | watch | launch | export | quickstart",
    )

    doctor = commands.add_parser("doctor", help="what this machine has, which formats are native, what is missing")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    doctor.set_defaults(run=_doctor)

    plan = commands.add_parser(
        "plan",
        help="FLOPs, time, cost and memory of a run",
        usage="surokit plan what [--recipe NAME] [--batch N] [--length N] [--gpu NAME] [--tokens N] [...]",
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_plan(plan)

    _add_race(commands.add_parser("race", help="race recipes on this machine, in turns", allow_abbrev=False))

    reproduce = commands.add_parser(
        "reproduce",
        help="run a race or a study again from its folder, and say which figures come out as it says",
        allow_abbrev=False,
    )
    reproduce.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="of a race that `surokit race` has run; or the study's evidence.json",
    )
    reproduce.add_argument("--minutes", type=float, help="for a study: run again what fits (default 60)")
    reproduce.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="for a study: runs whose names contain this, and those they are compared with",
    )
    reproduce.add_argument("--run-dir", type=Path, metavar="FOLDER", help="keep what is run again there")
    reproduce.set_defaults(run=_reproduce)

    _add_dissect(
        commands.add_parser(
            "dissect",
            help="what each optimization of a step brings, alone and together",
            epilog=_DISSECT_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
    )

    _add_serve_bench(
        commands.add_parser(
            "serve-bench",
            help="throughput and latencies of a server with OpenAI's HTTP interface",
            epilog=_SERVE_BENCH_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
    )

    watch = commands.add_parser(
        "watch",
        help="follow runs from their folders until they end; a folder may come later; Ctrl-C ends the watching only",
    )
    watch.add_argument("folders", nargs="+", metavar="FOLDER", help="the run_dir of a run, or a folder of some")
    watch.set_defaults(run=_watch)

    launch = commands.add_parser(
        "launch",
        help="run a script in several processes of this machine, one for each GPU; several machines are torchrun's",
        usage="surokit launch [--gpus N] [--restarts N] [--hang SECONDS] [--output all|first|none] SCRIPT [ARGUMENT ...]\n"
        "       surokit launch [...] -m MODULE [ARGUMENT ...]",
        allow_abbrev=False,
    )
    launch.add_argument("--gpus", type=int, help="how many processes; all GPUs of this machine where it is not given")
    launch.add_argument("--restarts", type=int, default=0, help="how often all start anew after one has failed")
    launch.add_argument(
        "--hang", type=float, default=600.0, metavar="SECONDS", help="in which a session's run makes a step"
    )
    launch.add_argument("--output", choices=("all", "first", "none"), default="all", help="whose lines are shown")
    launch.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name")
    launch.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT")
    launch.set_defaults(run=_launch)
    export = commands.add_parser("export", help="make a Hugging Face folder, or an adapter's, of a run's checkpoint")
    export.add_argument("source", metavar="RUN", help="the run_dir of a run, or one checkpoint in it")
    export.add_argument("folder", metavar="FOLDER", help="the folder to write")
    export.add_argument("--base", help="name or folder of the model that an adapter belongs to")
    export.set_defaults(run=_export)

    quickstart = commands.add_parser("quickstart", help="run the quickstart notebook headless and keep what it made")
    quickstart.add_argument(
        "--run-dir", type=Path, default=Path("runs/quickstart"), help="folder; the next free name if taken"
    )
    quickstart.set_defaults(run=_quickstart)
    return parser


_PLAN_EXAMPLES = """\
examples:
  surokit plan Qwen/Qwen3-8B --recipe qfp8 --batch 2 --length 2048 --gpu H100        does it fit, how long is a step
  surokit plan 405e9 --tokens 15.6e12 --gpus 16000 --gpu H100 --mfu 0.4               how long is a run
  surokit plan my/model --batch 2 --length 2048 --gpu H100 --recipes                  which recipe

What a note calls batch= is --batch here. What is not given is left out, and a note says what to give."""


def _add_plan(plan: argparse.ArgumentParser) -> None:
    """The arguments of `sk.plan` under their own names, and the questions that a plan answers."""
    plan.add_argument(
        "what",
        help="number of parameters (405e9), a folder or config.json, or a model of the Hub (org/name)",
    )
    given = plan.add_argument_group("arguments of the plan")
    for name, text in {
        "--tokens": "tokens of the whole run",
        "--gpus": "number of GPUs",
        "--tflops-per-gpu": "achieved TFLOPS of one GPU",
        "--mfu": "or its share of the dense BF16 peak",
        "--goodput": "share of the hours that makes progress (1)",
        "--batch": "sequences of a micro-batch, on each GPU, or on those that share a model",
        "--length": "tokens of a sequence",
        "--accumulate": "micro-batches a step (1)",
        "--recompute-blocks": "blocks that backward computes again (all, with --recompute)",
        "--zero": "ZeRO stage over the GPUs, 0 to 3 (0)",
        "--tensor-parallel": "GPUs that share each layer, and the tokens between its products (1)",
        "--pipeline-parallel": "stages of layers, in the order 1F1B (1)",
        "--virtual-stages": "parts of a stage's layers that take turns (1)",
        "--expert-parallel": "GPUs that each have a part of the experts (1)",
        "--slack": "share of memory on top, for fragmentation and workspace (0.1)",
        "--between-gb-s": "GB/s that one GPU has between nodes, one direction",
    }.items():
        given.add_argument(name, type=_number, help=text, metavar="N")
    given.add_argument("--usd-per-gpu-hour", type=_price, metavar="USD", help="price, or a range such as 1.8-3.2")
    for name, text in {
        "--gpu": "name in the hardware table, such as H100",
        "--recipe": "name of a recipe, such as fp8 or qfp8 (nothing is quantized)",
        "--attention": "counts the keys that a token sees, or all: causal or full (causal)",
        "--recompute": "what backward computes again: none, selective, mlp or full (none)",
        "--optimizer": "adamw, adamw8bit, muon, zenflow, offloadadamw or sgd (adamw)",
        "--state-dtype": "dtype of the optimizer's moments (the weights' own)",
        "--dtype": "dtype of weights and gradients: bf16, fp16 or fp32 (bf16)",
        "--logits": "fused with the loss, or whole (as the layers do)",
        "--layers": "whose layers compute: surokit or transformers (surokit, where it has them)",
        "--fusion": "operations computed together, as sk.fuse does: none or fused (none)",
        "--engine": "who makes the kernels, for times: eager, compiled or fused (fused with --fusion, else eager)",
        "--attention-kernel": "who computes attention, for times: sdpa, flash3 or triton (as the engine has it)",
        "--transposed": "W' of frozen quantized weights, with --fusion fused: cached, or 'on the fly'",
    }.items():
        given.add_argument(name, metavar="NAME", help=text)
    given.add_argument("--lora", type=_number, metavar="RANK", help="train an adapter of this rank; the rest is frozen")
    given.add_argument("--graphs", action="store_true", default=None, help="a step captured as CUDA graphs")
    given.add_argument("--master", action="store_true", default=None, help="float32 masters of the weights")
    given.add_argument("--offload-weights", action="store_true", default=None, help="weights of blocks on the host")
    on_host = "activations on the host, or only the inputs of blocks"
    given.add_argument("--offload-activations", nargs="?", const=True, choices=["inputs"], help=on_host)
    states = "the optimizer's states on the host, where the GPU reads them (paged optimizers)"
    given.add_argument("--offload-states", action="store_true", default=None, help=states)
    in_backward = "each weight is updated as its gradient arrives"
    given.add_argument("--optimizer-in-backward", action="store_true", default=None, help=in_backward)
    given.add_argument(
        "--inference", dest="training", action="store_false", default=None, help="a forward pass and its KV cache"
    )
    asked = plan.add_argument_group("questions")
    asked.add_argument(
        "--fits", type=_number, metavar="GIB", help="does it fit in so many GiB? These questions take it for the GPU's"
    )
    asked.add_argument(
        "--recipes",
        action="store_true",
        help="the same run in every recipe: time, memory, native or not; with --fitting as it is made to fit",
    )
    asked.add_argument("--fitting", action="store_true", help="what would make it fit, and what each remedy costs")
    asked.add_argument(
        "--faster", action="store_true", help="what would make a step faster, and what memory that takes"
    )
    asked.add_argument(
        "--host-gib",
        type=_number,
        metavar="GIB",
        help="the host's memory for each GPU, for --fitting and --faster (256)",
    )
    asked.add_argument("--largest", choices=("batch", "length", "layers", "parameters"), help="the largest that fits")
    asked.add_argument("--days", type=_number, metavar="N", help="how many GPUs are done in so many days?")
    asked.add_argument(
        "--serving",
        type=_number,
        nargs=2,
        metavar=("IN", "OUT"),
        help="how fast are requests of so many tokens served (512 128)?",
    )
    asked.add_argument("--concurrency", type=_number, metavar="N", help="sequences served at once (as many as fit)")
    asked.add_argument("--plot", type=Path, metavar="FILE", help="memory as a picture: .png, .svg or .pdf")
    asked.add_argument("--all", action="store_true", help="every figure, how it is known, and the notes")
    asked.add_argument("--json", action="store_true", help="the same as JSON")
    plan.set_defaults(run=_plan)


def _add_race(race: argparse.ArgumentParser) -> None:
    """Arguments of `sk.race` under their own names, and a model and a text where none is given."""
    race.add_argument("--recipes", nargs="+", default=["bf16", "fp8"], metavar="NAME", help="the first is the baseline")
    race.add_argument("--lora", type=_number, metavar="RANK", help="train an adapter over every recipe's frozen base")
    race.add_argument(
        "--lora-init",
        choices=("kaiming", "loftq"),
        help="how adapters begin: kaiming, or over stored weights with their quantization error (kaiming)",
    )
    race.add_argument(
        "--model", metavar="FOLDER", help="a folder or a model of the Hub; a small one of its own without"
    )
    race.add_argument("--text", metavar="FILE", help="what to train on; a built-in text without")
    for name, what in {
        "--minutes": "of the race, after its warm-up; 1 without --steps",
        "--steps": "of each run",
        "--batch": "sequences a batch (8)",
        "--length": "tokens a sequence (128)",
        "--accumulate": "batches a step (1)",
        "--layers": "of a model of its own (4)",
        "--width": "of a model of its own (128)",
        "--lr": "learning rate (1e-3)",
        "--seed": "of everything that is drawn (0)",
        "--turn-s": "seconds of a turn",
        "--target-loss": "time to this loss is told",
        "--until": "held-out loss that every run trains to",
        "--usd-per-gpu-hour": "price",
    }.items():
        race.add_argument(name, type=_number, help=what, metavar="N")
    race.add_argument("--no-control", dest="control", action="store_false", help="without the baseline's twin")
    race.add_argument("--run-dir", type=Path, metavar="FOLDER", help="keep everything there, to be run again")
    race.add_argument("--plot", type=Path, metavar="FILE", help="the picture: .png, .svg or .pdf")
    race.set_defaults(run=_race)


_DISSECT_EXAMPLES = """\
examples:
  surokit dissect config.json --batch 2 --length 350 --what tune
  surokit dissect my/model --over attention=math,flash recompute=none,full batch=1,2,largest --folder runs/server-a
  surokit dissect config.json --what infer --over recipe=bf16,qfp8,qnf4 --report report"""


def _add_dissect(dissect: argparse.ArgumentParser) -> None:
    """Arguments of `sk.dissect` under their own names."""
    dissect.add_argument(
        "model", metavar="CONFIG", help="a config.json (random weights), a folder or a model of the Hub"
    )
    dissect.add_argument("--what", choices=("train", "tune", "infer"), default="train", help="(train)")
    for name, (value, what) in {
        "--batch": (2, "sequences of a batch (2)"),
        "--length": (350, "tokens of a sequence (350)"),
        "--steps": (10, "that are timed in each cell and round (10)"),
        "--rounds": (5, "of all cells in turn (5); with fewer there is no interval"),
        "--seed": (0, "of everything that is drawn (0)"),
        "--limit-s": (600, "seconds that a cell may take in a round (600)"),
        "--gib": (None, "memory that a cell may take (the device's)"),
        "--lr": (3e-4, "learning rate (3e-4)"),
    }.items():
        dissect.add_argument(name, type=_number, default=value, help=what, metavar="N")
    dissect.add_argument(
        "--over",
        nargs="+",
        default=None,
        metavar="SWITCH=VALUES",
        help="separated by commas, the first is the baseline's",
    )
    dissect.add_argument(
        "--together",
        choices=("no", "last", "all"),
        default="last",
        help="cells of several switches (one, the last values)",
    )
    dissect.add_argument("--device", metavar="NAME", help="cuda or cpu; a GPU where there is one")
    dissect.add_argument("--folder", type=Path, help="keep the cells there; a second call goes on")
    dissect.add_argument("--plot", type=Path, metavar="FILE", help="the picture: .png, .svg or .pdf")
    dissect.add_argument("--report", type=Path, metavar="FOLDER", help="write a report in Markdown")
    dissect.set_defaults(run=_dissect)


def _dissect(arguments: argparse.Namespace) -> int:
    import surokit as sk

    _check_picture(arguments.plot)
    over = None if arguments.over is None else dict(map(_switch, arguments.over))
    named = ("what", "steps", "rounds", "seed", "limit_s", "gib", "lr", "device", "folder")
    given = {name: getattr(arguments, name) for name in named}
    together: Any = {"no": False, "last": True, "all": "all"}[arguments.together]
    found = sk.dissect(arguments.model, (arguments.batch, arguments.length), over=over, together=together, **given)
    print(found)
    if arguments.plot is not None:
        found.plot().savefig(arguments.plot, dpi=150)
    if arguments.report is not None:
        print(f"report: {found.report(arguments.report)}")
    return 0


_SERVE_BENCH_EXAMPLES = """\
examples:
  surokit serve-bench http://127.0.0.1:8000/v1                            1000 requests of 512 tokens in one burst
  surokit serve-bench http://127.0.0.1:8000/v1 --rate 1 2 4 8 --limits ttft=500 tpot=50 --folder runs/vllm
  surokit serve-bench --start "vllm serve Qwen/Qwen3-8B --port {port}" --concurrency 1 8 64 --beside runs/sglang theirs.json"""


def _add_serve_bench(bench: argparse.ArgumentParser) -> None:
    """Arguments of `sk.serve_bench` and `sk.Workload` under their own names."""
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
        "--rate", type=_number, nargs="+", metavar="N", help="requests that arrive a second; several are a sweep"
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
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (0)")
    bench.add_argument(
        "--connections", type=int, default=1024, metavar="N", help="at most so many requests at once (1024)"
    )
    bench.add_argument("--stall-s", type=_number, default=60, metavar="N", help="seconds without a byte (60)")
    bench.add_argument("--limit-s", type=_number, default=600, metavar="N", help="seconds of a whole request (600)")
    bench.add_argument("--folder", type=Path, help="keep every answer there; a second call goes on with the rest")
    bench.add_argument(
        "--beside", nargs="+", default=(), metavar="PATH", help="folders, or files of other clients, in the same table"
    )
    bench.add_argument(
        "--limits", nargs="+", default=(), metavar="NAME=MS", help="of a good answer: ttft=500 tpot=50 e2e=5000"
    )
    bench.add_argument("--usd-per-hour", type=_number, metavar="N", help="price of the server")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="the distributions: .png, .svg or .pdf")
    bench.add_argument("--plot-sweep", type=Path, metavar="FILE", help="throughput and latencies over the sweep")
    bench.add_argument("--csv", type=Path, metavar="FILE", help="the whole table with its intervals")
    bench.set_defaults(run=_serve_bench)


def _serve_bench(arguments: argparse.Namespace) -> int:
    import surokit as sk
    from surokit.serving.measures import check_limits

    if (arguments.url is None) == (arguments.start is None):
        raise ValueError(
            "serve-bench: give the address of a server that runs, or --start with the line that starts one."
        )
    _check_picture(arguments.plot)
    _check_picture(arguments.plot_sweep)
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
    if arguments.start is not None and not arguments.server:
        given["server"] = Path(shlex.split(arguments.start)[0]).name  # its port is another one each time
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(sk.ServerProcess(arguments.start)).url
        found = sk.serve_bench(url, workload=works, **given)
    if others:
        print(found)  # it is measured, whatever the others are
    for other in others:
        found = found.add(other)
    print(found)
    for name, share in found.goodput(**limits).items() if limits else ():
        print(f"  {name}: {share:.1%} of the requests within {', '.join(arguments.limits)} ms")
    for name, usd in found.cost(arguments.usd_per_hour).items() if arguments.usd_per_hour else ():
        print(f"  {name}: {units.value(usd, 'USD')} for a million output tokens")
    if (kept := found.saturation(found.points[0].server)) and len(works) > 1:
        print(f"  {kept.name}: the last point that the server keeps up with")
    if arguments.plot is not None:
        found.plot().savefig(arguments.plot, dpi=150)
    if arguments.plot_sweep is not None:
        found.plot_sweep().savefig(arguments.plot_sweep, dpi=150)
    if arguments.csv is not None:
        found.table().to_csv(arguments.csv, index=False)
    return 0


def _limit(text: str) -> tuple[str, float]:
    """Read a limit in milliseconds, as in ttft=500."""
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--limits {text!r}: write a time and its milliseconds, as in ttft=500.") from None


def _switch(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read a switch and its values, as in recompute=none,full."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ValueError(f"--over {text!r}: write a switch and its values, as in recompute=none,full.")
    return name, tuple(map(_value, values.split(",")))


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdigit() else text


def _race(arguments: argparse.Namespace) -> int:
    import torch

    import surokit as sk
    from surokit import texts
    from surokit.recipe import find_recipe

    _check_names(arguments.recipes)
    _check_picture(arguments.plot)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    lr, seed, length = given.get("lr", 1e-3), given.get("seed", 0), given.get("length", 128)
    recipes = {name: find_recipe(name) for name in arguments.recipes}
    if arguments.lora is not None or arguments.lora_init is not None:
        recipes = _with_adapters(recipes, arguments.lora, arguments.lora_init)
    if arguments.model is not None:
        model = sk.load(arguments.model, dtype=torch.bfloat16, device=None)
        tokenizer = sk.load_tokenizer(arguments.model)
    else:
        width, layers = given.get("width", 128), given.get("layers", 4)
        tokenizer = sk.train_tokenizer(arguments.text or texts.SHAKESPEARE, vocab_size=1024)
        shape = {"heads": max(1, width // 32), "kv_heads": max(1, width // 64), "ffn": 3 * width, "vocab": 1024}
        torch.manual_seed(seed)
        config = sk.DecoderConfig(layers=layers, width=width, max_length=length, **shape)
        model = sk.Decoder(config, dtype=torch.bfloat16).to("cuda" if torch.cuda.is_available() else "cpu")
    source = arguments.text or texts.SHAKESPEARE
    train, held_out = sk.text(source, tokenizer, length=length, batch=given.get("batch", 8), seed=seed).split(
        held_out=0.01
    )
    named = (
        "minutes",
        "steps",
        "accumulate",
        "seed",
        "turn_s",
        "target_loss",
        "until",
        "usd_per_gpu_hour",
        "control",
        "run_dir",
    )
    options = {name: given[name] for name in named if name in given}
    if "steps" not in options:
        options.setdefault("minutes", 1)
    if arguments.lora_init == "loftq":
        options["allow"] = ("weights",)  # each storage loses something else, with which its adapters begin
    try:
        race = sk.race(recipes, model=model, data=train, eval=held_out, optimizer=sk.AdamW(lr=lr), **options)
    except sk.racing.UnequalWork as error:
        raise ValueError(_unequal(error.differences)) from error
    race.command = _from_anywhere(arguments.argv)
    if race.run_dir is not None:
        race.save()
    print(race)
    if arguments.plot is not None:
        race.plot().savefig(arguments.plot, dpi=150)
    return 0 if race.reason == "done" else 130


def _reproduce(arguments: argparse.Namespace) -> int:
    """Run a race or a study again and compare: 0 where every figure is inside of its stated interval, 1 where one is not."""
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.run_dir or Path(temporary) / "again"
        if arguments.folder.is_file() or (arguments.folder / "evidence.json").is_file():
            from surokit.bench.evidence_again import reproduce

            minutes = 60.0 if arguments.minutes is None else arguments.minutes
            found = reproduce(arguments.folder, folder, minutes, arguments.only)
        else:
            if arguments.minutes is not None or arguments.only:
                raise ValueError("--minutes and --only choose from a study: a race is run again as long as it was.")
            found = _race_again(arguments.folder, folder)
    print(f"\n{found}")
    return 0 if found.holds else 1


def _race_again(of: Path, folder: Path) -> Reproduction:
    """Run the race of a folder again, into a new one."""
    from surokit.racing.folder import without_options
    from surokit.racing.reproduced import compare_races
    from surokit.racing.start import Race

    then = Race.load(of)
    if not then.command:
        raise ValueError(
            f"{of} is a race of a script or notebook, which has the model and the data: run its rerun.py, or call "
            "surokit.Race.load(folder).rerun(model=..., data=...)."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has content already: give --run-dir another folder for what is run again.")
    status = main([*without_options(then.command, "--run-dir", "--plot"), "--run-dir", str(folder)])
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise ValueError("The race did not run to its end, so there is nothing to compare.")
    return compare_races(then, Race.load(folder))


def _with_adapters(recipes: Mapping[str, Recipe], rank: int | None, init: Init | None) -> dict[str, Recipe]:
    """Return the recipes with an adapter of this rank, initialized so where they store weights; without a rank, those that have one
    keep its rank."""
    if init == "loftq" and not any(recipe.storage for recipe in recipes.values()):
        raise ValueError(
            f"--lora-init loftq is for recipes that store weights, and {', '.join(recipes)} stores none: race qfp8 or qnf4 too."
        )
    adapted = dict(recipes)
    for name, recipe in recipes.items():
        own = recipe.adapter.rank if rank is None and recipe.adapter else rank
        if own is not None:
            adapted[name] = recipe.lora(own, init=init if init and recipe.storage else "kaiming")
    return adapted


def _check_names(names: Sequence[str]) -> None:
    """A name is a run: none is given twice, and a comma stands in none."""
    if any("," in name for name in names):
        apart = " ".join(" ".join(names).replace(",", " ").split())
        raise ValueError(f"--recipes {' '.join(names)}: separate names by spaces, as in --recipes {apart}.")
    if double := next((name for name in names if names.count(name) > 1), None):
        twin = " (a twin of the first races anyway, as the control)" * (double == names[0])
        raise ValueError(f"--recipes {' '.join(names)}: {double!r} stands there twice; give each recipe once{twin}.")


def _check_picture(path: Path | None) -> None:
    """Raise an error if no picture can be written there, before anything is computed for it."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path} is no kind of picture that can be written: use .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: No such file or directory: {path.parent}. Make that folder first.")
    importlib.import_module("matplotlib")


def _unequal(found: Sequence[Difference]) -> str:
    """Return what differs, with the remedies that there are on the command line."""
    said = [f"{each.text}." if each.name == "parameters" else str(each) for each in found]
    if any(each.name == "parameters" for each in found):
        said.append("Train an adapter over every recipe's base with --lora 16, or leave out recipes that freeze it.")
    return f"This is no equal work. {' '.join(said)} No option of the command line allows a difference."


def _from_anywhere(argv: Sequence[str]) -> list[str]:
    """Return the command, with absolute paths of a model and a text that lie here."""
    found: list[str] = []
    for before, word in zip(["", *argv], argv):
        option, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        here = option in ("--model", "--text") and value and Path(value).exists()
        found.append(word.removesuffix(value) + str(Path(value).resolve()) if here else word)
    return found


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 15.6 trillion as 15.6e12") from None
    return int(value) if value.is_integer() else value


def _price(text: str) -> float | tuple[float, float]:
    """Read 2.5, or a range 1.8-3.2; an exponent's minus sign is none of a range."""
    with contextlib.suppress(ValueError):
        return float(text)
    low, dash, high = text.partition("-")
    try:
        if dash:
            return float(low), float(high)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no price in USD: write 2.5, or a range as 1.8-3.2")


def _print_json(said: Mapping[str, Any]) -> None:
    """Print JSON that every reader takes: a figure that is no number is null, as JSON has neither NaN nor Infinity."""
    print(json.dumps(_finite(said), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _doctor(arguments: argparse.Namespace) -> int:
    from surokit.environment import doctor

    found = doctor()
    if arguments.json:
        _print_json({"ok": found.ok, "findings": [asdict(finding) for finding in found.findings]})
    else:
        print(found)
    return 0 if found.ok else 1


_QUESTIONS = (
    "fits",
    "fitting",
    "faster",
    "host_gib",
    "recipes",
    "largest",
    "days",
    "serving",
    "concurrency",
    "plot",
    "all",
    "json",
)


def _plan(arguments: argparse.Namespace) -> int:
    from surokit.planner import plan

    _check_picture(arguments.plot)
    apart = ("command", "run", "argv", "what", "lora", *_QUESTIONS)
    given = {k: v for k, v in vars(arguments).items() if v is not None and k not in apart}
    if arguments.lora is not None:
        from surokit.recipe import find_recipe

        given["recipe"] = find_recipe(given.get("recipe", "bf16")).lora(rank=arguments.lora)
    planned = plan(arguments.what, **given)
    # every answer is there before a word is printed, so that an error stands alone
    answers = answers_of(planned, arguments)
    if arguments.json:
        lines = [line.__dict__ for line in planned.lines()]
        found = {name: answer for name, (answer, _) in answers.items()}
        said = {"title": planned.title, "answers": planned.answers, "lines": lines, "notes": planned.all_notes}
        _print_json({**said, **found})
    else:
        first = str(planned) if arguments.all else _in_short(planned, "fitting" in answers, arguments.host_gib)
        print("\n\n".join([first, *(text for _, text in answers.values())]))
    return 0


def _in_short(planned: Plan, with_fitting: bool, host_gib: float | None) -> str:
    """Return what a person acts on: whether the plan fits and what would, its time and cost, what a step waits for, and the fastest
    recipe."""
    from surokit.planner.words import narrow_moments

    said = [answer.partition("; plan.fitting()")[0] for answer in planned.answers]
    said += [f"Computes {units.value(planned.flops, 'FLOP')} in all"] if planned.flops is not None else []
    if planned.room_gib is not None and planned.memory.gib > planned.room_gib and not with_fitting:
        found = planned.fitting(host_gib=host_gib)
        time = found.plan and found.plan.step_time
        takes = (
            f"; a step takes {units.value(time.ms, 'ms')} ({time.kind})"
            if time and planned.time.rate_kind != "given"
            else ""
        )
        said.append(f"What helps: {found.sentence}{takes}")
        said += [f"As options: {_as_options(planned, way.changes)}" for way in found.ways[:1]]
    if moments := narrow_moments(planned):
        said.append(moments[0].upper() + moments[1:])
    if (likely := planned.likely) is not None:
        most = sorted(likely.made_of.items(), key=lambda part: -part[1])[:4]
        said.append(f"Likely goes into {', '.join(f'{name} {ms / likely.step_ms:.0%}' for name, ms in most)}")
    if (step := planned.binds().time) is not None:
        if likely is None:
            said.append(f"Of what the GPU does in a step, {step.share:.0%} is bound by {step.term}")
        said += [f"Faster: {step.remedy}"] if step.remedy else []
    notes = f" and {units.counted(len(planned.all_notes), 'note')}" if planned.all_notes else ""
    return "\n  ".join([f"Plan: {planned.title}", *said, f"--all prints every figure{notes}"])


def answers_of(planned: Plan, arguments: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Return what was asked beside the plan: name -> (the answer as data, the answer in words)."""
    from surokit.planner.inverse import questions, recipe_choice
    from surokit.planner.inverse.changes import merged

    gib = arguments.fits
    answers: dict[str, tuple[Any, str]] = {}
    if gib is not None:
        fits = planned.fits(gib)
        words = f"  {'fits' if fits else 'does not fit'} in {gib:g} GiB: {units.gib(planned.memory.gib)}"
        answers["fits"] = (fits, f"{words}, most of it {planned.memory.largest.name}")
    fitted = None
    if arguments.fitting:
        found = planned.fitting(gib=gib, host_gib=arguments.host_gib)
        tables = {"ways": found.together(), "remedies": found.table()}
        options = [("the first", way.changes) for way in found.ways[:1]]
        for way, then in found.faster_still:
            changes = merged([way.changes, *(change.changes for change in then)])
            options.append((units.value(then[-1].step_ms, "ms"), changes))
        written = {name: _as_options(planned, changes) for name, changes in options}
        lines = [str(found), *(f"  as options, {name}: {text}" for name, text in written.items())]
        data = {name: table.to_dict("records") for name, table in tables.items()}
        answers["fitting"] = ({"sentence": found.sentence, "options": written, **data}, "\n".join(lines))
        fitted = found.plan
    if arguments.faster:
        quicker = (fitted or planned).faster(gib=gib, host_gib=arguments.host_gib)
        whose = "of the first that fits: " if fitted not in (None, planned) else ""
        answers["faster"] = (quicker.table().to_dict("records"), f"  {whose}{quicker}")
    if arguments.largest is not None:
        most = questions.largest(planned, arguments.largest, gib=gib)
        room = f"{gib:g} GiB" if gib is not None or planned.gpu is None else f"{planned.gpu.name}'s memory"
        answers["largest"] = ({arguments.largest: most}, f"  largest {arguments.largest} that fits in {room}: {most:,}")
    if arguments.days is not None:
        gpus = questions.gpus_for(planned, days=arguments.days)
        done = planned.but(gpus=gpus)
        words = f"  done within {arguments.days:g} days on {gpus:,} GPUs: {done.days:.2f} days"
        answers["gpus"] = (gpus, words + (f", {units.span(*done.usd_range, 'USD')}" if done.usd_range else ""))
    if arguments.recipes:
        rows = recipe_choice.compare_recipes(fitted or planned, gib=gib)
        title = f"every recipe: {(fitted or planned).title}"
        answers["recipes"] = ([_choice_data(row) for row in rows], f"  {title}\n{_choices_text(rows)}")
    if arguments.serving is not None or arguments.concurrency is not None:
        prompt, output = arguments.serving or (512, 128)
        served = planned.serving(prompt, output, arguments.concurrency, gib=gib)
        answers["serving"] = ([line.__dict__ for line in served.lines()], str(served))
    if arguments.plot is not None:
        answers["picture"] = (str(arguments.plot), f"  picture: {_plot(planned, arguments)}")
    return answers


def _as_options(planned: Plan, changes: Mapping[str, Any]) -> str:
    """Return the changes of a plan's arguments as options of this command, and which of its own to leave out."""
    said: list[str] = []
    given = planned.but(**changes).given
    left_out = [f"--{name.replace('_', '-')}" for name in planned.given if name not in given]
    for name, value in changes.items():
        option = f"--{name.replace('_', '-')}"
        if name == "recipe":
            said += [option, value.name, *(["--lora", str(value.adapter.rank)] if value.adapter else [])]
        elif value is False:
            left_out.append(option)
        elif value is not None:
            said += [option, *([] if value is True else [str(value)])]
    without = f"{', ' * bool(said)}without {' '.join(left_out)}" if left_out else ""
    return f"{' '.join(said)}{without}"


def _choice_data(row: RecipeChoice) -> dict[str, Any]:
    return {name: value for name, value in row.__dict__.items() if name != "recipe"}


def _choices_text(rows: Sequence[RecipeChoice]) -> str:
    from surokit.tables import text_table

    def words(row: RecipeChoice) -> tuple[str, ...]:
        time = "" if row.step_ms is None else units.value(row.step_ms, "ms")
        gain = "" if row.speedup is None else f"{row.speedup:.2f} times {row.against}"
        fits = {True: "fits", False: "too large", None: ""}[row.fits]
        return (row.name, time, row.kind, gain, units.gib(row.gib), fits, row.products, "fastest" * row.fastest)

    header = ("recipe", "step", "", "as fast as", "memory", "", "products", "")
    table = text_table([words(row) for row in rows], header=header, right=(1, 4), indent="    ")
    return f"{table}\n    native: on the GPU's tensor cores of that format; emulated: rounded to it, and computed in bfloat16"


def _plot(planned: Plan, arguments: argparse.Namespace) -> Path:
    from surokit.planner.inverse.recipe_choice import compare_recipes
    from surokit.planner.picture import plot_memory

    path: Path = arguments.plot
    plans = {planned.title: planned}
    if arguments.recipes:
        plans = {row.name: planned.but(recipe=row.recipe) for row in compare_recipes(planned)}
    plot_memory(plans, gib=arguments.fits).savefig(path, dpi=150)
    return path


_LOOK_EVERY_S = 0.5


def _wait_for(folders: Sequence[str]) -> None:
    """Wait until every folder that is not there yet is there, and holds what says whose it is."""
    from surokit.widgets.folder import begun

    missing = [path for path in (Path(folder).expanduser() for folder in folders) if not path.exists()]
    for path in missing:
        print(f"Waiting for {path}, which is not there yet; Ctrl-C ends the waiting.", file=sys.stderr, flush=True)
    tick = threading.Event()
    while not all(map(begun, missing)):
        tick.wait(_LOOK_EVERY_S)


def _watch(arguments: argparse.Namespace) -> int:
    from surokit.widgets.follow import watch

    _wait_for(arguments.folders)
    seen = watch(*arguments.folders, view="text")
    status = 0
    try:
        seen.wait()
    except KeyboardInterrupt:
        status = 130
        seen.stop_following()
    print(seen)
    return status


def _launch(arguments: argparse.Namespace) -> int:
    from surokit.launching.launch import launch_script
    from surokit.launching.outcome import LaunchError

    try:
        launch_script(
            arguments.script,
            arguments.is_module,
            gpus=arguments.gpus,
            restarts=arguments.restarts,
            hang_s=arguments.hang,
            output=arguments.output,
        )
    except LaunchError as error:
        print(f"surokit: {error}", file=sys.stderr)
        return 1
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from surokit.train.exporting import export

    print(export(arguments.source, arguments.folder, arguments.base))
    return 0


def _quickstart(arguments: argparse.Namespace) -> int:
    from importlib.resources import as_file, files

    from surokit.headless import execute

    try:
        notebook = files("surokit.notebooks").joinpath("01_quickstart.ipynb")
    except ModuleNotFoundError:
        notebook = None
    if notebook is None or not notebook.is_file():
        raise FileNotFoundError("The quickstart notebook is not in this installation: install surokit again.")
    with as_file(notebook) as path:
        return execute(path, arguments.run_dir)


if __name__ == "__main__":
    raise SystemExit(main())
