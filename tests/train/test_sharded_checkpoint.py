"""Checkpoints of sharded models: 4 processes save, 2 go on, then 1 without a process group, then 3 from what that one wrote.

The processes run once for each number (sharded_checkpoint_ranks.py). What they loaded is compared bit for bit with what was saved,
put together here from the pieces without the code that is tested; losses with a single process that trains on all rows and
never stops, up to the order of sums.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import surokit as sk
from surokit.cli import main
from surokit.kernels.reference.adamw8bit import dequantize, quantize
from surokit.train import AdamW, AdamW8bit, CheckpointError, ResumeError, Session, checkpoint_files
from surokit.train.sharded_files import DividedTensors
from tests.clocks import PATIENCE_S, until
from tests.processes import ROOT, found_by
from tests.refusals import refused
from tests.train.sharded_checkpoint_ranks import (
    CASES,
    FIRST,
    SAVED,
    Data,
    Result,
    begin,
    local,
    losses,
    make,
    notes,
    same,
    state_of,
    to_write,
    write,
)
from tests.train.toys import Toy, assert_same_state, make_batches, make_session

TIMEOUT_S = 300
MODULE = "tests.train.sharded_checkpoint_ranks"
ALONG_ROWS = ("w_hot", "m_hot", "v_hot", "w", "m", "v", "acc", "out")  # of ZenFlow: a weight's rows are last
AS_WEIGHTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "master")
CODED = {"exp_avg": "absmax", "exp_avg_sq": "absmax_sq"}
OF_A_SHARD = ("key", *CODED.values())


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def launched(ranks: int, runs: Path, folder: Path) -> list[dict[str, Result]]:
    folder.mkdir()
    found = found_by(MODULE, ranks, folder, TIMEOUT_S, str(ranks), str(runs))
    for i, result in enumerate(found):
        failed = [f"rank {i} of {ranks}, {name}:\n{of['error']}" for name, of in result.items() if "error" in of]
        assert not failed, "\n".join(failed)
    return found


@pytest.fixture(scope="session")
def chain(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Result]]]:
    """What each process of each number of them found, by case."""
    folder = tmp_path_factory.mktemp("chain")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {ranks: launched(ranks, runs, folder / str(ranks)) for ranks in (FIRST, 2)}
        found[1] = [{name: alone(name, runs / name) for name in CASES}]
        found[3] = launched(3, runs, folder / "3")
    finally:
        torch.set_num_threads(threads)
    return found


def alone(name: str, run_dir: Path) -> Result:
    """Resume what two processes saved in one that has no process group, take a step and save."""
    session = Session.resume(run_dir, make(CASES[name], seed=9), data=Data())
    result: Result = {"loaded": state_of(session), "step": session.steps}
    session.run(1)
    session.save()
    return result | {"saved": state_of(session), "losses": losses(session)[-1:], "notes": notes(session)}


def whole(found: list[Result], moment: str) -> dict[str, Tensor]:
    """Weights and the optimizer's state of all processes put together; what belongs to a shard alone is left out."""
    parts = [result[moment] for result in found]

    def joined(pieces: list[Tensor], dim: int | None) -> Tensor:
        if dim is not None:
            return torch.cat([piece.view(torch.uint8) if piece.itemsize == 1 else piece for piece in pieces], dim)
        assert all(torch.equal(piece, pieces[0]) for piece in pieces)
        return pieces[0]

    first, tensors = parts[0], {}
    for name in first["weights"]:
        divided = 0 if name in parts[-1]["divided"] or len(parts) == 1 else None
        tensors[name] = joined([part["weights"][name] for part in parts], divided)
    for name, state in first["state"].items():
        for key in state:
            if key not in OF_A_SHARD:
                dim = -1 if key in ALONG_ROWS else 0 if key in AS_WEIGHTS else None
                tensors[f"{name} {key}"] = joined([part["state"][name][key] for part in parts], dim)
    return tensors


def found_in(chain: Any, ranks: int, name: str) -> list[Result]:
    return [result[name] for result in chain[ranks]]


# -- the chain


