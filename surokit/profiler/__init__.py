"""The profiler: where does the time of a training step go, and what is it lost to?

capture (torch, hooks) -> Recording -> analysis, on the interval algebra of timeline -> Profile (report, picture,
advice, trace files). Only `magic` knows a notebook.
"""

from surokit.profiler.capture import profile, profile_calls
from surokit.profiler.monitor import Monitor
from surokit.profiler.report import Profile
from surokit.profiler.windows import activity

__all__ = ["Monitor", "Profile", "activity", "profile", "profile_calls"]
