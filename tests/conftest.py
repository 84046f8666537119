"""Shared pieces of the tests: a small model that needs none of ours, and a generator."""

import os
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from tests import refusals
from tests.sampling import leave_out

# Without a CUDA device Triton kernels run in Triton's interpreter. Triton asks for this when it is first imported (which torch
# does in torch.compile), so it is said here, before any test; tests/kernels/interpreter.py corrects the interpreter's casts.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what runs in its background with Ctrl-C ignored, and Python keeps that; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis draws the same examples in each run, however long one takes: a test that fails has failed for a change. `make soak`
# looks further, with --hypothesis-profile explore. The environment of `make test-gpu` may be without it.
with suppress(ImportError):
    import hypothesis

    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True, suppress_health_check=slow)
    hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=slow)
    hypothesis.settings.load_profile("repeat")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run every case of tests that are marked sampled")
    parser.addoption(
        "--write-refusals",
        action="store_true",
        help="write the messages that tests hear into their tables; every case runs",
    )
    parser.addoption("--fast", action="store_true", help="leave out the files and folders of tests/slow.txt")
    parser.addoption("--present", action="store_true", help="leave out what only compiles for GPUs that are not here")
    parser.addoption(
        "--book", type=Path, help="keep each outcome in this JSON file, and go on behind those that it has"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(refusals.plugin(config))
    if path := config.getoption("--book"):
        from tests.keeping import Keeping

        config.pluginmanager.register(Keeping(path))


@pytest.fixture(autouse=True, scope="session")
def _temporary(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytestconfig.stash[refusals.TEMPORARY] = tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def _of_what_is_present(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--present"):
        from tests.kernels.compiling import Compiled

        why = "it compiles for GPUs that are not here: `make test` does so"
        monkeypatch.setattr(Compiled, "of", lambda *_: pytest.skip(why))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is slow where only the fast half is wanted, before it is imported."""
    if not config.getoption("--fast") or collection_path not in slow_tests():
        return None
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if collection_path in named else True


@cache
def slow_tests() -> frozenset[Path]:
    lines = Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(Path(__file__).parents[1] / line for line in lines if line and line[0] != "#")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole") and not config.getoption("--write-refusals"):
        items[:], left_out = leave_out(items)
        config.hook.pytest_deselected(items=left_out)


class Tiny(nn.Module):
    """Embedding, two blocks of linear layers, head: forward(input_ids, labels) -> .loss, like a language model."""

    def __init__(self, vocab: int = 32, width: int = 32, blocks: int = 2, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up_proj": nn.Linear(width, 2 * width, bias=False, dtype=dtype),
                    "down_proj": nn.Linear(2 * width, width, bias=True, dtype=dtype),
                }
            )
            for _ in range(blocks)
        )
        self.lm_head = nn.Linear(width, vocab, bias=False, dtype=dtype)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = x + layer["down_proj"](torch.nn.functional.silu(layer["up_proj"](x)))
        logits = self.lm_head(x).float()
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return Tiny()


@pytest.fixture
def batch():
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def one_process():
    """A process group of this process alone, and its mesh."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()
