"""Divide a model among the processes of a run, with torch's own machinery: DistributedDataParallel, FSDP2, DTensor.

layout.py       how many processes hold a shard and how many a copy: Parallel
processes.py    the processes that train together, and what they tell each other
spread.py       a model over the processes of a layout
gather.py       what is gathered of each weight: codes.py where its layer quantizes it, else numbers
exchange.py     what every process says, for all to know a step later
wire.py         the bytes that processes send each other in a step
"""
