"""Recipes are values: derived, printed as algebra, hashable, stored as plain data."""

import pytest

import surokit as sk
from surokit.recipe import Recipe, block_of, find_recipe
from tests.refusals import refused


def test_every_named_recipe_survives_as_plain_data():
    for name, recipe in sk.recipes.items():
        assert recipe.name == name
        derived = recipe.keep("layers.0.*").keep_last(share=0.15).lora(rank=4).keep_small(64).keep_slower(8192, "H100")
        fitted = [recipe.lora(rank=4, init="loftq")] if recipe.storage else []
        for r in (recipe, derived, *fitted):
            assert Recipe.from_dict(r.to_dict()) == r
            assert hash(Recipe.from_dict(r.to_dict())) == hash(r)


def test_an_adapter_of_an_older_version_begins_as_it_did():
    data = sk.QNF4.lora(rank=4).to_dict()
    del data["adapter"]["init"]
    assert Recipe.from_dict(data) == sk.QNF4.lora(rank=4)
    assert sk.QNF4.adapter == sk.Lora(init="kaiming")


def test_how_adapters_begin_is_part_of_the_recipe():
    fitted = sk.QNF4.lora(rank=8, init="loftq")
    assert fitted != sk.QNF4.lora(rank=8)
    assert (
        str(fitted)
        == "qnf4   y = x W'   dx = dy W   W: frozen in nf4 blocks of 64, double   LoRA r=8 LoftQ   bf16: lm_head"
    )
    assert fitted.without_values == sk.QNF4.lora(rank=8)
    assert sk.FP8.without_values == sk.FP8
    assert sk.FP4.store(sk.QNF4).lora(init="loftq").store(sk.QFP8).adapter == sk.Lora(init="loftq")


@pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8], ids=lambda r: r.name)
def test_without_storage_there_is_no_error_to_begin_with(recipe):
    with refused(ValueError):
        recipe.lora(init="loftq")


@pytest.mark.parametrize(
    "options", [{"init": "pissa"}, {"init": "loftq", "alpha": 0}, {"init": "loftq", "alpha": -1.0}], ids=str
)
def test_a_beginning_that_there_is_not(options):
    with refused(ValueError):
        sk.QNF4.lora(**options)


def test_deriving_leaves_the_original_alone():
    before = str(sk.FP8)
    mine = sk.FP8.keep("layers.0.*").keep_last(2)
    assert str(sk.FP8) == before
    assert mine != sk.FP8
    assert str(mine).endswith("bf16: lm_head, layers.0.*, last 2 blocks")


def test_the_algebra_is_printed():
    assert sk.FP8.algebra() == (
        "y = Q(x)Q(w)'   dx = Q(dy)Q(w)   dw = Q(dy)'Q(x)   x,w: e4m3  dy: e5m2  delayed per tensor"
    )
    assert (
        sk.QFP8.lora(rank=8).algebra()
        == "y = x W'   dx = dy W   W: frozen in e4m3 128x128 blocks   where native: fp8-block   LoRA r=8"
    )
    half = Recipe("half", forward=sk.Gemm(sk.Quantizer(sk.E4M3, sk.PerRow()), sk.Quantizer(sk.E4M3, sk.PerRow())))
    assert half.algebra().startswith("y = Q(x)Q(w)'   dx = (dy)(w)   dw = (dy)'(x)   x,w: e4m3  per row")


NV, ROTATED = sk.Quantizer(sk.E2M1, sk.NV(16)), sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=16)
DRAWN = sk.Quantizer(sk.E2M1, sk.NV(16), rounding="stochastic")
CHOSEN = sk.Quantizer(sk.E2M1, sk.NV(16), four_over_six="mse")


