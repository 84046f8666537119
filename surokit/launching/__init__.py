"""Start the processes of a run from a notebook's cell or a shell, on torchelastic's agent.

call.py         a function with its arguments, carried to another process
child.py        what each process does: take the call, do it, write down how it ended
output.py       lines of all processes, as they come
agent.py        torchelastic's agent
outcome.py      how the processes ended, with the words of the one that failed first
launch.py       surokit.launch: start, show, stop, start anew
"""
