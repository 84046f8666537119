"""A device that is not there, a model without values, a folder that cannot be written: refused in plain words."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import surokit as sk
from surokit import texts
from surokit.places import find_device, make_folder, write_whole
from tests.refusals import refused
from tests.train.toys import Toy, make_batches, make_session


def decoder(device: str | None = None) -> sk.Decoder:
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=32, ffn=48)
    return sk.Decoder(config, device=device, dtype=torch.bfloat16)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which nothing can be made, for root neither."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    make, open_ = Path.mkdir, os.open

    def within(path: Any) -> bool:
        return isinstance(path, str | Path) and Path(path).is_relative_to(folder)

    def mkdir(self: Path, *args: Any, **options: Any) -> None:
        if within(self) and not self.is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        make(self, *args, **options)

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if within(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_(path, flags, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(os, "open", opened)
    return folder


class TestDevices:
    def test_what_is_there_is_found(self) -> None:
        assert find_device("cpu", "load") == torch.device("cpu")
        assert find_device(torch.device("meta"), "load") == torch.device("meta")

    def test_without_one_the_gpu_if_there_is_one(self, two_gpus: None) -> None:
        assert find_device(None, "load") == torch.device("cuda")
        assert find_device("cuda:1", "load") == torch.device("cuda:1")

    def test_without_one_and_without_a_gpu(self, no_cuda: None) -> None:
        assert find_device(None, "load") == torch.device("cpu")

    @pytest.mark.parametrize("built", [None, "13.0"])
    def test_cuda_that_is_not_there(self, built: str | None, no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", built)
        why = "finds no CUDA device" if built else "built without CUDA"
        with pytest.raises(ValueError, match=rf"load\(device='cuda'\): .*{why}.*device='cpu' works here"):
            find_device("cuda", "load")

    def test_a_gpu_beyond_the_last(self, two_gpus: None) -> None:
        with refused(ValueError):
            find_device("cuda:2", "load")

    def test_no_device_at_all(self) -> None:
        with refused(ValueError):
            find_device("gpu", "load")

    def test_where_models_are_made_and_loaded(self, no_cuda: None, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"Decoder\(device='cuda'\)"):
            decoder("cuda")
        sk.save(decoder(), tmp_path / "model")
        with pytest.raises(ValueError, match=r"load\(device='cuda:0'\)"):
            sk.load(tmp_path / "model", device="cuda:0")


class TestMeta:
    def test_a_session(self) -> None:
        with refused(ValueError):
            make_session(Toy().to("meta"))

    def test_where_values_are_asked_for(self, tmp_path: Path) -> None:
        model = decoder("meta")
        ids = make_batches(1)[0]["input_ids"]
        with refused(ValueError):
            sk.generate(model, ids, 2)
        with refused(ValueError):
            sk.save(model, tmp_path / "model")
        with refused(ValueError):
            sk.compare(model, make_batches(1)[0], sk.FP8)
        sk.apply(model, sk.BF16.lora(rank=2))
        with refused(ValueError):
            sk.save_adapter(model, tmp_path / "adapter")
        assert not list(tmp_path.iterdir())


class TestWhatIsNoModel:
    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("apply", (sk.FP8,)),
            ("compare", ({}, sk.FP8)),
            ("fuse", ()),
            ("generate", (None, 2)),
            ("merge", ()),
            ("save", ("model",)),
            ("save_adapter", ("adapter",)),
            ("unmerge", ()),
            ("Session", ([],)),
        ],
    )
    def test_it_is_said(self, name: str, arguments: tuple[Any, ...]) -> None:
        with refused(TypeError):
            getattr(sk, name)([], *arguments)

    def test_precision(self) -> None:
        with refused(TypeError), sk.precision([], "bf16"):  # type: ignore[arg-type]
            pass

    @pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.float8_e4m3fn])
    def test_a_dtype_that_parameters_cannot_have(self, dtype: Any, tmp_path: Path) -> None:
        sk.save(decoder(), tmp_path / "model")
        with refused(ValueError):
            sk.load(tmp_path / "model", dtype=dtype)
        with refused(ValueError):
            sk.Decoder(decoder().config, dtype=dtype)


class TestFolders:
    def test_one_that_is_made(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "a" / "b", "run directory")
        assert not list((tmp_path / "a" / "b").iterdir())

    def test_one_that_cannot_be_made(self, read_only: Path) -> None:
        with refused(PermissionError):
            make_folder(read_only / "run", "run directory")

    def test_one_in_which_nothing_can_be_made(self, read_only: Path) -> None:
        with refused(PermissionError):
            make_folder(read_only, "run directory")

    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with refused(OSError):
            make_folder(tmp_path / "file" / "run", "run directory")

    def test_a_session_and_a_live_panel_say_it_at_once(self, read_only: Path) -> None:
        with refused(PermissionError):
            make_session(run_dir=read_only / "run")
        with refused(PermissionError):
            sk.Live(run_dir=read_only / "run", view="text")

    def test_models_adapters_and_tokenizers(self, read_only: Path) -> None:
        model = decoder()
        for folder in (read_only, read_only / "new"):
            with refused(sk.train.CheckpointError):
                sk.save(model, folder)
        sk.apply(model, sk.BF16.lora(rank=2))
        with refused(sk.train.CheckpointError):
            sk.save_adapter(model, read_only / "adapter")
        with refused(PermissionError):
            sk.train_tokenizer(texts.SHAKESPEARE, vocab_size=300).save(read_only / "tokenizer")
        assert not list(read_only.iterdir())

    def test_only_the_folder_itself_has_to_be_writable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is above it may be somebody else's, or another disk."""
        folder = tmp_path / "disk"
        folder.mkdir()
        make = Path.mkdir

        def mkdir(self: Path, *args: Any, **options: Any) -> None:
            if self.parent == tmp_path and not self.is_dir():
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            make(self, *args, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        sk.save(decoder(), folder)
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


class TestAFileIsWrittenWhole:
    def test_or_left_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "file.json"
        write_whole(path, "first")
        write_whole(path, "äöü".encode())
        assert path.read_text(encoding="utf-8") == "äöü"

        def full(self: Path, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "third")
        assert path.read_text(encoding="utf-8") == "äöü"
        assert [p.name for p in tmp_path.iterdir()] == ["file.json"]
