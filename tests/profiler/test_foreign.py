"""Profiles of code that is not ours: trainers, convolutions, trouble in every place, threads, workers; and what a profile is told
beside times: shapes, settings, garbage collection."""

import gc
import sys
import threading
import time
import warnings
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from surokit.profiler import Profile, profile, profile_calls
from surokit.profiler.analysis.timeline import Event, Kind
from surokit.profiler.record.recorder import Recorder
from surokit.profiler.record.recording import RATES
from surokit.profiler.record.tracer import RawTrace
from tests.profiler.models import Net, by, line_of, row, train
from tests.refusals import refused


def recorded(p):
    r = p._recording
    assert r is not None
    return r


def flops(p):
    return int(recorded(p).shaped.flop_E.sum())


def net_flops(tokens=16, width=16, vocab=32, layers=2):
    """Of a training step of Net: forward, and twice that backward, without the gradient of the token ids."""
    return 3 * 2 * tokens * (layers * 8 * width * width + width * vocab)


# ---------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("warmup", [2, 3, 5])
def test_one_warmup_step_has_shapes_and_measured_ones_have_none(warmup):
    with profile(steps=2, warmup=warmup) as p:
        train(warmup + 3)
    assert (p.summary["steps"], p.summary["warmup"]) == (2, warmup)
    assert flops(p) == net_flops()
    shaped = recorded(p).shaped
    assert set(shaped.rate_E[shaped.flop_E > 0].tolist()) == {RATES.index("fp32")}
    assert shaped.timeline.end_E.max() < recorded(p).marks_ns[warmup - 1]
    assert recorded(p).timeline.start_E.min() > shaped.timeline.end_E.max()  # the warm-up was dropped


def test_measured_steps_are_whole():
    with profile(steps=3, warmup=3) as p:
        train(8)
    r = recorded(p)
    counts = np.histogram(r.timeline.start_E, np.array(r.marks_ns[2:]))[0]
    assert len(counts) == 3
    assert counts.min() == counts.max() > 50  # zero_grad and whatever else lies between two steps included


@pytest.mark.parametrize(("warmup", "ran"), [(0, 3), (1, 3), (3, 3), (3, 2), (3, 1)])
def test_blocks_that_end_early_use_what_there_is(warmup, ran):
    with profile(steps=9, warmup=warmup) as p:
        train(ran)
    assert p.summary["steps"] == max(ran - warmup, 1)
    assert by(p.modules, "module").loc["layers.0.up", "calls"] == 1


def test_the_users_steps_have_their_own_shapes():
    model = Net()
    with profile(steps=2, warmup=2) as p:
        for _ in range(5):
            train(3, model)
            p.step()
    assert p.summary["steps"] == 2
    assert flops(p) == 3 * net_flops()
    assert by(p.modules, "module").loc["layers.0.up", "calls"] == 3


@pytest.mark.parametrize("warmup", [2, 3, 5])
def test_marks_without_an_optimizer_have_the_shapes_of_one_step(warmup):
    model, ids = Net(), torch.zeros(2, 8, dtype=torch.int64)
    with profile(steps=2, warmup=warmup) as p:
        for _ in range(warmup + 2):
            model(ids).square().mean().backward()
            p.step()
    assert (p.summary["steps"], p.summary["warmup"]) == (2, warmup)
    assert flops(p) == net_flops()


@pytest.mark.parametrize("warmup", [0, 1])
def test_too_few_warmup_steps_for_shapes_are_said(warmup):
    with profile(steps=2, warmup=warmup) as p:
        train(warmup + 2)
    assert p.summary["gflop_per_step"] is None
    assert any("need warmup=2 or more" in note for note in p.notes)


def test_the_optimizers_work_is_its_own():
    model = Net()
    with profile(steps=2, warmup=3) as p:
        train(6, model)
    shaped = recorded(p).shaped
    names = shaped.timeline.names
    assert "Optimizer.step#AdamW.step" in names
    (moved,) = {
        int(b) for b, name in zip(shaped.bytes_E, shaped.timeline.name_E) if names[name] == "aten::_fused_adamw_"
    }
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if torch.__version__ < "2.13":  # its profiler keeps no shapes of a list's tensors
        weights = 0
    assert moved == pytest.approx(
        8 * weights, rel=0.01
    )  # weight, gradient and both moments, which its schema says it writes


class Subclass(torch.optim.AdamW):  # torch calls its hooks behind this step and behind the one that it calls
    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_whose_step_calls_its_base_class_is_one_step():
    model = Net()
    with profile(steps=2, warmup=3) as p:
        train(6, model, Subclass(model.parameters()))
    assert (p.summary["steps"], flops(p)) == (2, net_flops())
    assert by(p.modules, "module").loc["layers.0.up", "calls"] == 1


