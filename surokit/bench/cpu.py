"""Training a small Llama on the CPU, ours beside transformers + torch.optim.AdamW.

Both load the same random weights from one folder, train on the same batches in bfloat16 with moments in bfloat16, without
clipping and with a constant learning rate. Each system is a process of its own that waits while the other runs, so that
memory is its own and the turns are side by side. Peak memory is the process's high-water mark above that of a process which
has only imported torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surokit.bench.result import result

SHAPE: dict[str, Any] = {"layers": 8, "width": 512, "heads": 8, "kv_heads": 8, "vocab": 8192, "ffn": 1376}
BATCH, LENGTH = 4, 512
LEARNING_RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.1
BASELINE = "transformers"
SYSTEMS = {
    "transformers": "LlamaForCausalLM + torch.optim.AdamW",
    "surokit": "Session, BF16, eager",
    "transformers, compiled": "torch.compile of the model",
    "surokit, compiled": "Session, BF16, compile=True",
    "surokit fp8": "emulated on a CPU: for numerics, not for speed",
    "surokit fp8-rowwise": "emulated on a CPU: for numerics, not for speed",
}
WARM_UP = 3


def run(names: list[str] | None, rounds: int, steps: int) -> dict[str, Any]:
    """Run the named systems (default: all) in turn and return the raw result."""
    names = list(names or SYSTEMS)
    unknown = [n for n in names if n not in SYSTEMS]
    if unknown:
        raise ValueError(f"There is no system {unknown[0]!r}: known are {', '.join(SYSTEMS)}.")
    found: dict[str, dict[str, Any]] = {
        name: {"name": name, "note": SYSTEMS[name], "tokens_per_s": [], "losses": []} for name in names
    }
    with tempfile.TemporaryDirectory() as folder:
        _write_weights(Path(folder))
        floor_mib = _bare_torch_mib()
        with _workers(names, folder) as workers:
            for name, ask in workers.items():
                first = ask(1)
                found[name]["first_step_s"] = first["seconds"]
                found[name]["losses"] += first["losses"] + ask(WARM_UP - 1)["losses"]
                print(f"{name}: first step {first['seconds']:.1f} s", file=sys.stderr)
            for turn in range(rounds):
                for name, ask in workers.items():
                    answer = ask(steps)
                    rate = steps * BATCH * LENGTH / answer["seconds"]
                    found[name]["tokens_per_s"].append(round(rate, 1))
                    found[name]["losses"] += answer["losses"]
                    found[name]["peak_mib"] = round(answer["peak_mib"] - floor_mib, 1)
                print(f"turn {turn + 1} of {rounds}", file=sys.stderr)
    settings = {
        **SHAPE,
        "batch": f"{BATCH} x {LENGTH}",
        "dtype": "bf16, moments bf16",
        "turns": f"{rounds} of {steps} steps",
        "warm-up steps": WARM_UP,
    }
    return result("cpu: sustained training steps", settings, list(found.values()), BASELINE)


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


@contextmanager
def _workers(names: list[str], folder: str) -> Iterator[dict[str, Callable[[int], dict[str, Any]]]]:
    """A process for each system; calling one makes it take so many steps and report."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "surokit.bench.cpu", name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    }

    def ask(name: str, steps: int) -> dict[str, Any]:
        process = processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process of {name!r} ended with exit status {process.wait()}; its error is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield {name: (lambda steps, name=name: ask(name, steps)) for name in names}  # type: ignore[misc]
    finally:
        for process in processes.values():
            if process.stdin:
                process.stdin.close()
            process.wait()


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


def _surokit(folder: str, recipe: str, compiled: bool) -> Callable[[dict[str, Any]], float]:
    import torch

    import surokit as sk

    session = sk.Session(
        sk.load(folder, dtype=torch.bfloat16),
        [next(_batches())],
        optimizer=sk.AdamW(lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY),
        recipe=recipe,
        schedule=None,
        clip=None,
        compile=compiled,
    )
    return lambda batch: float(session.step(batch).loss)


def _work(name: str, folder: str) -> None:
    compiled = name.endswith("compiled")
    if name.startswith("transformers"):
        step = _transformers(folder, compiled)
    else:
        recipe = name.removeprefix("surokit").strip()
        step = _surokit(folder, recipe if recipe in ("fp8", "fp8-rowwise") else "bf16", compiled)
    batches = _batches()
    for line in sys.stdin:
        todo = [next(batches) for _ in range(int(line))]
        start = time.perf_counter()
        losses = [step(batch) for batch in todo]
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "losses": losses, "peak_mib": peak_mib()}), flush=True)


if __name__ == "__main__":
    _work(*sys.argv[1:])
