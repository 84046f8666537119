"""The profiler: where does the time of a training step go, and what is it lost to?

record/      a block of code while it runs (hooks, torch.profiler), or a trace file -> Recording
analysis/    Recording -> tables: who asked for each piece of work, what it was for, what was lost to which cause
report/      tables -> Profile: what is shown, compared, advised and tried
monitoring/  what is measured all the time: Monitor, windows of a profile, the device's state
magic.py     %surogate_profile and %%surogate_profile; only this file knows IPython
"""

from surokit.profiler.monitoring.monitor import Monitor
from surokit.profiler.monitoring.windows import activity
from surokit.profiler.record.capture import profile, profile_calls
from surokit.profiler.report.profile import Profile

__all__ = ["Monitor", "Profile", "activity", "profile", "profile_calls"]