def test_products_before_the_first_module_leave_flops_unknown():
    weight, loss = torch.ones(8, 8, requires_grad=True), nn.MSELoss()
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with profile(steps=2, warmup=3) as p:
        for _ in range(6):
            loss(torch.ones(4, 8) @ weight, torch.ones(4, 8)).backward()
            optimizer.step()
    assert p.summary["gflop_per_step"] is None
    assert any("multiply before they call a module" in note for note in p.notes)


@pytest.mark.parametrize("warmup", [1, 2, 4])
def test_repeated_calls_have_the_shapes_of_one_call(warmup):
    model = Net()
    p = profile_calls(lambda: train(2, model), steps=2, warmup=warmup)
    assert flops(p) == 2 * net_flops()
    assert (p.summary["unprofiled_ms"] is not None) == (warmup == 4)


def test_what_was_launched_by_the_end_belongs_to_the_block():
    launch = [
        Event(Kind.RUNTIME, "cudaLaunchKernel", at, at + 2, 1, number) for number, at in ((1, 10), (2, 30), (3, 60))
    ]
    kernels = [Event(Kind.KERNEL, str(number), at, at + 40, 7, number) for number, at in ((1, 15), (2, 70), (3, 120))]
    recorder = Recorder(gpu=False, sample=False)
    recorder._parts = [
        cast(RawTrace, SimpleNamespace(rows=launch + kernels, messages=(), start_ns=5, end_ns=200, shaped=True))
    ]
    cut = recorder.cut(5, 50, 5)
    assert [n for n in cut.timeline.names if n != "cudaLaunchKernel"] == ["1", "2"]  # 2 ran after the end
    assert len(cut.timeline) == 4
    assert any("with the shapes" in note for note in cut.notes)


def test_a_block_without_modules_or_inside_a_range_is_recorded_in_one_piece():
    x = torch.ones(8, 8, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1e-3)

    def steps():
        for _ in range(6):
            (x @ x).sum().backward()
            optimizer.step()

    with profile(steps=2, warmup=3) as raw:
        steps()
    with profile(steps=2, warmup=3) as ranged, torch.profiler.record_function("epoch"):
        train(6)
    for p in (raw, ranged):
        assert p.summary["steps"] == 2
        assert p.summary["busy_ms"] > 0
        assert recorded(p).shaped is None


def test_a_block_that_stops_calling_modules_is_recorded_in_one_piece():
    x, calls = torch.ones(8, 8, requires_grad=True), nn.Identity()
    optimizer = torch.optim.SGD([x], lr=1e-3)
    with profile(steps=2, warmup=3) as p:
        calls(x)
        for _ in range(6):
            optimizer.step()
            (x @ x).sum().backward()
    assert p.summary["steps"] == 2
    assert p.summary["busy_ms"] > 0
    assert p.summary["gflop_per_step"] is None


def test_a_recording_that_never_began_again_is_said():
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    with profile(steps=2, warmup=2) as p:
        for step in range(5):
            (module(x) if step == 0 else x @ module.weight).sum().backward()
            optimizer.step()
    assert p.summary["steps"] == 2
    assert any("no module was called behind the warm-up" in note for note in p.notes)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_block_that_ends_within_the_warm_up_lacks_nothing(steps, optimizers):
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    each = [torch.optim.SGD([p], lr=1e-3) for p in module.parameters()][:optimizers]
    with profile() as p:
        for _ in range(steps):
            module(x).sum().backward()
            for optimizer in each:
                optimizer.step()
    assert by(p.modules, "module").loc["Linear", "calls"] >= 1
    assert not any("no module was called" in note for note in p.notes)


def test_a_step_inside_the_backward_pass_is_recorded():
    x = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(x.parameters(), lr=1e-3)

    def step(parameter):
        optimizer.step()

    x.bias.register_post_accumulate_grad_hook(step)
    with profile(steps=2, warmup=3) as p:
        for _ in range(6):
            torch.utils.checkpoint.checkpoint(x, torch.ones(2, 8), use_reentrant=False).sum().backward()
    assert p.summary["steps"] == 2
    assert by(p.modules, "module").loc["Linear", "calls"] >= 1


# ---------------------------------------------------------------------------------------------------------------- settings


def settings(p):
    return dict(recorded(p).settings)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((8,), i % 32)


