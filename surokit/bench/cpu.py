"""Train small Llamas on the CPU, with surokit beside transformers (and PEFT) + torch.optim.AdamW.

A case is a shape and what is trained of it: everything ("train"), or adapters over a frozen base ("lora"). All systems load the
same random weights from one folder and train on the same batches, without clipping and with a constant learning rate. surokit
trains in bfloat16 with moments in bfloat16. The other library trains in bfloat16 and in float32, since on a CPU without
bfloat16 instructions the second is faster; the faster of the two is the baseline.

Each system is a process of its own that waits while the others run, so that memory is its own and the turns are side by side.
Peak memory is the process's high-water mark above that of a process which has only imported torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from surokit.bench.process import Answers, Worker, left_s, serve
from surokit.bench.result import result
from surokit.bench.turns import Running, Turns

LEARNING_RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.1
WARM_UP = 3
LATE_S = 900.0  # what takes so long has failed


@dataclass(frozen=True)
class Case:
    """A Case is one model and one way to train it.

    systems: each one's name and a note. The first word of a name is a library; then comes the weights' dtype, or the recipe
    of surokit; behind commas "compiled" and "fused". baselines: the systems of which the fastest is the baseline. rank: of the
    adapters that alone are trained, 0 where everything is.
    """

    shape: Mapping[str, Any]
    batch: int
    length: int
    systems: Mapping[str, str]
    baselines: tuple[str, ...]
    rank: int = 0


_EMULATED = "emulated on a CPU: for numerics, not for speed"
_LLAMA = "LlamaForCausalLM + torch.optim.AdamW, weights and moments in {}"
_PEFT = "the same with PEFT's adapters, all in {}"
CASES = {
    "train": Case(
        shape={"layers": 8, "width": 512, "heads": 8, "kv_heads": 8, "vocab": 8192, "ffn": 1376, "tied": False},
        batch=4,
        length=512,
        systems={
            "transformers bf16": _LLAMA.format("bf16"),
            "transformers float32": _LLAMA.format("float32"),
            "surokit": "Session, BF16, eager",
            "transformers bf16, compiled": "torch.compile of the model",
            "transformers float32, compiled": "torch.compile of the model",
            "surokit, fused": "Session, BF16, eager, after sk.fuse(model)",
            "surokit, compiled": "Session, BF16, compile=True",
            "surokit fp8": _EMULATED,
            "surokit fp8-rowwise": _EMULATED,
        },
        baselines=("transformers bf16", "transformers float32"),
    ),
    # the shape of SmolLM2-135M
    "lora": Case(
        shape={"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "vocab": 49152, "ffn": 1536, "tied": True},
        batch=1,
        length=128,
        systems={
            "peft bf16": _PEFT.format("bf16"),
            "peft float32": _PEFT.format("float32"),
            "surokit bf16": "the base in bf16",
            "surokit qfp8": "the base in FP8",
            "surokit qfp4": "the base in NVFP4",
            "surokit qnf4": "the base in NF4, double quantization",
        },
        baselines=("peft bf16", "peft float32"),
        rank=16,
    ),
}


def run(names: list[str] | None, rounds: int, steps: int, case: str = "train") -> dict[str, Any]:
    """Run the named systems of a case (default: all) in turn and return the raw result."""
    what = CASES[case]
    names = list(names or what.systems)
    unknown = [n for n in names if n not in what.systems]
    if unknown:
        raise ValueError(
            f"There is no system {unknown[0]!r} in the case {case!r}: known are {', '.join(what.systems)}."
        )
    rates: dict[str, list[float]] = {name: [] for name in names}

    def start(name: str, until_s: float) -> Running:
        worker = Worker([sys.executable, "-m", "surokit.bench.cpu", case, name, folder], name, left_s(until_s))
        return Running(worker, WARM_UP, until_s)

    with tempfile.TemporaryDirectory() as folder:
        _write_weights(what, Path(folder))
        floor_mib = _bare_torch_mib()
        with closing(Turns(start)) as turns:
            for name in names:
                print(f"{name}: first step {turns.opened(name, _soon()).first_step_s:.1f} s", file=sys.stderr)
            for turn, name in turns.rounds(names, rounds):
                seconds = turns.open[name].take(steps, _soon())["seconds"]
                rates[name].append(round(steps * what.batch * what.length / seconds, 1))
                print(f"turn {turn + 1} of {rounds}: {name}", file=sys.stderr)
            systems = [
                {
                    **{"name": name, "note": what.systems[name], "tokens_per_s": rates[name], "losses": running.losses},
                    **{"first_step_s": running.first_step_s, "peak_mib": round(running.peak_mib - floor_mib, 1)},
                }
                for name, running in turns.open.items()
            ]
    settings = {
        **what.shape,
        "batch": f"{what.batch} x {what.length}",
        "trained": f"LoRA, rank {what.rank}" if what.rank else "everything",
        "turns": f"{rounds} of {steps} steps",
        "warm-up steps": WARM_UP,
    }
    raced = [name for name in what.baselines if name in rates]
    baseline = max(raced, key=lambda name: median(rates[name])) if raced else what.baselines[0]
    return result(f"cpu {case}: sustained training steps", settings, systems, baseline)


def _write_weights(case: Case, folder: Path) -> None:
    import torch

    import surokit as sk

    torch.manual_seed(0)
    sk.save(sk.Decoder(sk.DecoderConfig(**case.shape)).to(torch.bfloat16), folder)


def _bare_torch_mib() -> float:
    code = "import torch; from surokit.bench.cpu import peak_mib; print(peak_mib())"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def peak_mib() -> float:
    """Read the high-water mark of this process's resident memory, from /proc, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("This system does not report VmHWM: the memory part of the benchmark needs Linux.")


