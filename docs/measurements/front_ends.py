"""Make the table of front ends for the live panel, measured in a real JupyterLab by tests/browser/front_ends.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surokit.bench.result import markdown


def table(data: Mapping[str, Any]) -> str:
    """Make a row a front end."""
    head = [
        "front end",
        "KB a redraw (largest)",
        "opening KB",
        "page ms a redraw",
        "Python ms",
        "heap after MiB",
        "DOM nodes",
    ]
    rows = [
        [
            system["name"],
            f"{system['message_bytes'] / 1e3:,.1f} ({system['largest_bytes'] / 1e3:,.1f})",
            f"{system['opening_bytes'] / 1e3:,.0f}",
            f"{system['page_ms']:.0f}",
            f"{system['python_ms']:.1f}",
            f"{system['heap_mib']:.1f}",
            f"{system['nodes']:,.0f}",
        ]
        for system in data["front_ends"]
    ]
    outside = sum(len(system["outside"]) for system in data["front_ends"])
    return f"{markdown(data, head, rows)}\n\nRequests that left the machine: {outside}."