def test_settings_are_read_while_the_code_runs():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profile(steps=2, warmup=1, usd_per_gpu_hour=2.5) as p:
        torch.set_float32_matmul_precision("high")
        try:
            with torch.autograd.set_detect_anomaly(True, check_nan=False), torch.autocast("cpu", torch.bfloat16):
                for ids in torch.utils.data.DataLoader(Numbers(), batch_size=2):
                    model(ids).sum().backward()
                    optimizer.step()
        finally:
            torch.set_float32_matmul_precision("highest")
    found = settings(p)
    assert found["float32_matmul_precision"] == "high"
    assert (found["anomaly"], found["deterministic"], found["cudnn.benchmark"]) == ("True", "False", "False")
    assert found["optimizer"] == f"AdamW fused=None foreach=False, {len(list(model.parameters()))} tensors"
    assert found["loader"] == "workers=0 pin_memory=False"
    assert found["autocast"] == "bfloat16"
    assert int(found["threads"]) == torch.get_num_threads()
    assert int(found["cores"]) >= 1
    assert recorded(p).usd_per_gpu_hour == 2.5
    with profile(steps=1, warmup=0) as p:
        for ids in torch.utils.data.DataLoader(Numbers(), batch_size=2):
            model(ids).sum().backward()
            optimizer.step()
    assert settings(p)["loader"] == "workers=0 pin_memory=False"
    with profile() as p:
        train(1)
    assert (settings(p)["loader"], settings(p)["autocast"], settings(p)["anomaly"]) == ("", "", "False")


def test_a_negative_price_is_refused():
    with refused(ValueError):
        profile(usd_per_gpu_hour=-1)


def test_garbage_collection_is_timed_and_its_settings_are_left_alone():
    before = (list(gc.callbacks), gc.get_threshold(), gc.isenabled())
    with profile(steps=3, warmup=1) as p:
        train(4, each=lambda step, loss: gc.collect())
    r = recorded(p)
    inside = (r.start_C > r.marks_ns[0]) & (r.end_C < r.marks_ns[-1])
    assert inside.sum() >= 2
    assert (r.end_C > r.start_C).all()
    assert (gc.callbacks, gc.get_threshold(), gc.isenabled()) == before


# ---------------------------------------------------------------------------------------------------------------- foreign code


def test_a_transformers_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        max_steps=7,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
    )
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(steps=3, warmup=3) as p:
            trainer.train()
    rows = by(p.modules, "module")
    assert p.summary["steps"] == 3
    assert rows.loc["model.layers.1.mlp.down_proj", "calls"] == 2  # both of an accumulated step
    assert rows.loc["model.layers.1.mlp.down_proj", "backward_ms"] > 0
    assert p.summary["tokens_per_s"] == pytest.approx(64 / p.summary["wall_ms"] * 1e3)
    assert settings(p)["optimizer"].startswith("AdamW fused=True")
    assert settings(p)["loader"] == "workers=0 pin_memory=False"
    assert flops(p) > 3 * 2 * 64 * 2 * 4 * 32 * 32


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(11, 3, 1)

    def forward(self, x):
        return self.out(torch.cat([x, self.up(self.middle(self.down(x).relu()).relu())], 1))


def test_a_small_unet():
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(2, 3, 16, 16)
    with profile(steps=2, warmup=3) as p:
        for _ in range(5):
            (model(x) - x).square().mean().backward()
            optimizer.step()
    rows = by(p.modules, "module")
    assert {"down", "middle", "up", "out"} <= set(rows.index)
    assert rows.loc["up", "forward_ms"] > 0 < rows.loc["up", "backward_ms"]
    forward = 2 * 2 * (64 * 8 * 27 + 64 * 8 * 72 + 64 * 8 * 8 * 4 + 256 * 3 * 11)
    assert flops(p) == 3 * forward - 2 * 2 * 64 * 8 * 27  # the image needs no gradient


def test_workers_and_accumulation():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1)
    with profile(steps=2, warmup=2) as p:
        for number, ids in enumerate(loader):
            model(ids).sum().backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert p.summary["steps"] == 2
    assert by(p.modules, "module").loc["layers.1.down", "calls"] == 4
    assert settings(p)["loader"] == "workers=1 pin_memory=False"
    assert p.summary["phases_ms"]["data"] > 0


def test_training_on_another_thread_is_said():
    with profile(steps=2, warmup=3) as p:
        thread = threading.Thread(target=train, args=(6,))
        thread.start()
        thread.join()
        torch.ones(3).sum()
    assert any("ran on another thread" in note for note in p.notes)
    assert p.summary["steps"] == 2


