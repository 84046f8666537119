"""Training a small Llama on the CPU, ours beside transformers + torch.optim.AdamW.

Both load the same random weights from one folder, train on the same batches in bfloat16 with moments in bfloat16, without
clipping and with a constant learning rate. Each system is a process of its own that waits while the other runs, so that
memory is its own and the turns are side by side. Peak memory is the process's high-water mark above that of a process which
has only imported torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from surokit.bench.process import Answers, Worker, left_s, serve
from surokit.bench.result import result
from surokit.bench.turns import Running, Turns

SHAPE: dict[str, Any] = {"layers": 8, "width": 512, "heads": 8, "kv_heads": 8, "vocab": 8192, "ffn": 1376}
BATCH, LENGTH = 4, 512
LEARNING_RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.1
BASELINE = "transformers"
SYSTEMS = {
    "transformers": "LlamaForCausalLM + torch.optim.AdamW",
    "surokit": "Session, BF16, eager",
    "transformers, compiled": "torch.compile of the model",
    "surokit, fused": "Session, BF16, eager, after sk.fuse(model)",
    "surokit, compiled": "Session, BF16, compile=True",
    "surokit fp8": "emulated on a CPU: for numerics, not for speed",
    "surokit fp8-rowwise": "emulated on a CPU: for numerics, not for speed",
}
WARM_UP = 3
LATE_S = 900.0  # what takes so long has failed


def run(names: list[str] | None, rounds: int, steps: int) -> dict[str, Any]:
    """Run the named systems (default: all) in turn and return the raw result."""
    names = list(names or SYSTEMS)
    unknown = [n for n in names if n not in SYSTEMS]
    if unknown:
        raise ValueError(f"There is no system {unknown[0]!r}: known are {', '.join(SYSTEMS)}.")
    rates: dict[str, list[float]] = {name: [] for name in names}

    def start(name: str, until_s: float) -> Running:
        worker = Worker([sys.executable, "-m", "surokit.bench.cpu", name, folder], name, left_s(until_s))
        return Running(worker, WARM_UP, until_s)

    with tempfile.TemporaryDirectory() as folder:
        _write_weights(Path(folder))
        floor_mib = _bare_torch_mib()
        with closing(Turns(start)) as turns:
            for name in names:
                print(f"{name}: first step {turns.opened(name, _soon()).first_step_s:.1f} s", file=sys.stderr)
            for turn, name in turns.rounds(names, rounds):
                seconds = turns.open[name].take(steps, _soon())["seconds"]
                rates[name].append(round(steps * BATCH * LENGTH / seconds, 1))
                print(f"turn {turn + 1} of {rounds}: {name}", file=sys.stderr)
            systems = [
                {
                    **{"name": name, "note": SYSTEMS[name], "tokens_per_s": rates[name], "losses": running.losses},
                    **{"first_step_s": running.first_step_s, "peak_mib": round(running.peak_mib - floor_mib, 1)},
                }
                for name, running in turns.open.items()
            ]
    settings = {
        **SHAPE,
        "batch": f"{BATCH} x {LENGTH}",
        "dtype": "bf16, moments bf16",
        "turns": f"{rounds} of {steps} steps",
        "warm-up steps": WARM_UP,
    }
    return result("cpu: sustained training steps", settings, systems, BASELINE)


def _write_weights(folder: Path) -> None:
    import torch

    import surokit as sk

    torch.manual_seed(0)
    model = sk.Decoder(sk.DecoderConfig(**SHAPE, tied=False)).to(torch.bfloat16)
    sk.save(model, folder)


def _bare_torch_mib() -> float:
    code = "import torch; from surokit.bench.cpu import peak_mib; print(peak_mib())"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def peak_mib() -> float:
    """High-water mark of this process's resident memory, from /proc, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("This system does not report VmHWM: the memory part of the benchmark needs Linux.")


def _soon() -> float:
    return time.monotonic() + LATE_S


# -- inside a worker


def _batches() -> Iterator[dict[str, Any]]:
    """Endless batches of tokens whose next one depends on the last, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(0)
    table = torch.randint(SHAPE["vocab"], (SHAPE["vocab"], 4), generator=generator)
    while True:
        ids = torch.empty(BATCH, LENGTH, dtype=torch.int64)
        ids[:, 0] = torch.randint(SHAPE["vocab"], (BATCH,), generator=generator)
        choice = torch.randint(4, (BATCH, LENGTH), generator=generator)
        for t in range(1, LENGTH):
            ids[:, t] = table[ids[:, t - 1], choice[:, t]]
        yield {"input_ids": ids, "labels": ids}


def _transformers(folder: str, compiled: bool) -> Callable[[dict[str, Any]], float]:
    import torch

    # packages that happen to be installed and that transformers would load shall not count against it
    for name in ("torchao", "bitsandbytes", "peft", "accelerate", "kernels", "torchvision"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY)
    forward = torch.compile(model) if compiled else model

    def step(batch: dict[str, Any]) -> float:
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _surokit(folder: str, recipe: str, compiled: bool, fused: bool) -> Callable[[dict[str, Any]], float]:
    import torch

    import surokit as sk

    model = sk.load(folder, dtype=torch.bfloat16)
    if fused:
        sk.fuse(model)
    session = sk.Session(
        model,
        [next(_batches())],
        optimizer=sk.AdamW(lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY),
        recipe=recipe,
        schedule=None,
        clip=None,
        compile=compiled,
    )
    return lambda batch: float(session.step(batch).loss)


def _start(name: str, folder: str) -> tuple[dict[str, Any], Answers]:
    """(a first line, what answers {"steps": n}) of a system: "surokit fp8", "surokit, fused", ..."""
    system, *how = name.split(", ")
    library, _, recipe = system.partition(" ")
    if library == "transformers":
        step = _transformers(folder, "compiled" in how)
    else:
        step = _surokit(folder, recipe or "bf16", "compiled" in how, "fused" in how)
    batches = _batches()

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        todo = [next(batches) for _ in range(request["steps"])]
        began = time.perf_counter()
        losses = [step(batch) for batch in todo]
        return {"seconds": time.perf_counter() - began, "losses": losses, "peak_mib": peak_mib()}

    return {"ready": True}, answer


if __name__ == "__main__":
    sys.exit(serve(lambda: _start(*sys.argv[1:])))
