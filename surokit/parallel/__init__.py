"""Divide a model among the processes of a run, with torch's own machinery: DistributedDataParallel, FSDP2, DTensor.

layout.py       how many processes hold a shard and how many a copy: Parallel
spread.py       a model over the processes of a layout
gather.py       weights that FSDP2 gathers as codes and scales
"""