def test_threads_beside_the_training_do_no_harm():
    over = threading.Event()

    def tokenize():
        while not over.is_set():
            torch.arange(1000).sum()

    thread = threading.Thread(target=tokenize)
    thread.start()
    with profile(steps=3, warmup=3) as p:
        train(6)
    over.set()
    thread.join()
    assert flops(p) == net_flops()
    assert set(recorded(p).timeline.thread_E.tolist()) == {threading.get_native_id()}


class Boom(Exception):
    pass


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom("backward")


class BadStep(torch.optim.SGD):  # its steps call another class's, which torch wraps, too
    turns = 0

    def step(self, closure=None):
        type(self).turns += 1
        if type(self).turns == 5:
            raise Boom("optimizer")
        return super().step(closure)


def fail_in(place):
    model = Net()
    optimizer = BadStep(model.parameters(), lr=1e-3) if place == "optimizer" else torch.optim.SGD(model.parameters())
    BadStep.turns = 0

    def batches():
        for step in range(6):
            if step == 4 and place == "generator":
                raise Boom("generator")
            yield step, torch.zeros(1, 8, dtype=torch.int64)

    for step, ids in batches():
        if step == 4 and place == "forward":
            model.head.register_forward_hook(lambda *_: (_ for _ in ()).throw(Boom("forward")))
        loss = model(ids).sum()
        (BadBackward.apply(loss) if step == 4 and place == "backward" else loss).backward()
        optimizer.step()


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer", "generator"])
def test_trouble_in_every_place_passes_on_and_the_profile_is_kept(place):
    with pytest.raises(Boom, match=place), profile(steps=5, warmup=1) as p:
        fail_in(place)
    assert p.summary["steps"] == 3
    assert by(p.modules, "module").loc["layers.0.up", "calls"] >= 1
    assert any("ended with Boom" in note for note in p.notes)
    with profile(steps=2, warmup=1) as after:
        train(3)
    assert after.summary["steps"] == 2


def test_an_interrupt_and_an_exit_keep_the_profile():
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), profile() as p:  # noqa: PT012
            train(1)
            raise error
        assert isinstance(p, Profile)
        assert p.summary["busy_ms"] > 0


def test_a_generator_that_is_left_open():
    def losses():
        with profile(steps=9, warmup=0) as p:
            kept.append(p)
            while True:
                train(1)
                yield

    kept: list[Profile] = []
    turns = losses()
    next(turns)
    next(turns)
    turns.close()
    assert kept[0].summary["busy_ms"] > 0
    assert not any("ended with" in note for note in kept[0].notes)


# ---------------------------------------------------------------------------------------------------------------- compiled


def compiled_net():
    torch._dynamo.reset()
    return torch.compile(Net(), backend="eager")


def test_compiled_code_is_a_row_and_eager_shows_inside():
    ids = torch.zeros(1, 4, dtype=torch.int64)
    net = compiled_net()
    net(ids)
    with profile() as p:
        net(ids)
    assert any("sk.profile(eager=True)" in note for note in p.notes)
    with profile(eager=True) as inside:
        net(ids)
    assert any("profiled eagerly" in note for note in inside.notes)
    assert "layers.0.up" in " ".join(inside.modules.module)
    assert not any("sk.profile(eager=True)" in note for note in inside.notes)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    net(ids)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted  # the stance is as it was
    torch._dynamo.reset()


def test_without_a_gpu_in_the_profile():
    with profile(gpu=False) as p:
        train(1)
    assert p.summary["busy_ms"] > 0
    assert p.summary["activity"] == "cpu"


# ---------------------------------------------------------------------------------------------------------------- notebooks


def test_lines_of_functions_defined_in_other_cells():
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    from surokit.profiler import magic
    from surokit.profiler.record import watch

    shell = interactiveshell.InteractiveShell()
    try:
        magic.load_ipython_extension(shell)
        shell.run_cell("import torch, surokit as sk\n\ndef read(x):\n    return x.item()", store_history=True)
        shell.run_cell("with sk.profile() as p:\n    total = read(torch.ones(1))", store_history=True)
        p = shell.user_ns["p"]
        assert (row(p.syncs).file, row(p.syncs).line) == ("cell [1]", 4)
        assert shell.user_ns["total"] == 1
    finally:
        watch.name_source = str


def slow_data(seconds=0.02):
    time.sleep(seconds)  # asleep


def test_sleep_is_named_by_its_line():
    with profile(steps=2, warmup=1) as p:
        train(3, each=lambda step, loss: slow_data())
    # a sleep takes no less, and whatever else the machine did is another gap
    named = p.gaps[(p.gaps.file == __file__) & (p.gaps.line == line_of("asleep", __name__))]
    assert (named.ms >= 20).any()
    assert sys.gettrace() is None or "pytest_cov" in sys.modules
