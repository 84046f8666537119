"""Run the benchmarks from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from surokit.train.errors import NonFiniteError


def main(argv: list[str] | None = None) -> int:
    arguments = vars(make_parser().parse_args(argv))
    command = arguments.pop("command")
    try:
        if command == "hour":
            return _hour(arguments, list(sys.argv[1:] if argv is None else argv))
        return _run(command, arguments)
    except KeyboardInterrupt:
        kept = command in ("gpu", "offload", "hour", "evidence") or (command == "peers" and arguments.get("out"))
        words = "what was finished is in the file, and the same command goes on" if kept else "nothing is kept"
        print(f"surokit.bench: stopped; {words}.", file=sys.stderr)
        return 130
    except (ValueError, NonFiniteError, RuntimeError, ImportError, OSError) as error:
        print(f"surokit.bench: {error}", file=sys.stderr)
        return 2


def _run(command: str, arguments: dict[str, Any]) -> int:
    if command == "tables":
        return _fill(arguments["pages"])
    if arguments.pop("list", False):
        print(import_module(f"surokit.bench.{command}").listing(**arguments))
        return 0
    if out := arguments.get("out"):
        from surokit.bench import result

        result.check_writable(out)  # before anything is measured
    data, table = _measured(command, arguments)
    print(table(data))
    if out and command not in AS_THEY_GO:
        result.write(data, out)
        print(f"raw result: {out}")
    return 0


def _hour(arguments: dict[str, Any], argv: list[str]) -> int:
    """Run the hour; return 0 where nothing failed, 1 where a step did, or a measurement within one."""
    from surokit.bench import hour

    if arguments.pop("list"):
        print("\n".join(f"{step.name:14} {step.words}" for step in hour.steps()))
        return 0
    if arguments.pop("background"):
        print(hour.background([word for word in argv if word != "--background"], arguments["out"]))
        return 0
    status = hour.run(**arguments)
    print(hour.table(status))
    return int(any(entry["state"] == "failed" or entry["problems"] for entry in status["steps"].values()))


AS_THEY_GO = ("gpu", "peers", "offload", "evidence")  # these write what they measure at once, wherever their call ends


def _measured(command: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], str]]:
    """Return (raw result, the function that makes its table): the module of that name has `run` and `table`."""
    module = import_module(f"surokit.bench.{command}")
    if command not in AS_THEY_GO:
        arguments.pop("out")
    if shape := arguments.pop("shape", None):
        arguments["shape"] = tuple(shape)
    data = module.run(**arguments)
    if command == "cpu":
        from surokit.bench.result import table

        return data, table
    return data, module.shown if command == "gpu" else module.table


def _fill(pages: list[Path]) -> int:
    from surokit.bench import result

    for page in pages:
        text = page.read_text(encoding="utf-8")
        drawn = [(result.drawn_by(data), data, file) for file, data in result.pictures(text, page.parent).items()]
        page.write_text(result.filled(text, page.parent), encoding="utf-8")
        for module, data, file in drawn:
            module.draw(data, file)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m surokit.bench", description="Command line of the benchmarks.")
    commands = parser.add_subparsers(dest="command", required=True)

    cpu = commands.add_parser("cpu", help="a small decoder beside transformers on the CPU: tokens/s, memory, loss")
    cpu.add_argument("--case", choices=("train", "lora"), default="train", help="what is trained (default train)")
    cpu.add_argument("--systems", nargs="+", dest="names", help="which systems to run (default: all)")
    cpu.add_argument("--rounds", type=int, default=8, help="how often the systems take turns (default 8)")
    cpu.add_argument("--steps", type=int, default=4, help="steps in a turn (default 4)")

    gpu = commands.add_parser("gpu", help="Qwen3 shapes on a GPU: recipes, techniques and Unsloth, beside the bars")
    gpu.add_argument(
        "--part", nargs="+", default=[], metavar="NAME", help="of its parts (default: all that is missing)"
    )
    gpu.add_argument(
        "--minutes", type=float, default=8.0, help="how long this call may take (default 8); call it again"
    )
    gpu.add_argument("--new", action="store_true", help="begin a new file where --out is taken")
    gpu.add_argument("--again", action="store_true", help="measure once more what failed")
    gpu.add_argument(
        "--list", action="store_true", help="only list the parts, in their order, with about how long each is"
    )
    gpu.add_argument(
        "--rehearse", action="store_true", help="every line of it on a processor; the numbers mean nothing"
    )

    published = commands.add_parser(
        "published", help="likely times beside published runs: fits what they reached, and judges it"
    )
    published.add_argument("--runs", type=Path, help="judge the shipped factors by the runs of this file instead")
    published.add_argument(
        "--write", action="store_true", help="write the fitted factors to surokit/hardware/reached.csv"
    )

    hour = commands.add_parser(
        "hour", help="all that is measured and tested on a GPU, in steps that go on where they ended"
    )
    hour.add_argument("--out", type=Path, default=Path("gpu-hour"), help="the folder of its files (default gpu-hour)")
    hour.add_argument(
        "--minutes", type=float, default=60.0, help="how long this call may take (default 60); call it again"
    )
    hour.add_argument("--only", nargs="+", default=[], metavar="STEP", help="of its steps (default: all that is left)")
    hour.add_argument("--again", action="store_true", help="try once more what failed")
    hour.add_argument("--background", action="store_true", help="start it detached, and return at once")
    hour.add_argument("--list", action="store_true", help="only list the steps, in their order")
    hour.add_argument(
        "--rehearse", action="store_true", help="every step on a processor, tiny; its numbers mean nothing"
    )

    ceilings = commands.add_parser("ceilings", help="the rates that the device reaches, as the planner takes them")
    ceilings.add_argument("--seconds", type=float, default=20.0, help="about how long to measure (default 20)")

    peers = commands.add_parser("peers", help="the same work in other libraries: equal settings, and each at its best")
    peers.add_argument("--systems", nargs="+", help="which systems to run (default: all that are installed)")
    peers.add_argument("--models", nargs="+", default=["0.6b"], help="0.6b, 1.7b, 4b, 8b (default 0.6b)")
    peers.add_argument("--train", choices=("lora", "full"), default="lora")
    peers.add_argument("--settings", nargs="+", choices=("equal", "best"), default=["equal", "best"])
    peers.add_argument("--rounds", type=int, default=4, help="how often the systems take turns (default 4)")
    peers.add_argument("--steps", type=int, default=4, help="steps in a turn (default 4)")
    peers.add_argument("--minutes", type=float, default=8.0, help="how long this call may take (default 8)")
    peers.add_argument(
        "--list", action="store_true", help="only say what would be raced, what is missing, how long it takes"
    )
    peers.add_argument(
        "--rehearse", action="store_true", help="on a processor with a tiny shape; the numbers mean nothing"
    )

    predicted = commands.add_parser(
        "predicted", help="planned time, memory and launches of the targets' table: predictions"
    )

    predicted.add_argument("--measured", type=Path, help="the gpu.json of an hour, whose figures are put beside")

    scaling = commands.add_parser(
        "scaling", help="planned efficiency on many GPUs beside what others published: predictions"
    )

    dissection = commands.add_parser(
        "dissection", help="each optimization of a small decoder alone: training, fine-tuning or generation"
    )
    dissection.add_argument(
        "--what", choices=("train", "zero", "tune", "peft", "infer"), default="train", help="(default train)"
    )
    dissection.add_argument("--folder", type=Path, help="keeps the cells; the same command goes on")
    dissection.add_argument("--rounds", type=int, default=5, help="of all cells (default 5)")
    dissection.add_argument("--model", choices=("33M", "135M", "tiny"), default="33M", help="(default 33M)")

    serving = commands.add_parser(
        "serving", help="transformers serve with a small decoder, a plan beside it; or the client's own delay"
    )
    serving.add_argument("--what", choices=("server", "client"), default="server", help="(default server)")
    serving.add_argument("--model", choices=("33M", "tiny"), default="33M", help="(default 33M)")

    zenflow = commands.add_parser(
        "zenflow", help="losses of ZenFlow here and in DeepSpeed, of the same schedule, over steps of a small decoder"
    )
    zenflow.add_argument("--steps", type=int, default=400, help="of each run (default 400)")
    zenflow.add_argument("--seeds", type=int, default=3, help="of weights and batches (default 3)")

    compiled = commands.add_parser(
        "compiled", help="what the Triton kernels compile to without a GPU: registers, spills"
    )
    compiled.add_argument("--arch", type=int, default=90, help="compute capability times ten (default 90)")

    evidence = commands.add_parser(
        "evidence", help="the held-out loss of every recipe at three sizes, paired by seeds; some hours, which go on"
    )
    evidence.add_argument(
        "--folder", type=Path, default=Path("runs/evidence"), help="of checkpoints (default runs/evidence)"
    )
    evidence.add_argument(
        "--minutes", type=float, default=60.0, help="how long this call may take (default 60); call it again"
    )
    evidence.add_argument("--workers", type=int, default=2, help="processes, of a core each (default 2)")

    tables = commands.add_parser(
        "tables", help="fill the marked places of Markdown files with the tables and pictures of their raw results"
    )
    tables.add_argument("pages", type=Path, nargs="+")

    watching = commands.add_parser("watching", help="the share of a run that the live panel and the records take")
    watching.add_argument("--steps", type=int, default=300)

    overhead = commands.add_parser(
        "overhead", help="what measuring costs: always-on, sampled windows, profile, torch.profiler"
    )
    overhead.add_argument("--rounds", type=int, default=60, help="how often the ways take turns (default 60)")
    overhead.add_argument("--steps", type=int, default=4, help="steps in a turn, 3 to 12 (default 4)")

    offload = commands.add_parser(
        "offload", help="no offload, OffloadAdamW and ZenFlow: step, stall, bytes; the device is emulated on a CPU"
    )
    offload.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    offload.add_argument("--rounds", type=int, default=8, help="how often the ways take turns (default 8)")
    offload.add_argument(
        "--minutes", type=float, default=20.0, help="how long this call may take (default 20); call it again"
    )
    offload.add_argument("--millions", type=float, default=25.0, help="parameters of the emulated model (default 25)")
    offload.add_argument(
        "--models", nargs="+", default=[], help="1.7b, 4b, 8b on a GPU (default: those that memory holds)"
    )
    offload.add_argument("--layers", type=int, help="of each on a GPU (default: all)")
    offload.add_argument("--interval", type=int, help="steps of ZenFlow's windows on a GPU (default 4)")
    offload.add_argument(
        "--cases", nargs="+", default=[], metavar="WORD", help="emulated cases with a word in their name"
    )
    offload.add_argument("--new", action="store_true", help="begin a new file where --out is taken")
    offload.add_argument("--again", action="store_true", help="measure once more what failed")
    offload.add_argument(
        "--rehearse",
        action="store_true",
        help="the GPU's part with a tiny decoder on a processor; its times mean nothing",
    )

    spans = commands.add_parser(
        "spans", help="who does what when in steps of the three ways, on an emulated device, for a picture"
    )
    spans.add_argument("--steps", type=int, default=8, help="that are recorded (default 8)")

    kernels = commands.add_parser("kernels", help="each kernel: bytes over time against a copy, products against bf16")
    kernels.add_argument("--rounds", type=int, default=20, help="how often the kernels take turns (default 20)")
    kernels.add_argument("--shape", type=int, nargs=2, metavar=("M", "K"), help="of the operands that are quantized")
    kernels.add_argument(
        "--only", default="", help="only kernels with this in their names, and what they are held against"
    )

    memory = commands.add_parser("memory", help="bytes of one training step, as planned and as torch allocates them")
    memory.add_argument("--settings", nargs="+", dest="names", help="which settings to run (default: all)")
    memory.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")

    for command in (
        cpu,
        gpu,
        peers,
        predicted,
        scaling,
        dissection,
        serving,
        zenflow,
        compiled,
        watching,
        overhead,
        offload,
        spans,
        kernels,
        memory,
        ceilings,
        published,
        evidence,
    ):
        command.add_argument(
            "--out", type=Path, help="write the raw result to this JSON file, in a folder that is there"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
