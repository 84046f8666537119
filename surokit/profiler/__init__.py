"""The profiler shows where the time of a training step goes and which causes it is lost to.

record/      records a block of code while it runs (hooks, torch.profiler), or reads a trace file: gives a Recording
analysis/    turns a Recording into tables: who asked for each piece of work, what it was for, what was lost to which cause
report/      turns the tables into a Profile, which is shown and compared, whose advice is tried, and which is merged over ranks
monitoring/  measures a running loop all the time: Monitor, windows of a profile, the device's state
magic.py     defines %surogate_profile and %%surogate_profile; only this file knows IPython
"""

from surokit.profiler.monitoring.monitor import Monitor
from surokit.profiler.monitoring.windows import activity
from surokit.profiler.record.capture import profile, profile_calls
from surokit.profiler.report.profile import Profile
from surokit.profiler.report.ranks import RankProfiles

__all__ = ["Monitor", "Profile", "RankProfiles", "activity", "profile", "profile_calls"]
