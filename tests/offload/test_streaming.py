"""Streamed weights and activations under whatever a user does, in any order: always the numbers of the plain model."""

import contextlib
import copy
import gc
import io
import random
import signal
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.offload.activations import offload_activations
from surokit.offload.link import ThrottledLink
from surokit.offload.weights import offload_weights
from tests.offload.test_weights import FAST, Dropping, decoder, ids

SAMPLE, ACTIONS = 8, 12
KINDS = {"decoder": lambda: decoder(layers=4), "bf16": lambda: decoder(layers=3).bfloat16(), "dropout": Dropping}


class Late:
    """Seconds that a transfer comes late, each by another time; it can be pickled."""

    def __init__(self):
        self.draw = random.Random(0)

    def __call__(self):
        return self.draw.uniform(0, 0.001)


def link():
    return ThrottledLink(FAST, delay=Late(), late_fill=True)


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Failure(Exception):
    """On purpose."""


def fail(*_):
    raise Failure


class User:
    """Does the same with a plain model and one that is offloaded; `check` compares them, bit for bit."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.kind = self.draw.choice(list(KINDS))
        self.plain: Any = KINDS[self.kind]()
        self.model: Any = copy.deepcopy(self.plain)
        self.weights: Any = None
        self.activations: Any = None
        self.log: list[str] = []

    @property
    def both(self):
        return self.plain, self.model

    @property
    def blocks(self):
        return [m.layers if self.kind == "dropout" else m.model.layers for m in self.both]

    def do(self, name):
        self.log.append(name)
        getattr(self, name)()
        self.check()

    def check(self):
        for (name, p), q in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            assert type(q) is torch.nn.Parameter, (self.log, name)
            assert not hasattr(q, "borrowed"), (self.log, name)
            assert q.is_leaf, (self.log, name)
            assert torch.equal(p, q), (self.log, name)
            assert (p.grad is None) == (q.grad is None), (self.log, name)
            assert q.grad is None or torch.equal(p.grad, q.grad), (self.log, name)
        if self.weights is not None and not any("error" in name or name == "interrupt" for name in self.log):
            # of a pass that failed, errors and torch may hold what it had, until something else comes
            assert self.weights.peak_blocks <= self.weights.prefetch + 1, self.log
            assert self.weights.bytes_up == self.weights.link.bytes_up, self.log

    def loss(self, model, seed):
        torch.manual_seed(seed)
        tokens = ids(seed, rows=1 + seed % 2, length=4 + seed % 5)
        return model(input_ids=tokens, labels=tokens).loss

    def losses(self, number=1):
        """Of several batches, for both; None where nothing is to be differentiated."""
        seeds = [self.draw.randrange(100) for _ in range(number)]
        found = [[self.loss(model, seed) for seed in seeds] for model in self.both]
        assert all(torch.equal(*pair) for pair in zip(*found)), self.log
        return found if found[0][0].requires_grad else None

    # -- training

    def accumulate(self):
        for each in self.losses() or ():
            each[0].backward()

    def step(self):
        self.kept = None  # torch's fused optimizers would not let backward notice
        self.accumulate()
        kind = self.draw.choice([torch.optim.SGD, sk.AdamW, torch.optim.AdamW])
        clip, keep = self.draw.random() < 0.5, self.draw.random() < 0.5
        for model in self.both:
            if clip:
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
            if any(p.requires_grad for p in model.parameters()):
                kind([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
            model.zero_grad(set_to_none=keep)

    def forget(self):
        gc.collect()  # a pass that failed is held by its error's frames
        for model in self.both:
            model.zero_grad()

    def two_forwards(self):
        order = self.draw.choice([[0, 1], [1, 0], []])
        if not order:
            self.forget()  # onto others, two gradients of one backward are added one by one
        for each in self.losses(2) or ():
            for k in order:
                each[k].backward()
            if not order:
                (each[0] + each[1]).backward()

    def twice(self):
        for each in self.losses() or ():
            each[0].backward(retain_graph=True)
            each[0].backward()

    def forward_alone(self):
        self.kept = self.losses()

    def backward_of_it(self):
        """Whatever was done since."""
        for each in getattr(self, "kept", None) or ():
            each[0].backward()
        self.kept = None

    # -- without gradients

    def evaluate(self):
        mode, seed = self.draw.choice([torch.no_grad, torch.inference_mode]), self.draw.randrange(100)
        for model in self.both:
            model.eval()
        with mode():
            assert torch.equal(*(self.loss(model, seed) for model in self.both)), self.log
        for model in self.both:
            model.train()

    # -- what goes wrong

    def hooked(self):
        return self.draw.choice(list(self.blocks[1].modules())[1:])

    def error_in_forward(self):
        handle = self.hooked().register_forward_hook(fail)
        with contextlib.suppress(Failure), torch.set_grad_enabled(self.draw.random() < 0.7):
            self.loss(self.model, 0)
        handle.remove()

    def error_in_backward(self):
        def failing(module, given, output):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(fail)

        handle = self.hooked().register_forward_hook(failing)
        with contextlib.suppress(Failure, RuntimeError):
            self.loss(self.model, 0).backward()
        handle.remove()
        self.forget()

    def error_between_forward_and_backward(self):
        """The next backward is of a graph that was made before one that failed."""
        kept = self.losses()
        self.error_in_backward()
        for each in kept or ():
            each[0].backward()

    def interrupt(self):
        """A Ctrl-C at some moment of forward or backward."""
        before = [id(p) for p in self.model.parameters()]
        handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, self.draw.uniform(1e-4, 0.03))
                for _ in range(100):
                    self.loss(self.model, 0).backward()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            torch.set_grad_enabled(True)  # a context may have been left halfway
        assert before == [id(p) for p in self.model.parameters()], self.log
        self.forget()

    # -- what changes

    def offload_weights(self):
        kept = [] if self.draw.random() < 0.7 else [list(self.blocks[1])[: self.draw.randint(1, 2)]]
        options: dict[str, Any] = {"blocks": kept[0]} if kept else {}
        self.weights = offload_weights(self.model, prefetch=self.draw.randint(1, 5), link=link(), **options)

    def offload_activations(self):
        size, ahead = self.draw.choice([1, 64, 2000]), self.draw.randint(0, 3)
        self.activations = offload_activations(self.model, min_bytes=size, prefetch=ahead, link=link())

    def remove_weights(self):
        if self.weights is not None:
            self.weights.remove()
            self.weights = None

    def remove_activations(self):
        if self.activations is not None:
            self.activations.remove()
            self.activations = None

    def change_weights(self):
        self.kept = None  # backward would refuse
        k = self.draw.randrange(3)
        for model in self.both:
            with torch.no_grad():
                list(model.parameters())[-4 - k].mul_(1.5)

    def load(self):
        self.kept = None
        values = copy.deepcopy(self.model.state_dict())
        for model in self.both:
            model.load_state_dict(values)

    def freeze(self):
        self.kept = None
        which = [self.draw.random() < 0.3 for _ in self.blocks[0]]
        for blocks in self.blocks:
            for block, frozen in zip(blocks, which):
                block.requires_grad_(not frozen)
        self.forget()

    def convert(self):
        self.kept = None
        dtype = self.draw.choice([torch.float64, torch.float32])
        for model in self.both:
            model.to(dtype)

    def fuse(self):
        if self.kind != "dropout":
            self.kept = None
            recompute = self.draw.choice(["none", "selective", "full"])
            for model in self.both:
                sk.fuse(model, recompute=recompute)

    def copied(self):
        self.kept = None
        self.forget()
        self.model = self.draw.choice([copy.deepcopy, through_a_file])(self.model)
        if self.weights is not None:
            self.weights = next(m.forward.stream for m in self.blocks[1].modules() if hasattr(m, "computes_on"))
        self.activations = None


EVERY = [name for name, value in vars(User).items() if callable(value) and not name.startswith("_")]
EVERY = [name for name in EVERY if name not in ("do", "check", "loss", "losses", "hooked")]


def live(seed, actions=ACTIONS):
    user = User(seed)
    user.do(user.draw.choice(["offload_weights", "offload_activations"]))
    for _ in range(actions):
        user.do(user.draw.choice([*EVERY, "step", "step", "offload_weights"]))
    user.do("step")


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a Ctrl-C in a finalizer is only printed
@pytest.mark.parametrize("seed", range(SAMPLE))
def test_whatever_a_user_does(seed):
    live(seed)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_whatever_many_users_do(seed):
    live(seed, 3 * ACTIONS)