@pytest.mark.parametrize(
    ("recipe", "formats"),
    [
        (sk.FP8_ROWWISE, "x,w,dy: e4m3  per row"),
        (sk.FP8_BLOCK, "x,dy: e4m3 1x128 blocks  w: e4m3 128x128 blocks"),
        (sk.FP4, "x,dy: e2m1 NV 1x16 blocks  w: e2m1 NV 16x16 blocks  dy stochastic  dw rotated"),
        (sk.MXFP4, "x,w,dy: e2m1  MX blocks of 32  dy stochastic  dx,dw rotated"),
        (
            sk.QUARTET_II,
            "y (x,w: e2m1  NV 1x16 blocks 4/6 mse)  dx (dy,w: e2m1  NV 1x16 blocks)  dw (dy,x: e2m1  NV 1x16 blocks)  "
            "x in dw,w in dx,dy eden  dx,dw rotated",
        ),
        (
            Recipe("mine", sk.FP4.forward, sk.MXFP8.grad_input, sk.FP8_BLOCK.grad_weight),
            "y (x: e2m1 NV 1x16 blocks  w: e2m1 NV 16x16 blocks)  dx (dy,w: e4m3  MX blocks of 32)  dw (dy,x: e4m3  1x128 blocks)",
        ),
        (
            Recipe("hybrid", sk.Gemm(NV, NV), sk.Gemm(DRAWN, CHOSEN)),
            "y (x,w: e2m1  NV 1x16 blocks)  dx (dy: e2m1 NV 1x16 blocks  w: e2m1 NV 1x16 blocks 4/6 mse)  dy stochastic",
        ),
        (
            Recipe("one side", sk.Gemm(NV, NV), sk.Gemm(NV, NV), sk.Gemm(DRAWN, ROTATED)),
            "x,w,dy: e2m1  NV 1x16 blocks  dy in dw stochastic  x in dw rotated",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_algebra_says_whose_format_and_scaling_it_is(recipe, formats):
    assert recipe.algebra().split("   ", 3)[3] == formats


def test_a_storage_does_not_hide_a_quantized_gradient():
    recipe = Recipe("stored", grad_input=sk.MXFP8.grad_input, storage=sk.QFP4.storage)
    assert "y = (x)(w)'   dx = Q(dy)Q(w)" in recipe.algebra()
    assert "W: frozen in e2m1" in recipe.algebra()


def test_rules_by_size_and_by_speed_are_printed():
    assert str(sk.FP8.keep_small(64)).endswith("bf16: lm_head, fewer than 64 features")
    assert str(sk.FP8.keep_slower(8192, "H200")).endswith("bf16: lm_head, no faster for 8,192 tokens on H200")


@pytest.mark.parametrize(
    "make",
    [
        lambda: sk.FP8.keep_slower("H200", 8192),  # type: ignore[arg-type]
        lambda: sk.FP8.keep_slower(True, "H200"),
        lambda: sk.FP8.keep_slower(8192.0, "H200"),  # type: ignore[arg-type]
        lambda: sk.FP8.keep_small("64"),  # type: ignore[arg-type]
        lambda: sk.Gemm(a="e4m3"),  # type: ignore[arg-type]
        lambda: sk.Gemm(b=sk.E4M3),  # type: ignore[arg-type]
        lambda: Recipe("mine", forward="fp8"),  # type: ignore[arg-type]
        lambda: Recipe("mine", grad_weight=sk.FP8),  # type: ignore[arg-type]
        lambda: Recipe("mine", storage="nf4"),  # type: ignore[arg-type]
        lambda: sk.FP8.store("qnf4"),  # type: ignore[arg-type]
        lambda: sk.Quantizer("e4m3", sk.PerRow()),  # type: ignore[arg-type]
        lambda: sk.Quantizer(sk.E4M3, sk.PerRow),  # type: ignore[arg-type]
    ],
)
def test_what_is_of_the_wrong_type_is_named(make):
    with refused(TypeError):
        make()


@pytest.mark.parametrize(
    ("recipe", "name", "kept"),
    [
        (sk.FP8, "lm_head", True),
        (sk.FP8, "model.layers.0.mlp.up_proj", False),
        (sk.FP8.also("lm_head"), "lm_head", False),
        (sk.FP8.keep("layers.0.*"), "model.layers.0.mlp.up_proj", True),
        (sk.FP8.keep("layers.0.*"), "model.layers.10.mlp.up_proj", False),
        (sk.FP8.keep("layers.0.*").also("up_proj"), "model.layers.0.mlp.up_proj", False),
        (sk.FP8.keep_last(2), "model.layers.9.mlp.up_proj", True),
        (sk.FP8.keep_last(2), "model.layers.7.mlp.up_proj", False),
        (sk.FP8.keep_last(2).keep_last(0), "model.layers.9.mlp.up_proj", False),
        (sk.FP8.keep_last(share=0.2), "model.layers.8.mlp.up_proj", True),
        (sk.FP8.keep_first(1), "model.layers.0.mlp.up_proj", True),
        (sk.FP8.keep_first(1), "lm_head", True),
    ],
)
def test_rules_choose_layers(recipe, name, kept):
    assert (recipe.kept_by(name, blocks=10) is not None) == kept


def test_blocks_are_found_by_number():
    assert block_of("model.layers.3.mlp.up_proj") == 3
    assert block_of("h.12") == 12
    assert block_of("lm_head") is None


def test_recipes_are_found_by_name_and_the_nearest_is_suggested():
    assert find_recipe("FP8_ROWWISE") is sk.FP8_ROWWISE
    assert find_recipe("fp8+lora") == sk.FP8.lora()  # as a plan's table of recipes calls it
    assert find_recipe("fp8+qfp8+lora") == sk.FP8.store(sk.QFP8).lora()
    with refused(ValueError):
        find_recipe("fp8-row")
    with refused(ValueError):
        find_recipe("zzz")
    with refused(ValueError):
        find_recipe("fp4 then bf16")
    with refused(ValueError):
        find_recipe("fp4 then fp4(forwrd=bf16) at 0.82")
    with refused(TypeError):
        find_recipe(8)  # type: ignore[arg-type]


def test_recipes_are_found_by_the_name_that_storing_gives():
    for name in ("fp4+qnf4", "FP4+QNF4", "nvfp4+qnf4"):
        assert find_recipe(name) == sk.FP4.store(sk.QNF4)
    both = sk.FP8_BLOCK.store(sk.QFP8)
    assert find_recipe(both.name) == both
    with refused(ValueError):
        find_recipe("fp4+qnf5")
    with refused(ValueError):
        find_recipe("fp9+qnf4")
    with refused(ValueError):
        find_recipe("fp4+fp8")
    with refused(ValueError):
        find_recipe("fp4+")


def test_bad_arguments_are_named():
    with refused(ValueError):
        sk.FP8.lora(rank=0)
    with refused(ValueError):
        sk.FP8.lora(targets=())
    with refused(ValueError):
        sk.FP8.keep_last(-1)
    with refused(ValueError):
        sk.FP8.keep_last()
    with refused(ValueError):
        sk.FP8.keep_last(share=2.0)
    short, long = (sk.Quantizer(sk.E4M3, sk.PerTensor(history=h)) for h in (2, 64))
    with refused(ValueError):
        Recipe("mixed", forward=sk.Gemm(short, long))
    with refused(ValueError):
        Recipe("")


def test_storage_goes_under_any_products():
    both = sk.FP8_BLOCK.store(sk.QFP8)
    assert both.name == "fp8-block+qfp8"
    assert both.storage == sk.QFP8.storage
    assert both.forward == sk.FP8_BLOCK.forward
    assert both.storage
    assert both.takes_codes(both.storage)  # multiplied as they are
    assert sk.QNF4.storage
    assert not sk.FP4.store(sk.QNF4).takes_codes(sk.QNF4.storage)
    assert sk.FP8.store(sk.Quantizer(sk.E2M1, sk.MX(32))).name == "fp8+e2m1"
    with refused(ValueError):
        sk.FP4.store(sk.FP8)


def test_native_products_of_a_storage():
    native = sk.QFP8.natively()
    assert (native.forward, native.grad_input) == (sk.FP8_BLOCK.forward, sk.FP8_BLOCK.grad_input)
    assert not native.grad_weight.quantized
    assert sk.FP8.natively() is sk.FP8


def test_nvfp4_is_another_name_for_fp4():
    assert sk.NVFP4 is sk.FP4
    assert find_recipe("NVFP4") is sk.FP4
    assert sk.FP4.keep_last(0).rules == sk.BF16.rules
    assert [sk.FP4.kept_by(f"layers.{i}.mlp.up_proj", 20) is not None for i in (16, 17)] == [False, True]


CHANGING = sk.FP4.then(sk.FP4.but(forward=sk.BF16), at=0.82)


def test_products_are_taken_from_other_recipes():
    mixed = sk.FP4.but(forward=sk.BF16, grad_input="mxfp8")
    assert (mixed.forward, mixed.grad_input) == (sk.BF16.forward, sk.MXFP8.grad_input)
    assert (mixed.grad_weight, mixed.rules) == (sk.FP4.grad_weight, sk.FP4.rules)
    assert find_recipe(mixed.name) == mixed
    assert sk.QFP8.but(forward=sk.FP8_BLOCK).where_native == ""
    with refused(ValueError):
        sk.FP4.but()
    with refused(ValueError):
        find_recipe("fp4(backward=bf16)")
    with refused(ValueError):
        sk.FP4.but(forward=mixed)


def test_a_recipe_says_what_a_run_goes_over_to():
    assert CHANGING.parts == (sk.FP4, sk.FP4.but(forward=sk.BF16))
    assert [CHANGING.part_at(done, 1000) for done in (0, 819, 820, 999)] == [0, 0, 1, 1]
    assert CHANGING.algebra() == sk.FP4.algebra()
    assert "   after 0.82 of the steps: fp4(forward=bf16)   y = (x)(w)'   dx" in str(CHANGING)
    assert sk.FP8.parts == (sk.FP8,)
    thrice = sk.FP8.then("mxfp8", at=100).then(sk.BF16, at=0.9)
    assert [thrice.part_at(done, 1000) for done in (99, 100, 899, 900)] == [0, 1, 1, 2]
    for recipe in (CHANGING, thrice, CHANGING.keep("layers.0.*")):
        assert Recipe.from_dict(recipe.to_dict()) == recipe
        assert hash(recipe) == hash(Recipe.from_dict(recipe.to_dict()))
    for recipe in (CHANGING, thrice, CHANGING.store(sk.QNF4), sk.FP8.then(sk.BF16, at=1e-5)):
        assert find_recipe(recipe.name) == recipe


def test_what_is_derived_holds_for_the_whole_run():
    derived = (
        CHANGING.keep_last(0).keep("*.down_proj").keep_small(64).keep_slower(8192, "H100").store(sk.QNF4).lora(rank=4)
    )
    first = sk.FP4.keep_last(0).keep("*.down_proj").keep_small(64).keep_slower(8192, "H100").store(sk.QNF4).lora(rank=4)
    assert derived.parts[0] == first
    later = derived.parts[1]
    assert (later.rules, later.storage, later.adapter, later.min_features) == (
        first.rules,
        first.storage,
        first.adapter,
        first.min_features,
    )
    assert derived.decode_once().numbers == derived
    assert [part.name for part in CHANGING.but(grad_weight="fp8").parts] == [
        "fp4(grad_weight=fp8)",
        "fp4(forward=bf16)(grad_weight=fp8)",
    ]


@pytest.mark.parametrize("at", [-1, 1.0, 1.5, float("nan")])
def test_a_change_comes_within_the_run(at):
    with refused(ValueError):
        sk.FP4.then(sk.BF16, at=at)


def test_what_a_run_cannot_go_over_to_is_refused():
    with refused(TypeError):
        sk.FP4.then(sk.BF16, at="0.9")  # type: ignore[arg-type]
    with refused(ValueError):
        sk.FP4.then(CHANGING, at=0.9)
    with refused(ValueError):
        sk.FP4.then(sk.QFP8, at=0.9)
    with refused(ValueError):
        sk.FP4.then(sk.FP4.lora(), at=0.9)
    with refused(ValueError):
        sk.QFP8.then(sk.QFP8.keep("layers.0.*"), at=0.9)  # it would store other layers
    assert sk.QFP8.lora(init="loftq").then("qfp8", at=0.9).parts[1] == sk.QFP8
    with refused(ValueError):
        CHANGING.then(sk.BF16, at=0.8)
    with refused(ValueError):
        CHANGING.part_at(3)
