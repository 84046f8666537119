"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m surokit.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    cpu = commands.add_parser("cpu", help="a small decoder beside transformers on the CPU: tokens/s, memory, loss")
    cpu.add_argument("--systems", nargs="+", help="which systems to run (default: all)")
    cpu.add_argument("--rounds", type=int, default=8, help="how often the systems take turns (default 8)")
    cpu.add_argument("--steps", type=int, default=4, help="steps in a turn (default 4)")

    gpu = commands.add_parser("gpu", help="LoRA on a Qwen3-0.6B shape: tokens/s, memory, idle share for each recipe")
    gpu.add_argument("--recipes", nargs="+", default=["bf16", "fp8", "qfp8"])
    gpu.add_argument("--rounds", type=int, default=4)
    gpu.add_argument("--steps", type=int, default=8)
    gpu.add_argument("--layers", type=int, help="fewer layers than the model's 28, for a quick look")

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

    kernels = commands.add_parser("kernels", help="each kernel: bytes over time against a copy, products against bf16")
    kernels.add_argument("--rounds", type=int, default=20, help="how often the kernels take turns (default 20)")
    kernels.add_argument("--shape", type=int, nargs=2, metavar=("M", "K"), help="of the operands that are quantized")
    kernels.add_argument(
        "--only", default="", help="only kernels with this in their names, and what they are held against"
    )

    memory = commands.add_parser("memory", help="bytes of one training step, as planned and as torch allocates them")
    memory.add_argument("--settings", nargs="+", help="which settings to run (default: all)")
    memory.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")

    for command in (cpu, gpu, watching, overhead, kernels, memory):
        command.add_argument("--out", type=Path, help="write the raw result to this JSON file")
    arguments = parser.parse_args(argv)

    from surokit.bench import result

    table = result.table
    if arguments.command == "tables":
        for page in arguments.pages:
            text = page.read_text(encoding="utf-8")
            page.write_text(result.filled(text, page.parent), encoding="utf-8")
            for picture, data in result.pictures(text, page.parent).items():
                from surokit.bench.study import draw

                draw(data, picture)
        return 0
    try:
        if arguments.command == "cpu":
            from surokit.bench.cpu import run as run_cpu

            data = run_cpu(arguments.systems, arguments.rounds, arguments.steps)
        elif arguments.command == "watching":
            from surokit.bench.watching import run as run_watching
            from surokit.bench.watching import table

            data = run_watching(arguments.steps)
        elif arguments.command == "overhead":
            from surokit.bench.overhead import run as run_overhead
            from surokit.bench.overhead import table

            data = run_overhead(arguments.rounds, arguments.steps)
        elif arguments.command == "memory":
            from surokit.bench.memory import run as run_memory
            from surokit.bench.memory import table

            data = run_memory(arguments.settings, arguments.device)
        elif arguments.command == "kernels":
            from surokit.bench.kernels import run as run_kernels
            from surokit.bench.kernels import table

            data = run_kernels(arguments.rounds, arguments.shape and tuple(arguments.shape), arguments.only)
        else:
            from surokit.bench.gpu import run as run_gpu

            data = run_gpu(arguments.recipes, arguments.rounds, arguments.steps, arguments.layers)
    except (ValueError, RuntimeError, ImportError) as error:
        print(f"surokit.bench: {error}", file=sys.stderr)
        return 2
    print(table(data))
    if arguments.out:
        result.write(data, arguments.out)
        print(f"raw result: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
