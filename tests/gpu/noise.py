"""How far two runs of one thing are apart on a device: the measure for whether a third one is the same thing.

cuDNN's attention adds up its gradients in another order every time, so that bits are no promise; a coarse format, each layer and
each step make more of it. A test therefore does the plain thing twice. What it compares may be three times as far from the
first as the second is: at least `floor`, where two were near by chance, at most `most`, beyond which a defect would pass.
On a CPU two runs have the same bits, so there only the floor counts.
"""

import numpy as np

TIMES = 3.0


def apart(one, other):
    """Largest relative difference of two series."""
    return float(np.abs(np.asarray(one) / np.asarray(other) - 1).max())


def allowed(noise, floor, most):
    return min(max(floor, TIMES * noise), most)


def assert_near(found, plain, again, floor, most):
    """`found` is no further from `plain` than the noise of the device allows, which `again`, the same as `plain`, shows."""
    gap, noise = apart(found, plain), apart(again, plain)
    print(f"{gap:.1e} apart, where two plain runs are {noise:.1e} apart")
    assert gap <= allowed(noise, floor, most), f"{gap:.1e} apart, where two plain runs are {noise:.1e} apart"
