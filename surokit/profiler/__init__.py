"""The profiler: where does the time of a training step go, and what is it lost to?

    capture (hooks, torch.profiler) or trace (a file) -> Recording -> analysis, on the interval algebra of timeline -> Profile

A Profile shows itself (report, picture), says what to do (advice) and tries it (verify), and sets what a module took beside what
this device could do (work: FLOPs and bytes; light). `Monitor` is the part that is always on. Only `magic` knows a notebook.
"""

from surokit.profiler.capture import profile, profile_calls
from surokit.profiler.monitor import Monitor
from surokit.profiler.report import Profile
from surokit.profiler.windows import activity

__all__ = ["Monitor", "Profile", "activity", "profile", "profile_calls"]