@pytest.mark.parametrize("name", CASES)
def test_as_many_processes_go_on_bit_for_bit(chain: Any, name: str) -> None:
    """From values of the moment of asking, though training went on while they were written."""
    for result in found_in(chain, FIRST, name):
        assert same(result["saved"], result["loaded"])
        assert same(result["unbroken"], result["resumed"])
        assert not same(result["saved"], result["resumed"])
        assert result["again"] == result["losses"][-2:]
        assert not result["notes"]


@pytest.mark.parametrize(("before", "now"), [(FIRST, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize("name", CASES)
def test_another_number_of_processes_has_the_same_state(chain: Any, name: str, before: int, now: int) -> None:
    """Weights, moments, masters, hot columns and sums of gradients, bit for bit, however they are divided."""
    saved, loaded = whole(found_in(chain, before, name), "saved"), whole(found_in(chain, now, name), "loaded")
    assert saved.keys() == loaded.keys()
    again = [f"{n} {key}" for n, s in chain[now][0][name]["loaded"]["state"].items() for key in CODED if "absmax" in s]
    assert (name == "8-bit") == bool(again)
    assert not [key for key, value in saved.items() if key not in again and not torch.equal(value, loaded[key])]
    assert {result["step"] for result in found_in(chain, now, name)} == {{2: SAVED, 1: SAVED + 1, 3: SAVED + 2}[now]}


@pytest.mark.parametrize(("before", "now"), [(FIRST, 2), (2, 1), (1, 3)])
def test_moments_of_8_bits_are_encoded_again(chain: Any, before: int, now: int) -> None:
    """In blocks that begin with each shard: what was decoded is encoded as it would be anew."""
    old, new = found_in(chain, before, "8-bit"), found_in(chain, now, "8-bit")
    names = [name for name, state in new[0]["loaded"]["state"].items() if "absmax" in state]
    assert names
    for name in names:
        for key, scale in CODED.items():
            states = [result["saved"]["state"][name] for result in old]
            decoded = torch.cat([dequantize(state[key], state[scale], key == "exp_avg") for state in states])
            rows = 0
            for result in new:
                state = result["loaded"]["state"][name]
                codes, scales = quantize(decoded[rows : rows + len(state[key])], key == "exp_avg")
                assert torch.equal(codes, state[key])
                assert torch.equal(scales, state[scale])
                rows += len(codes)
            assert rows == len(decoded)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_a_run_that_never_stopped(chain: Any, name: str) -> None:
    session = begin(CASES[name], make(CASES[name]), Data(), None)
    session.run(SAVED + 3)
    found = [
        math.fsum(result["losses"][i] for result in found_in(chain, ranks, name)) / ranks
        for ranks, i in ((FIRST, 0), (FIRST, 1), (2, 0), (1, 0), (3, 0))
    ]
    drawn = CASES[name].optimizer.options.get("rounding") == "stochastic"  # each shard draws bits of its own
    assert found == pytest.approx(losses(session), rel=5e-3 if drawn else 1e-3)


def test_what_is_not_as_it_was_is_said(chain: Any) -> None:
    for ranks in (2, 1, 3):
        for name in CASES:
            said = found_in(chain, ranks, name)[0]["notes"][-1]
            assert "drawn anew" in said
            assert ("8-bit moments" in said) == (name == "8-bit")
            assert not any(result["notes"] for result in found_in(chain, ranks, name)[1:])


def test_a_full_disk_of_one_process_ends_the_save_in_all(chain: Any) -> None:
    one, other = found_in(chain, 2, "bf16")
    assert one["refused"] == other["refused"]
    assert "No space left on device (rank 1)" in one["refused"]
    assert one["untouched"]
    assert other["untouched"]


def test_rank_0_writes_a_model_that_all_hold(chain: Any) -> None:
    """In the format of one process, besides each one's random states."""
    results = found_in(chain, 2, "copies")
    for result in results:
        assert result["files"] == ["model.safetensors", "rank-00000.pt", "rank-00001.pt", "session.json", "state.pt"]
        assert result["same"]
    assert results[0]["losses"] != results[1]["losses"]


def test_copies_of_a_shard_are_written_once(chain: Any) -> None:
    """And as many processes as there were go on from the folder that rank 0 was given, with exist="resume"."""
    results = found_in(chain, FIRST, "hybrid")
    assert all(result["same"] and result["step"] == 1 for result in results)
    assert same(results[0]["saved"], results[2]["saved"])
    assert not same(results[0]["saved"], results[1]["saved"])
    size = sum(t.nbytes for t in whole(results[:2], "saved").values())
    assert size < results[0]["written"] < 1.5 * size  # torch.save's frame around each piece
    session = Session.resume(results[0]["path"], make(CASES["fp8"], seed=7), data=Data())
    loaded, saved = whole([{"now": state_of(session)}], "now"), whole(results[:2], "saved")
    assert not [key for key, value in saved.items() if not torch.equal(value, loaded[key])]


# -- folders for others


def assert_same_folder(one: Path, other: Path) -> None:
    """Byte for byte."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert names[0] == names[1]
    assert not [name for name in names[0] if (one / name).read_bytes() != (other / name).read_bytes()]


@pytest.mark.parametrize("name", to_write())
def test_a_sharded_models_folder_is_that_of_a_whole_one(chain: Any, runs: Path, tmp_path: Path, name: str) -> None:
    write(to_write()[name], name, tmp_path)
    assert_same_folder(tmp_path / name, runs / "folders" / name)


def test_a_folder_that_cannot_be_written_is_said_in_all(chain: Any) -> None:
    one, other = (result["refused"] for result in found_in(chain, 2, "folders"))
    assert one == other
    assert "a file is a file" in one


@pytest.mark.parametrize("name", ["bf16", "qfp4"])
def test_a_checkpoint_becomes_a_folder(
    chain: Any, runs: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sharded one, and one that a single process wrote."""
    for step in (SAVED, SAVED + 2):
        path = runs / name / "checkpoints" / f"step-{step:06d}"
        assert main(["export", str(path), str(tmp_path / f"out-{step}"), "--base", "somebody/base"]) == 0
        assert capsys.readouterr().out == f"{tmp_path / f'out-{step}'}\n"
        model = Session.resume(path, make(CASES[name], seed=5), data=Data()).model
        if name == "bf16":
            sk.save(model, tmp_path / f"expected-{step}")
        else:
            sk.save_adapter(model, tmp_path / f"expected-{step}", base="somebody/base")
        assert_same_folder(tmp_path / f"out-{step}", tmp_path / f"expected-{step}")
    assert main(["export", str(path), str(tmp_path / "of-nobody")]) == 0
    told = capsys.readouterr()
    assert told.out == f"{tmp_path / 'of-nobody'}\n"
    assert ("--base NAME writes it down" in told.err) == (name != "bf16")


# -- one process with a sharded model, and what can go wrong


class Killed(BaseException):
    """The process is gone, as far as the code can tell."""


@pytest.fixture
def alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Output(NamedTuple):
    """FSDP2 finds tensors in tuples, and in a SimpleNamespace none."""

    loss: Tensor
    logits: Tensor


class Tuples(Toy):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        found = super().forward(input_ids, labels)
        return Output(found.loss, found.logits)


def toy(seed: int, divided: bool, width: int = 16) -> nn.Module:
    model = Tuples(seed, width)
    if divided:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.fixture(params=["sharded", "whole"])
def divided(request: pytest.FixtureRequest) -> bool:
    """Whether the model is sharded. Both formats are written, checked and found in one way."""
    if request.param == "sharded":
        request.getfixturevalue("alone_in_a_group")
    return bool(request.param == "sharded")


def saved_twice(tmp_path: Path, divided: bool) -> Session:
    session = make_session(toy(0, divided), run_dir=tmp_path / "run", keep=None)
    for _ in range(2):
        session.run(1)
        session.save()
    return session


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.name != "session.json")


def test_a_flipped_byte_is_found_and_the_checkpoint_before_taken(tmp_path: Path, divided: bool) -> None:
    session = saved_twice(tmp_path, divided)
    last = tmp_path / "run" / "checkpoints" / "step-000002"
    for file in files_of(last):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        words = re.escape(f"step-000002 ({file.name} is not as it was written) is damaged. step-000001 was taken")
        with pytest.warns(UserWarning, match=f"{words} instead: 1 step of the run is lost"):
            again = Session.resume(tmp_path / "run", toy(1, divided), data=make_batches())
        assert again.steps == 1
        assert re.search(words, notes(again)[-1])
        with pytest.raises(
            CheckpointError, match=f"step-000002 is incomplete .{re.escape(file.name)} is not as it was"
        ):
            Session.resume(last, toy(1, divided), data=make_batches())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert_same_state(session, Session.resume(last, toy(1, divided), data=make_batches()))


def test_a_file_that_was_cut_off_is_passed_over(tmp_path: Path, divided: bool) -> None:
    saved_twice(tmp_path, divided)
    for file in files_of(tmp_path / "run" / "checkpoints" / "step-000002"):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.warns(UserWarning, match="is damaged. step-000001 was taken instead: 1 step of the run is lost"):
            assert Session.resume(tmp_path / "run", toy(1, divided), data=make_batches()).steps == 1
        file.write_bytes(content)


def test_where_no_bytes_are_as_they_were_the_run_begins_anew(tmp_path: Path, divided: bool) -> None:
    session = make_session(toy(0, divided), run_dir=tmp_path / "run")
    session.run(1)
    (file,) = [f for f in files_of(session.save()) if f.name in ("model.safetensors", "__0_0.distcp")]
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.warns(UserWarning, match="is not as it was written.*begins anew"):
        assert make_session(toy(1, divided), run_dir=tmp_path / "run", exist="resume").steps == 0


def test_a_checkpoint_without_checksums_loads(tmp_path: Path, divided: bool) -> None:
    session = saved_twice(tmp_path, divided)
    path = tmp_path / "run" / "checkpoints" / "step-000002" / "session.json"
    meta = json.loads(path.read_text())
    assert meta.pop("crc32").keys() == meta["files"].keys()
    path.write_text(json.dumps(meta))
    assert_same_state(session, Session.resume(tmp_path / "run", toy(1, divided), data=make_batches()))


@pytest.mark.parametrize("where", ["content", "sync", "rename"])
@pytest.mark.parametrize("how", [OSError(28, "No space left on device"), Killed()], ids=["full", "killed"])
def test_the_old_state_or_the_new_one(tmp_path: Path, divided: bool, where: str, how: BaseException) -> None:
    """Whatever goes wrong in the second of two saves, at any of its calls, the first is whole or the second is there."""
    session = make_session(toy(0, divided), run_dir=tmp_path / "run")
    session.run(1)
    session.save()
    session.run(1)
    holder: Any
    holder, name = {"content": (torch, "save"), "sync": (os, "fsync"), "rename": (Path, "rename")}[where]
    original, failures = getattr(holder, name), 0
    expected: Any = CheckpointError if isinstance(how, OSError) else (CheckpointError, Killed)  # torch catches both
    for nth in range(100):
        calls = itertools.count()

        def failing(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == nth:  # noqa: B023
                raise how
            return original(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, name, failing)
            try:
                session.save()
                break
            except expected:
                failures += 1
        again = Session.resume(tmp_path / "run", toy(1, divided), data=make_batches())
        assert again.steps in (1, 2)
        if again.steps == 2:
            assert_same_state(session, again)
    assert failures > 0
    assert_same_state(session, Session.resume(tmp_path / "run", toy(1, divided), data=make_batches()))


def test_weights_only_loading_refuses_tensor_subclasses_so_there_are_none(
    tmp_path: Path, alone_in_a_group: None
) -> None:
    """torchtitan 651, PR 1414; ao 4782. Any reader of DCP's files gets plain tensors, and nothing in them is a class of ours."""
    session = make_session(toy(0, True), run_dir=tmp_path / "run", recipe="fp8")
    session.run(1)
    path = session.save()
    for file in path.glob("*.pt"):
        torch.load(file, weights_only=True)
    for file in files_of(path):
        assert b"DTensor" not in file.read_bytes()
        assert b"surokit" not in file.read_bytes().replace(str(tmp_path).encode(), b"")
    wanted = {"hidden.weight": torch.zeros(16, 16), "optim.hidden.weight.exp_avg": torch.zeros(16, 16)}
    load(wanted, checkpoint_id=path)
    weight = session.model.get_parameter("hidden.weight")
    assert torch.equal(wanted["hidden.weight"], local(weight))
    assert torch.equal(wanted["optim.hidden.weight.exp_avg"], local(session.optimizer.state[weight]["exp_avg"]))


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read .*mkdir"):
        DividedTensors(tmp_path)
    assert not (tmp_path / "made").exists()


def test_another_model_or_optimizer_is_refused_and_nothing_changes(tmp_path: Path, alone_in_a_group: None) -> None:
    saved_twice(tmp_path, divided=True)
    wide = toy(0, True, width=24)
    before = local(wide.get_parameter("hidden.weight"))
    with refused(ResumeError):
        Session.resume(tmp_path / "run", wide, data=make_batches())
    assert torch.equal(before, local(wide.get_parameter("hidden.weight")))
    with refused(ResumeError):
        Session.resume(tmp_path / "run", toy(1, True), data=make_batches(), optimizer=partial(torch.optim.SGD, lr=0.1))
    wide = toy(0, True, width=64)
    session = make_session(wide, run_dir=tmp_path / "8-bit", optimizer=AdamW8bit(lr=1e-2))
    session.run(1)
    path = session.save()
    with refused(ResumeError):
        Session.resume(path, toy(1, True, width=64), data=make_batches(), optimizer=AdamW(lr=1e-2))
    session = make_session(toy(0, True, width=64), run_dir=tmp_path / "others", optimizer=AdamW(lr=1e-2))
    session.run(1)
    path = session.save()
    with refused(ResumeError):
        Session.resume(path, toy(1, True, width=64), data=make_batches(), optimizer=AdamW8bit(lr=1e-2))


# -- in a thread


class Gate:
    """Holds back whoever writes a checkpoint until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.open, write = threading.Event(), checkpoint_files.write

        def held(*args: Any) -> Path:
            assert self.open.wait(PATIENCE_S)
            if error is not None:
                raise error
            return write(*args)

        monkeypatch.setattr(checkpoint_files, "write", held)


def test_async_save_of_cpu_tensors_writes_the_values_of_the_moment(
    tmp_path: Path, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch 144657: there later values were written."""
    session = make_session(toy(0, divided), run_dir=tmp_path / "run", keep=None)
    session.run(2)
    kept = make_session(toy(0, divided))
    kept.run(2)
    gate = Gate(monkeypatch)
    path = session.save(wait=False)
    session.step(make_batches(1, seed=5)[0])
    assert not path.exists()
    gate.open.set()
    session.saving.wait()
    assert_same_state(kept, Session.resume(path, toy(1, divided), data=make_batches()))


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(toy(0, divided), run_dir=tmp_path / "run", save_every=1, save_async=True, keep=None)
    gate = Gate(monkeypatch)
    runner = threading.Thread(target=session.run, args=(3,))
    runner.start()
    until(lambda: session.steps == 2)
    assert not (tmp_path / "run" / "checkpoints").exists()
    gate.open.set()
    runner.join(PATIENCE_S)
    names = [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert names == ["step-000001", "step-000002", "step-000003"], "the run's end has waited for the last one"


def test_an_error_of_the_thread_is_told_and_raised_later(
    tmp_path: Path, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(toy(0, divided), run_dir=tmp_path / "run")
    session.run(1)
    with monkeypatch.context() as patch:
        gate = Gate(patch, CheckpointError("no space left."))
        session.save(wait=False)
        gate.open.set()
        with pytest.warns(UserWarning, match="no space left"), pytest.raises(CheckpointError, match="no space left"):
            session.run(2)
    assert session.steps == 3
    assert notes(session) == ["no space left."]
    path = session.save()
    assert_same_state(session, Session.resume(path, toy(1, divided), data=make_batches()))


def test_many_saves_make_one_group(tmp_path: Path, alone_in_a_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group for each would leak (pytorch 170163), and one of some processes only would hang the others (152310)."""
    made, new_group = [], dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        made.append((args, options))
        return new_group(*args, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    session = make_session(toy(0, True), run_dir=tmp_path / "run", save_every=1, save_async=True)
    session.run(3)
    Session.resume(tmp_path / "run", toy(1, True), data=make_batches())
    assert made == [((), {"backend": "gloo"})], "one of all processes, on the CPU"


def test_the_interpreter_ends_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    code = (
        "from tests.train.toys import make_session\n"
        f"session = make_session(run_dir={str(tmp_path / 'run')!r})\n"
        "session.run(1)\n"
        "session.save(wait=False)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE_S)
    assert Session.resume(tmp_path / "run", Toy(), data=make_batches()).steps == 1
