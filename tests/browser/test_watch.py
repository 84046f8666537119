"""`sk.watch` in a real JupyterLab: another process trains, the panel follows it through its folder, and its buttons reach it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.browser.lab import Lab, Tab, browser, chromium, wait_for

pytest.importorskip("playwright")
pytest.importorskip("jupyterlab")
pytest.importorskip("anywidget")
pytestmark = pytest.mark.skipif(chromium() is None, reason="needs chromium (Debian: apt-get install chromium)")

LOOP = """
import time
from surokit.live import Live
with Live("elsewhere", total=5000, run_dir="runs/a") as live:
    for step in range(1, 5001):
        live.log(loss=5 / step ** 0.5, tokens=1024)
        time.sleep(0.02)
        live.wait_while_paused()
        if live.stop_asked:
            break
"""


def test_a_run_of_another_process_is_followed_paused_and_stopped(tmp_path):
    with Lab(tmp_path) as lab, browser(tmp_path) as context:
        lab.notebook("watch", ["import surokit as sk\nsk.watch('runs/a')", "print('usable', 6 * 7)"])
        trainer = subprocess.Popen([sys.executable, "-c", LOOP], cwd=tmp_path)
        try:
            wait_for((tmp_path / "runs" / "a" / "records.jsonl").exists, "the run to begin")
            tab = Tab(context, lab, "watch")
            tab.run(0)
            tab.idle()
            head = tab.cell(0).locator(".sk-now")
            head.wait_for()
            before = head.inner_text()
            wait_for(lambda: head.inner_text() != before, "the panel to follow")
            assert tab.cell(0).locator(".surokit-panel").count() == 1
            tab.run(1)
            wait_for(lambda: "usable 42" in tab.output(1), "another cell")
            tab.cell(0).get_by_role("button", name="Pause").click()
            wait_for(lambda: tab.cell(0).get_by_role("button", name="Resume").count() == 1, "the pause")
            paused = (tmp_path / "runs" / "a" / "run.json").read_text()
            assert '"state": "paused"' in paused
            tab.cell(0).get_by_role("button", name="Resume").click()
            wait_for(lambda: not (tmp_path / "runs" / "a" / "pause").exists(), "the run to go on")
            tab.cell(0).get_by_role("button", name="Stop").click()
            assert trainer.wait(30) == 0
            wait_for(lambda: "Interrupted after step" in tab.output(0), "the end")
            outputs = tab.save().cells[0].outputs
            assert [sorted(output.data) for output in outputs] == [["image/svg+xml", "text/plain"]]
            assert tab.errors == []
            assert tab.outside() == []
        finally:
            trainer.kill()
            trainer.wait()
