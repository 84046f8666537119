"""A plain checkout is enough: the package finds its kernels where nothing was installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# without what an installation from the folder adds, which finds the same files
FINDS = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", repr(finder)).lower()]
import surokit.kernels.cuda, surokit.kernels.reference, surokit.kernels.triton
import torch
from surokit.kernels import new_key
print(surokit.kernels.reference.__file__, new_key(torch.device("cpu"), seed=1).shape)
"""


def test_without_an_installation_the_kernels_are_found():
    done = subprocess.run([sys.executable, "-c", FINDS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == str(ROOT / "kernels" / "reference" / "__init__.py")
