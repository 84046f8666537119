"""What type checkers and editors see of the lazy table in __init__.py; a test keeps the two equal."""

from typing import Any

from surokit import bench as bench
from surokit import formats as formats
from surokit import integrations as integrations
from surokit import kernels as kernels
from surokit import models as models
from surokit import nn as nn
from surokit import offload as offload
from surokit import planner as planner
from surokit import profiler as profiler
from surokit import racing as racing
from surokit import texts as texts
from surokit import train as train
from surokit import widgets as widgets
from surokit.accuracy import compare as compare
from surokit.agreement import Parity as Parity
from surokit.agreement import parity as parity
from surokit.calibration import calibrate as calibrate
from surokit.convert import apply as apply
from surokit.convert import precision as precision
from surokit.data import chat as chat
from surokit.data import load_tokenizer as load_tokenizer
from surokit.data import text as text
from surokit.data import train_tokenizer as train_tokenizer
from surokit.environment import doctor as doctor
from surokit.formats import BNB_FP4 as BNB_FP4
from surokit.formats import E2M1 as E2M1
from surokit.formats import E4M3 as E4M3
from surokit.formats import E5M2 as E5M2
from surokit.formats import E8M0 as E8M0
from surokit.formats import NF4 as NF4
from surokit.fusion import Fusion as Fusion
from surokit.live import Live as Live
from surokit.models import Decoder as Decoder
from surokit.models import DecoderConfig as DecoderConfig
from surokit.models import generate as generate
from surokit.models import load as load
from surokit.models import load_adapter as load_adapter
from surokit.models import merge as merge
from surokit.models import save as save
from surokit.models import save_adapter as save_adapter
from surokit.models import unmerge as unmerge
from surokit.models.fuse import fuse as fuse
from surokit.offload import OffloadAdamW as OffloadAdamW
from surokit.offload import ZenFlow as ZenFlow
from surokit.offload import offload_activations as offload_activations
from surokit.offload import offload_weights as offload_weights
from surokit.planner import CHINCHILLA as CHINCHILLA
from surokit.planner import CHINCHILLA_REPLICATED as CHINCHILLA_REPLICATED
from surokit.planner import KAPLAN as KAPLAN
from surokit.planner import Gpu as Gpu
from surokit.planner import Plan as Plan
from surokit.planner import Price as Price
from surokit.planner import fit_scaling as fit_scaling
from surokit.planner import plan as plan
from surokit.planner import plot_memory as plot_memory
from surokit.profiler import Monitor as Monitor
from surokit.profiler import Profile as Profile
from surokit.profiler import activity as activity
from surokit.profiler import profile as profile
from surokit.quantized import Quantized as Quantized
from surokit.quantized import quantize as quantize
from surokit.quantizer import MX as MX
from surokit.quantizer import NV as NV
from surokit.quantizer import Block as Block
from surokit.quantizer import NFBlock as NFBlock
from surokit.quantizer import PerRow as PerRow
from surokit.quantizer import PerTensor as PerTensor
from surokit.quantizer import Quantizer as Quantizer
from surokit.racing import Race as Race
from surokit.racing import race as race
from surokit.recipe import BF16 as BF16
from surokit.recipe import FP4 as FP4
from surokit.recipe import FP8 as FP8
from surokit.recipe import FP8_BLOCK as FP8_BLOCK
from surokit.recipe import FP8_CURRENT as FP8_CURRENT
from surokit.recipe import FP8_ROWWISE as FP8_ROWWISE
from surokit.recipe import MXFP4 as MXFP4
from surokit.recipe import MXFP8 as MXFP8
from surokit.recipe import NVFP4 as NVFP4
from surokit.recipe import QFP4 as QFP4
from surokit.recipe import QFP8 as QFP8
from surokit.recipe import QNF4 as QNF4
from surokit.recipe import Gemm as Gemm
from surokit.recipe import Lora as Lora
from surokit.recipe import Recipe as Recipe
from surokit.recipe import recipes as recipes
from surokit.train import AdamW as AdamW
from surokit.train import AdamW8bit as AdamW8bit
from surokit.train import Cosine as Cosine
from surokit.train import Record as Record
from surokit.train import Session as Session
from surokit.train import fit_to_time as fit_to_time
from surokit.train import numerics as numerics
from surokit.tuning import tune as tune
from surokit.widgets import plot_errors as plot_errors
from surokit.widgets import plot_runs as plot_runs
from surokit.widgets.follow import watch as watch

__version__: str
_NAMES: dict[str, str]
_MODULES: set[str]
__all__: list[str]

def load_ipython_extension(ipython: Any) -> None: ...
