"""Runs the race of this folder again:

surokit race --recipes bf16 fp8 fp4 --steps 150 --batch 8 --length 128 --layers 4 --width 128
--usd-per-gpu-hour 2 --run-dir race
"""

from pathlib import Path

from surokit.cli import main

here = Path(__file__).resolve().parent
command = [
    "race",
    "--recipes",
    "bf16",
    "fp8",
    "fp4",
    "--steps",
    "150",
    "--batch",
    "8",
    "--length",
    "128",
    "--layers",
    "4",
    "--width",
    "128",
    "--usd-per-gpu-hour",
    "2",
    "--run-dir",
    str(here),
]
raise SystemExit(main(command))
