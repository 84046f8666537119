"""Runs the race of this folder again:

surokit race --recipes bf16 fp8-current --minutes 60 --layers 6 --width 192 --lr 3e-3 --batch 32 --stories
30000000 --run-dir race-hour
"""

from pathlib import Path

from surokit.cli import main

here = Path(__file__).resolve().parent
command = [
    "race",
    "--recipes",
    "bf16",
    "fp8-current",
    "--minutes",
    "60",
    "--layers",
    "6",
    "--width",
    "192",
    "--lr",
    "3e-3",
    "--batch",
    "32",
    "--stories",
    "30000000",
    "--run-dir",
    str(here),
]
raise SystemExit(main(command))
