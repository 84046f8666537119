"""Runs as their folders hold them: what training writes, and what panels, `watch` and races read. A reader needs no torch.

records.py    Record, Records: the numbers of each step, in memory and in records.jsonl
jsonl.py      the lines of records.jsonl: how they are written, and read back as columns
status.py     RunInfo and run.json: what a run is, how it stands, a heartbeat
health.py     Health: phases and events of a run, from its numbers
smoothing.py  the smoothed loss that is told of a run
requests.py   the files by which any process asks a run to stop, pause or save
locks.py      a lock for values that are copied
"""
