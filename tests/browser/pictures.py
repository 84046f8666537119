"""The pictures of the panel in the docs, taken from a real JupyterLab: a small run on this machine, light and dark, and a race.

    python -m tests.browser.pictures docs [panel] [race]

Writes panel-light.png and panel-dark.png, and race-live.png; with names only those.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser.lab import Lab, Tab, browser, paper, wait_for

SETUP = """
import torch
import surokit as sk
from surokit import texts
torch.manual_seed(0)
tokenizer = sk.train_tokenizer(texts.SHAKESPEARE, vocab_size=512)
train, held_out = sk.text(texts.SHAKESPEARE, tokenizer, length=64, batch=8).split(held_out=0.002)
config = sk.DecoderConfig(layers=2, width=96, heads=4, kv_heads=2, vocab=512, ffn=256, max_length=64)
session = sk.Session(sk.Decoder(config, dtype=torch.bfloat16), train, recipe="fp8", eval=held_out, eval_every=100,
                     optimizer=sk.AdamW(lr=4e-3), schedule=sk.Cosine(warmup=50, steps=1200), run_dir="run")
"""
RUN = "session.live()\nsession.run(1000)"
RACE = """
race = sk.race({"bf16": sk.BF16, "fp8": sk.FP8, "fp4": sk.FP4}, model=sk.Decoder(config, dtype=torch.bfloat16), data=train,
               eval=held_out, optimizer=sk.AdamW(lr=4e-3), steps=200, turn_s=0.4, run_dir="races/first", thread=True)
"""


def main(folder: Path, *names: str) -> None:
    if not names or "panel" in names:
        take_panel(folder)
    if not names or "race" in names:
        take_race(folder)


def take_panel(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        with Lab(place) as lab, browser(place) as context:
            lab.notebook("run", [SETUP, RUN])
            tab = Tab(context, lab, "run")
            tab.page.set_viewport_size({"width": 1100, "height": 1300})
            tab.page.evaluate("() => jupyterapp.shell.collapseLeft()")
            tab.run(0)
            tab.idle(200)
            tab.run(1)
            panel = tab.cell(1).locator(".surokit-panel")
            panel.locator("path.sk-line").first.wait_for()
            wait_for(lambda: "held out" in panel.inner_text() and "/ 1,000" in panel.inner_text(), "curves", 200)
            now = panel.locator(".sk-now")
            wait_for(lambda: int(now.inner_text().split()[1].replace(",", "")) > 500, "half of the run", 300)
            for name in ("light", "dark"):
                tab.theme(f"JupyterLab {name.title()}")
                wait_for(lambda light=name == "light": (paper(panel) > 300) == light, "the theme")
                chart = panel.locator("figure svg").first.bounding_box()
                tab.page.mouse.move(chart["x"] + 0.3 * chart["width"], chart["y"] + 100)
                panel.screenshot(path=str(folder / f"panel-{name}.png"))
            tab.theme("JupyterLab Light")
            panel.locator(".sk-stop").click()
            tab.idle()


def take_race(folder: Path) -> None:
    """When a third of its steps are made, so that the cell has ended and the panel goes on."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        with Lab(place) as lab, browser(place) as context:
            lab.notebook("race", [SETUP, RACE])
            tab = Tab(context, lab, "race")
            tab.page.set_viewport_size({"width": 1100, "height": 1300})
            tab.page.evaluate("() => jupyterapp.shell.collapseLeft()")
            tab.theme("JupyterLab Light")
            tab.run(0)
            tab.idle(200)
            tab.run(1)
            panel = tab.cell(1).locator(".surokit-panel")
            panel.locator("path.sk-line").first.wait_for()
            step = panel.locator("tbody tr").nth(2).locator("td").nth(1)  # the slowest's
            wait_for(lambda: int(step.inner_text()) >= 70, "a third of the race", 300)
            panel.locator(".sk-stop").wait_for()
            panel.screenshot(path=str(folder / "race-live.png"))
            panel.locator(".sk-stop").click()
            wait_for(lambda: "over in round" in panel.inner_text(), "the end", 60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
