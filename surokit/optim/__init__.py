"""This part has the optimizers and schedules by which a training step updates its parameters.

adamw.py     AdamW and AdamW8bit on torch's fused kernel and on ours
muon.py      Muon for hidden matrices, AdamW for everything else
matrices.py  which parameters of a model are hidden matrices
owners.py    which process works on which of them, and what is sent
parts.py     what a process holds of a tensor that is divided
spec.py      the specification of an optimizer without its parameters: AdamW(lr=3e-4)
states.py    parameter groups, and states of an AdamW read from another's
tensors.py   shards, their norm, and the scale and mask of a step
schedule.py  Cosine and what else gives a factor of the learning rate
"""
