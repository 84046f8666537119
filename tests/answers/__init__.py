"""Whether a change of the house changes an answer: the same questions to two revisions, compared exactly.

    python -m tests.answers main~3                          what is committed and changed since then, all but `kernels`
    python -m tests.answers main~3 --only plans,profiles

trees.py   lays both revisions out in a temporary folder, and asks each in a process of its own
plans.py, profiles.py, reports.py, runs.py, folders.py, kernels.py    the questions, of public names only
book.py    writes an answer as plain data, a line each
walk.py    plain data of anything: what it says and not where its class is defined
compare.py two such files, and the first differences by name
"""