def _soon() -> float:
    return time.monotonic() + LATE_S


# -- inside a worker


def _batches(case: Case) -> Iterator[dict[str, Any]]:
    """Yield endless batches of tokens whose next one depends on the last, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(0)
    vocabulary = case.shape["vocab"]
    table = torch.randint(vocabulary, (vocabulary, 4), generator=generator)
    while True:
        ids = torch.empty(case.batch, case.length, dtype=torch.int64)
        ids[:, 0] = torch.randint(vocabulary, (case.batch,), generator=generator)
        choice = torch.randint(4, (case.batch, case.length), generator=generator)
        for t in range(1, case.length):
            ids[:, t] = table[ids[:, t - 1], choice[:, t]]
        yield {"input_ids": ids, "labels": ids}


def _transformers(case: Case, folder: str, dtype: str, compiled: bool) -> Callable[[dict[str, Any]], float]:
    import torch

    # packages that happen to be installed and that transformers would load shall not count against it
    needed = ("accelerate", "peft") if case.rank else ()
    for name in {"torchao", "bitsandbytes", "accelerate", "kernels", "torchvision", "peft"}.difference(needed):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype={"bf16": torch.bfloat16}.get(dtype, torch.float32))
    if case.rank:
        from surokit.dissection.loop import with_peft

        model = with_peft(model, case.rank, 2 * case.rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY)
    forward = torch.compile(model) if compiled else model

    def step(batch: dict[str, Any]) -> float:
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _surokit(case: Case, folder: str, name: str, compiled: bool, fused: bool) -> Callable[[dict[str, Any]], float]:
    import torch

    import surokit as sk

    recipe = sk.recipes[name].lora(rank=case.rank, alpha=2 * case.rank) if case.rank else sk.recipes[name]
    model = sk.load(folder, dtype=torch.bfloat16)
    if fused:
        sk.fuse(model)
    session = sk.Session(
        model,
        [next(_batches(case))],
        optimizer=sk.AdamW(lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY),
        recipe=recipe,
        schedule=None,
        clip=None,
        compile=compiled,
    )
    return lambda batch: float(session.step(batch).loss)


def _start(case: str, name: str, folder: str) -> tuple[dict[str, Any], Answers]:
    """Return (a first line, the function that answers {"steps": n}) of a system of a case, by its name."""
    what = CASES[case]
    system, *how = name.split(", ")
    library, _, kind = system.partition(" ")
    if library == "surokit":
        step = _surokit(what, folder, kind or "bf16", "compiled" in how, "fused" in how)
    else:
        step = _transformers(what, folder, kind, "compiled" in how)
    batches = _batches(what)

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        todo = [next(batches) for _ in range(request["steps"])]
        began = time.perf_counter()
        losses = [step(batch) for batch in todo]
        return {"seconds": time.perf_counter() - began, "losses": losses, "peak_mib": peak_mib()}

    return {"ready": True}, answer


if __name__ == "__main__":
    sys.exit(serve(lambda: _start(*sys.argv[1:])))
