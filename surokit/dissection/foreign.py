"""Train as other libraries do, from the same weights and adapters on the same tokens: transformers in a plain loop, with PEFT and
bitsandbytes where an adapter is trained, transformers' Trainer, and DeepSpeed.

The steps of such a loop are not ours to take one by one, so a `Steps` is told when each begins and ends, and measures between:
steps that are timed, one that is listened to for its memory, and a few that are profiled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from surokit.dissection import memory as memories
from surokit.dissection.changed import changed, digests
from surokit.dissection.deepspeed_engine import ZENFLOW, DeepSpeedLoop
from surokit.dissection.job import Job, build, set_attention
from surokit.dissection.loop import BETAS, CLIP, DECAY, TorchLoop, recomputed, set_adapters, with_peft
from surokit.dissection.planned import figures_of, trained
from surokit.dissection.summed import summed
from surokit.dissection.work import BEFORE, PROFILED, WARM_UP, Work, done_at
from surokit.models import Decoder, save
from surokit.planner import Plan, plan
from surokit.profiler import Profile, profile
from surokit.racing.comparability import digest_of
from surokit.ranks import rank_here
from surokit.recipe import Lora, find_recipe
from surokit.train.setup import Vocabulary

NEEDS = {
    "transformers": ("transformers",),
    "trainer": ("transformers", "accelerate"),
    "deepspeed": ("transformers", "deepspeed"),
}


class Foreign(Work):
    """A Foreign is a model of transformers under another library's loop; it can be measured as a Training is."""

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__(job, device)
        _check_installed(job)
        set_attention(job.setting)
        self.model, self.weights = _model(job, device)
        self.seen = Steps(self.model, job, device)
        self.batches = self._batches(self.seen.total, self.batch)
        if job.setting.engine != "trainer":  # which moves them itself
            self.batches = self._on_device(self.batches)

    def facts(self) -> dict[str, Any]:
        s = self.job.setting
        return {**super().facts(), "tokens_per_step": self.batch * s.length * s.accumulate * s.gpus}

    def steps(self) -> dict[str, Any]:
        # all of them: the loop of another library ends when it has taken them
        self.figures = figures_of(self.planned)  # while the model is whole
        with self.seen.watching():
            if self.job.setting.engine == "trainer":
                _by_trainer(self.model, self.batches, self.job, self.seen)
            else:
                _by_hand(self.model, self.batches, self.job, self.seen)
        losses = self.seen.losses[: WARM_UP + self.job.steps]
        return {
            "step_ms": [self.seen.ms / self.job.steps],
            "losses": [float(loss) for loss in losses],
            "work": {"changed": self.seen.changed} if self.seen.changed else {},
        }

    def observe(self) -> dict[str, Any]:
        s = self.seen
        assert s.profile is not None
        if self.job.keep and rank_here().is_first:
            s.profile.save(self.job.keep)
        return {"memory": s.memory, "planned": self.figures, "profile": summed(s.profile)}

    def attempt(self, batch: int) -> None:
        float(_loop(self.model, self.job).step(self._on_device(self._batches(1, batch))))

    def _batches(self, steps: int, batch: int) -> list[dict[str, Tensor]]:
        """Return the batches of so many steps, on the CPU."""
        s = self.job.setting
        n = s.gpus
        every = self.job.tokens.batches(steps * s.accumulate * n, batch, s.length, Vocabulary.of(self.model).size)
        return every[rank_here().number :: n]  # as a Session's processes: rank r of n reads the batches r, r + n, ...

    def _on_device(self, batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [{name: ids.to(self.device) for name, ids in one.items()} for one in batches]

    def planned(self, **changes: Any) -> Plan:
        s = self.job.setting
        how = trained(s, next(self.model.parameters()).dtype == torch.bfloat16)
        return plan(self.model, gpu=self.job.gpu, **{"batch": self.batch, "length": s.length, **how, **changes})


def _check_installed(job: Job) -> None:
    needs = [*NEEDS[job.setting.engine]]
    needs += ["peft"] * bool(job.setting.lora)
    needs += ["bitsandbytes"] * (
        find_recipe(job.setting.recipe).storage is not None or job.setting.optimizer == "adamw8bit"
    )
    for package in needs:
        if find_spec(package) is None:
            raise ImportError(
                f"engine={job.setting.engine} needs {package}, which is not installed: pip install {package}"
            )


def _model(job: Job, device: torch.device) -> tuple[Any, str]:
    """Return a model of transformers as the setting says, and a digest of the weights before that.

    A Decoder becomes one through a folder, with its weights.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    setting = job.setting
    torch.manual_seed(job.seed)
    model: Any = build(job.source)
    weights, dtype = digest_of(model.parameters()), next(model.parameters()).dtype
    with tempfile.TemporaryDirectory() as folder:
        stored = find_recipe(setting.recipe).storage is not None
        if isinstance(model, Decoder) or stored:
            save(model, folder) if isinstance(model, Decoder) else model.save_pretrained(folder)
            del model
            given: dict[str, Any] = {"dtype": dtype}
            if stored:
                given["quantization_config"] = BitsAndBytesConfig(
                    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
                )
            model = AutoModelForCausalLM.from_pretrained(folder, **given)
    model = model.to(device).train()
    model.config.use_cache = False
    if setting.attention in ("eager", "sdpa"):
        model.set_attn_implementation(setting.attention)
    if setting.recompute == "full":
        recomputed(model)
        if setting.lora:
            model.enable_input_require_grads()
    if setting.lora:
        model = with_peft(model, setting.lora, Lora(setting.lora).alpha)
        set_adapters(model)
    if setting.compile:
        model.compile()
    return model, weights


def _loop(model: nn.Module, job: Job) -> TorchLoop | DeepSpeedLoop:
    setting, named = job.setting, job.setting.optimizer
    if setting.engine == "deepspeed":
        return DeepSpeedLoop(
            model,
            job.lr,
            batch=int(setting.batch),
            zero=setting.zero or 2 * setting.on_host,  # its optimizer is on the host from stage 2 on
            accumulate=setting.accumulate,
            offload=setting.on_host,
            zenflow=ZENFLOW if named == "zenflow" else None,
        )
    return TorchLoop(model, job.lr, optimizer=str(named), eight_bit=named == "adamw8bit")


def _by_hand(model: nn.Module, batches: Sequence[Mapping[str, Tensor]], job: Job, seen: Steps) -> None:
    loop = _loop(model, job)
    seen.optimizer = loop.optimizer
    size = job.setting.accumulate
    for first in range(0, len(batches), size):
        seen.begin()
        seen.end(loop.step(batches[first : first + size]))


def _by_trainer(model: Any, batches: Sequence[Mapping[str, Tensor]], job: Job, seen: Steps) -> None:
    """Let transformers' Trainer take the steps, with the settings that the plain loop has."""
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            for batch in batches:
                for i in range(len(batch["input_ids"])):
                    yield {name: ids[i] for name, ids in batch.items()}

    class Told(TrainerCallback):
        def on_step_begin(self, *given: Any, **told: Any) -> None:
            seen.optimizer = told.get("optimizer")
            seen.begin()

        def on_step_end(self, *given: Any, **told: Any) -> None:
            seen.end(torch.stack(losses).sum())
            losses.clear()

    losses: list[Tensor] = []

    class Telling(Trainer):
        def training_step(self, *given: Any, **told: Any) -> Tensor:
            loss: Tensor = super().training_step(*given, **told)
            losses.append(loss.detach())
            return loss

    setting, on_cpu = job.setting, seen.device.type == "cpu"
    # of a launch of one process, in which it would distribute the model
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=int(setting.batch),
            gradient_accumulation_steps=setting.accumulate,
            max_steps=seen.total,
            learning_rate=job.lr,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0 if setting.optimizer == "sgd" else DECAY,
            max_grad_norm=CLIP,
            optim="sgd" if setting.optimizer == "sgd" else "adamw_torch" if on_cpu else "adamw_torch_fused",
            use_cpu=on_cpu,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=job.seed,
            remove_unused_columns=False,
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # several would be torch.nn.DataParallel
        Telling(model=model, args=arguments, train_dataset=Rows(), callbacks=[Told()]).train()


class Steps:
    """A Steps is told of every step of a loop, and measures: `total` are to be taken.

    ms: what the device took for all timed steps. losses: of all steps, those that are listened to or profiled too.
    """

    def __init__(self, model: nn.Module, job: Job, device: torch.device) -> None:
        self.model, self.device = model, device
        self.weights = digests(model)
        self.changed = ""  # what the engine did to the weights before the first step
        self.listened = WARM_UP + job.steps
        self.profiled = self.listened + 1
        self.total = self.listened if job.only_timed else self.profiled + BEFORE + PROFILED
        self.ms = 0.0
        self.losses: list[Tensor] = []
        self.memory: dict[str, Any] = {}
        self.profile: Profile | None = None
        self.optimizer: Any = None
        self._stack = ExitStack()
        self._began = 0.0
        self._listening: ExitStack | None = None

    def watching(self) -> ExitStack:
        """Return what ends the measuring, also where the loop fails."""
        return self._stack

    def begin(self) -> None:
        number = len(self.losses)
        if number == 0:
            self.changed = changed(self.model, self.weights)
        if number == WARM_UP:
            self._began = done_at(self.device)
        if number == self.listened:
            self._listen()
        if number == self.profiled:
            self.profile = self._stack.enter_context(profile(steps=PROFILED, warmup=BEFORE))

    def end(self, loss: Tensor) -> None:
        """End a step."""
        self.losses.append(loss)
        if self.profile is not None:
            self.profile.step()  # some engines step an optimizer several times, or none of torch's
        if len(self.losses) == self.listened:
            self.ms = 1e3 * (done_at(self.device) - self._began)
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _listen(self) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        rest = memories.held(self.model, optimizer)
        self._listening = self._stack.enter_context(ExitStack())
        listening = memories.listening(self.device, rest, self.model, optimizer)
        _, self.memory = self._listening.enter_context(listening)
