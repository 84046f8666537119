"""Run `surokit plan`: the arguments of `sk.plan` under their own names, and the questions that a plan answers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.cli.options import add_with_examples, check_picture, number, price, print_json

if TYPE_CHECKING:
    from surokit.planner.inverse.recipe_choice import RecipeChoice
    from surokit.planner.planning import Plan


_EXAMPLES = """\
examples:
  surokit plan Qwen/Qwen3-8B --recipe qfp8 --batch 2 --length 2048 --gpu H100        does it fit, how long is a step
  surokit plan 405e9 --tokens 15.6e12 --gpus 16000 --gpu H100 --mfu 0.4               how long is a run
  surokit plan my/model --batch 2 --length 2048 --gpu H100 --recipes                  which recipe

What a note calls batch= is --batch here. What is not given is left out, and a note says what to give."""


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    plan = add_with_examples(
        commands,
        "plan",
        help="FLOPs, time, cost and memory of a run",
        usage="surokit plan what [--recipe NAME] [--batch N] [--length N] [--gpu NAME] [--tokens N] [...]",
        examples=_EXAMPLES,
    )
    plan.add_argument(
        "what",
        help="number of parameters (405e9), a folder or config.json, or a model of the Hub (org/name)",
    )
    given = plan.add_argument_group("arguments of the plan")
    for name, text in {
        "--tokens": "tokens of the whole run",
        "--gpus": "number of GPUs",
        "--tflops-per-gpu": "achieved TFLOPS of one GPU",
        "--mfu": "or its share of the dense BF16 peak",
        "--goodput": "share of the hours that makes progress (1)",
        "--batch": "sequences of a micro-batch, on each GPU, or on those that share a model",
        "--length": "tokens of a sequence",
        "--accumulate": "micro-batches a step (1)",
        "--recompute-blocks": "blocks that backward computes again (all, with --recompute)",
        "--zero": "ZeRO stage over the GPUs, 0 to 3 (0)",
        "--tensor-parallel": "GPUs that share each layer, and the tokens between its products (1)",
        "--pipeline-parallel": "stages of layers, in the order 1F1B (1)",
        "--virtual-stages": "parts of a stage's layers that take turns (1)",
        "--expert-parallel": "GPUs that each have a part of the experts (1)",
        "--slack": "share of memory on top, for fragmentation and workspace (0.1)",
        "--between-gb-s": "GB/s that one GPU has between nodes, one direction",
    }.items():
        given.add_argument(name, type=number, help=text, metavar="N")
    given.add_argument("--usd-per-gpu-hour", type=price, metavar="USD", help="price, or a range such as 1.8-3.2")
    for name, text in {
        "--gpu": "name in the hardware table, such as H100",
        "--recipe": "name of a recipe, such as fp8 or qfp8 (nothing is quantized)",
        "--attention": "counts the keys that a token sees, or all: causal or full (causal)",
        "--recompute": "what backward computes again: none, selective, mlp or full (none)",
        "--optimizer": "adamw, adamw8bit, muon, zenflow, offloadadamw or sgd (adamw)",
        "--state-dtype": "dtype of the optimizer's moments (the weights' own)",
        "--dtype": "dtype of weights and gradients: bf16, fp16 or fp32 (bf16)",
        "--logits": "fused with the loss, or whole (as the layers do)",
        "--layers": "whose layers compute: surokit or transformers (surokit, where it has them)",
        "--fusion": "operations computed together, as sk.fuse does: none or fused (none)",
        "--engine": "who makes the kernels, for times: eager, compiled or fused (fused with --fusion, else eager)",
        "--attention-kernel": "who computes attention, for times: sdpa, flash3 or triton (as the engine has it)",
        "--transposed": "W' of frozen quantized weights, with --fusion fused: cached, or 'on the fly'",
    }.items():
        given.add_argument(name, metavar="NAME", help=text)
    given.add_argument("--lora", type=number, metavar="RANK", help="train an adapter of this rank; the rest is frozen")
    given.add_argument("--graphs", action="store_true", default=None, help="a step captured as CUDA graphs")
    given.add_argument("--master", action="store_true", default=None, help="float32 masters of the weights")
    given.add_argument("--offload-weights", action="store_true", default=None, help="weights of blocks on the host")
    on_host = "activations on the host, or only the inputs of blocks"
    given.add_argument("--offload-activations", nargs="?", const=True, choices=["inputs"], help=on_host)
    states = "the optimizer's states on the host, where the GPU reads them (paged optimizers)"
    given.add_argument("--offload-states", action="store_true", default=None, help=states)
    in_backward = "each weight is updated as its gradient arrives"
    given.add_argument("--optimizer-in-backward", action="store_true", default=None, help=in_backward)
    given.add_argument(
        "--inference", dest="training", action="store_false", default=None, help="a forward pass and its KV cache"
    )
    asked = plan.add_argument_group("questions")
    asked.add_argument(
        "--fits", type=number, metavar="GIB", help="does it fit in so many GiB? These questions take it for the GPU's"
    )
    asked.add_argument(
        "--recipes",
        action="store_true",
        help="the same run in every recipe: time, memory, native or not; with --fitting as it is made to fit",
    )
    asked.add_argument("--fitting", action="store_true", help="what would make it fit, and what each remedy costs")
    asked.add_argument(
        "--faster", action="store_true", help="what would make a step faster, and what memory that takes"
    )
    asked.add_argument(
        "--host-gib",
        type=number,
        metavar="GIB",
        help="the host's memory for each GPU, for --fitting and --faster (256)",
    )
    asked.add_argument("--largest", choices=("batch", "length", "layers", "parameters"), help="the largest that fits")
    asked.add_argument("--days", type=number, metavar="N", help="how many GPUs are done in so many days?")
    asked.add_argument(
        "--serving",
        type=number,
        nargs=2,
        metavar=("IN", "OUT"),
        help="how fast are requests of so many tokens served (512 128)?",
    )
    asked.add_argument("--concurrency", type=number, metavar="N", help="sequences served at once (as many as fit)")
    asked.add_argument("--plot", type=Path, metavar="FILE", help="memory as a picture: .png, .svg or .pdf")
    asked.add_argument("--all", action="store_true", help="every figure, how it is known, and the notes")
    asked.add_argument("--json", action="store_true", help="the same as JSON")
    plan.set_defaults(run=run)


_QUESTIONS = (
    "fits",
    "fitting",
    "faster",
    "host_gib",
    "recipes",
    "largest",
    "days",
    "serving",
    "concurrency",
    "plot",
    "all",
    "json",
)


def run(arguments: argparse.Namespace) -> int:
    """Print a plan in short, whole or as JSON, and the answers to what was asked."""
    from surokit.planner import plan

    check_picture(arguments.plot)
    apart = ("command", "run", "argv", "what", "lora", *_QUESTIONS)
    given = {k: v for k, v in vars(arguments).items() if v is not None and k not in apart}
    if arguments.lora is not None:
        from surokit.recipe import find_recipe

        given["recipe"] = find_recipe(given.get("recipe", "bf16")).lora(rank=arguments.lora)
    planned = plan(arguments.what, **given)
    # every answer is there before a word is printed, so that an error stands alone
    answers = answers_of(planned, arguments)
    if arguments.json:
        lines = [line.__dict__ for line in planned.lines()]
        found = {name: answer for name, (answer, _) in answers.items()}
        said = {"title": planned.title, "answers": planned.answers, "lines": lines, "notes": planned.all_notes}
        print_json({**said, **found})
    else:
        first = str(planned) if arguments.all else _in_short(planned, "fitting" in answers, arguments.host_gib)
        print("\n\n".join([first, *(text for _, text in answers.values())]))
    return 0


def _in_short(planned: Plan, with_fitting: bool, host_gib: float | None) -> str:
    """Return what a person acts on: whether the plan fits and what would, its time and cost, what a step waits for, and the fastest
    recipe."""
    from surokit.planner.words import narrow_moments

    said = [answer.partition("; plan.fitting()")[0] for answer in planned.answers]
    said += [f"Computes {units.value(planned.flops, 'FLOP')} in all"] if planned.flops is not None else []
    if planned.room_gib is not None and planned.memory.gib > planned.room_gib and not with_fitting:
        found = planned.fitting(host_gib=host_gib)
        time = found.plan and found.plan.step_time
        takes = (
            f"; a step takes {units.value(time.ms, 'ms')} ({time.kind})"
            if time and planned.time.rate_kind != "given"
            else ""
        )
        said.append(f"What helps: {found.sentence}{takes}")
        said += [f"As options: {_as_options(planned, way.changes)}" for way in found.ways[:1]]
    if moments := narrow_moments(planned):
        said.append(moments[0].upper() + moments[1:])
    if (likely := planned.likely) is not None:
        most = sorted(likely.made_of.items(), key=lambda part: -part[1])[:4]
        said.append(f"Likely goes into {', '.join(f'{name} {ms / likely.step_ms:.0%}' for name, ms in most)}")
    if (step := planned.binds().time) is not None:
        if likely is None:
            said.append(f"Of what the GPU does in a step, {step.share:.0%} is bound by {step.term}")
        said += [f"Faster: {step.remedy}"] if step.remedy else []
    notes = f" and {units.counted(len(planned.all_notes), 'note')}" if planned.all_notes else ""
    return "\n  ".join([f"Plan: {planned.title}", *said, f"--all prints every figure{notes}"])


def answers_of(planned: Plan, arguments: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Return what was asked beside the plan: name -> (the answer as data, the answer in words)."""
    from surokit.planner.inverse import questions, recipe_choice
    from surokit.planner.inverse.changes import merged

    gib = arguments.fits
    answers: dict[str, tuple[Any, str]] = {}
    if gib is not None:
        fits = planned.fits(gib)
        words = f"  {'fits' if fits else 'does not fit'} in {gib:g} GiB: {units.gib(planned.memory.gib)}"
        answers["fits"] = (fits, f"{words}, most of it {planned.memory.largest.name}")
    fitted = None
    if arguments.fitting:
        found = planned.fitting(gib=gib, host_gib=arguments.host_gib)
        tables = {"ways": found.together(), "remedies": found.table()}
        options = [("the first", way.changes) for way in found.ways[:1]]
        for way, then in found.faster_still:
            changes = merged([way.changes, *(change.changes for change in then)])
            options.append((units.value(then[-1].step_ms, "ms"), changes))
        written = {name: _as_options(planned, changes) for name, changes in options}
        lines = [str(found), *(f"  as options, {name}: {text}" for name, text in written.items())]
        data = {name: table.to_dict("records") for name, table in tables.items()}
        answers["fitting"] = ({"sentence": found.sentence, "options": written, **data}, "\n".join(lines))
        fitted = found.plan
    if arguments.faster:
        quicker = (fitted or planned).faster(gib=gib, host_gib=arguments.host_gib)
        whose = "of the first that fits: " if fitted not in (None, planned) else ""
        answers["faster"] = (quicker.table().to_dict("records"), f"  {whose}{quicker}")
    if arguments.largest is not None:
        most = questions.largest(planned, arguments.largest, gib=gib)
        room = f"{gib:g} GiB" if gib is not None or planned.gpu is None else f"{planned.gpu.name}'s memory"
        answers["largest"] = ({arguments.largest: most}, f"  largest {arguments.largest} that fits in {room}: {most:,}")
    if arguments.days is not None:
        gpus = questions.gpus_for(planned, days=arguments.days)
        done = planned.but(gpus=gpus)
        words = f"  done within {arguments.days:g} days on {gpus:,} GPUs: {done.days:.2f} days"
        answers["gpus"] = (gpus, words + (f", {units.span(*done.usd_range, 'USD')}" if done.usd_range else ""))
    if arguments.recipes:
        rows = recipe_choice.compare_recipes(fitted or planned, gib=gib)
        title = f"every recipe: {(fitted or planned).title}"
        answers["recipes"] = ([_choice_data(row) for row in rows], f"  {title}\n{_choices_text(rows)}")
    if arguments.serving is not None or arguments.concurrency is not None:
        prompt, output = arguments.serving or (512, 128)
        served = planned.serving(prompt, output, arguments.concurrency, gib=gib)
        answers["serving"] = ([line.__dict__ for line in served.lines()], str(served))
    if arguments.plot is not None:
        answers["picture"] = (str(arguments.plot), f"  picture: {_plot(planned, arguments)}")
    return answers


def _as_options(planned: Plan, changes: Mapping[str, Any]) -> str:
    """Return the changes of a plan's arguments as options of this command, and which of its own to leave out."""
    said: list[str] = []
    given = planned.but(**changes).given
    left_out = [f"--{name.replace('_', '-')}" for name in planned.given if name not in given]
    for name, value in changes.items():
        option = f"--{name.replace('_', '-')}"
        if name == "recipe":
            said += [option, value.name, *(["--lora", str(value.adapter.rank)] if value.adapter else [])]
        elif value is False:
            left_out.append(option)
        elif value is not None:
            said += [option, *([] if value is True else [str(value)])]
    without = f"{', ' * bool(said)}without {' '.join(left_out)}" if left_out else ""
    return f"{' '.join(said)}{without}"


def _choice_data(row: RecipeChoice) -> dict[str, Any]:
    return {name: value for name, value in row.__dict__.items() if name != "recipe"}


def _choices_text(rows: Sequence[RecipeChoice]) -> str:
    from surokit.tables import text_table

    def words(row: RecipeChoice) -> tuple[str, ...]:
        time = "" if row.step_ms is None else units.value(row.step_ms, "ms")
        gain = "" if row.speedup is None else f"{row.speedup:.2f} times {row.against}"
        fits = {True: "fits", False: "too large", None: ""}[row.fits]
        return (row.name, time, row.kind, gain, units.gib(row.gib), fits, row.products, "fastest" * row.fastest)

    header = ("recipe", "step", "", "as fast as", "memory", "", "products", "")
    table = text_table([words(row) for row in rows], header=header, right=(1, 4), indent="    ")
    return f"{table}\n    native: on the GPU's tensor cores of that format; emulated: rounded to it, and computed in bfloat16"


def _plot(planned: Plan, arguments: argparse.Namespace) -> Path:
    from surokit.planner.inverse.recipe_choice import compare_recipes
    from surokit.planner.picture import plot_memory

    path: Path = arguments.plot
    plans = {planned.title: planned}
    if arguments.recipes:
        plans = {row.name: planned.but(recipe=row.recipe) for row in compare_recipes(planned)}
    plot_memory(plans, gib=arguments.fits).savefig(path, dpi=150)
    return path
